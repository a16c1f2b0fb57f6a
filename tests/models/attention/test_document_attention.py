"""Document attention against a dense masked softmax in float64, and against PyTorch's own kernel's rounding."""

import random
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F

from lean_ft.models.attention.document_attention import document_attention
from lean_ft.models.attention.documents import num_product_shapes

LENGTHS = [1, 70, 64, 0, 129, 3, 5, 16, 9, 40, 33, 50]  # four of at most 64 tokens, and four of 16, are stacked
IMAGES = [(3, 9), (40, 64), (80, 135), (140, 230), (276, 280), (300, 330)]  # stretches of tokens that see each other


def image_ends() -> torch.Tensor:
    """Where each token's keys end, if the tokens of `IMAGES` see each other."""
    ends = torch.arange(1, sum(LENGTHS) + 1, dtype=torch.int32)
    for start, end in IMAGES:
        ends[start:end] = end
    return ends


def inputs(dtype: torch.dtype, heads: int = 6, kv_heads: int = 2, size: int = 16, scale: float = 1.0, offset=0.0):
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    query = torch.randn(num_tokens, heads, size, generator=generator) * scale
    key = torch.randn(num_tokens, kv_heads, size, generator=generator)
    value = torch.randn(num_tokens, kv_heads, size, generator=generator) + offset
    grad = torch.randn(num_tokens, heads, size, generator=generator).to(dtype)
    cu_seqlens = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
    return [x.to(dtype).requires_grad_() for x in (query, key, value)], cu_seqlens, grad


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rules) -> torch.Tensor:
    """One softmax over all tokens, with later, too distant and other documents' tokens masked."""
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    ends = image_ends() if "ends" in rules else torch.arange(1, len(document) + 1) + rules.get("num_ahead", 0)
    sees = torch.arange(len(document)) < ends[:, None]
    if "window" in rules:
        sees &= ~torch.ones(len(document), len(document)).tril(-rules["window"]).bool()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * rules.get("scale", query.shape[-1] ** -0.5)
    if "softcap" in rules:
        scores = rules["softcap"] * torch.tanh(scores / rules["softcap"])
    scores = scores.masked_fill(~(sees & (document[:, None] == document)), float("-inf"))
    if "sinks" in rules:
        scores = torch.cat((scores, rules["sinks"][:, None, None].expand(-1, len(document), 1)), -1)
    weights = scores.softmax(-1)[..., : len(document)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def relative_errors(result, leaves, grad, exact, exact_leaves) -> list[float]:
    grads = torch.autograd.grad(result, leaves, grad)
    exact_grads = torch.autograd.grad(exact, exact_leaves, grad.double())
    pairs = zip((result, *grads), (exact, *exact_grads), strict=True)
    return [((own - true).norm() / true.norm()).item() for own, true in pairs]


WHOLE, PARTS = 2**22, 6 * 129 * 7  # block sizes: all scores, and a few rows
RULES = [{"scale": 0.7}, {"window": 2}, {"window": 5}, {"window": 64}, {"window": 100}, {"softcap": 0.8}, {"sinks": 6}]
RULES += [{"sinks": 6, "window": 17, "softcap": 1.5, "scale": 0.3}, {"ends": True}, {"ends": True, "window": 17}]
RULES += [{"num_ahead": n, "window": n + 1, **capped} for n in (1, 16, 70) for capped in ({}, {"softcap": 0.8})]
RULES += [{"num_ahead": sum(LENGTHS)}, {"num_ahead": 128, "sinks": 6}]
CASES = [(6, 2, 16, rules, scores) for rules in RULES for scores in (WHOLE, PARTS)]
CASES += [(*heads, {}, WHOLE) for heads in ((6, 2, 16), (4, 4, 10), (3, 1, 64))]


@pytest.mark.parametrize(("heads", "kv_heads", "size", "rules", "block_scores"), CASES, ids=str)
def test_float32_equals_a_masked_softmax_in_float64(heads, kv_heads, size, rules, block_scores, monkeypatch):
    monkeypatch.setattr("lean_ft.models.attention.documents._BLOCK_SCORES", block_scores)
    leaves, cu_seqlens, grad = inputs(torch.float32, heads, kv_heads, size)
    if "sinks" in rules:
        leaves.append(torch.randn(6, generator=torch.Generator().manual_seed(1)).requires_grad_())
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    own, exact = ({**rules, **({"sinks": x[3]} if "sinks" in rules else {})} for x in (leaves, exact_leaves))
    result = document_attention(*leaves[:3], cu_seqlens, **own | ({"ends": image_ends()} if "ends" in own else {}))
    errors = relative_errors(result, leaves, grad, dense(*exact_leaves[:3], **exact), exact_leaves)
    assert max(errors) < 2e-6


def test_all_options_in_sixteen_bits_are_as_exact_as_the_plain_computation():
    leaves, cu_seqlens, grad = inputs(torch.bfloat16, scale=4.0, offset=3.0)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves.append(sinks.requires_grad_())
    rules = {"window": 17, "softcap": 5.0, "scale": 0.5}
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    own = document_attention(*leaves[:3], cu_seqlens, sinks=leaves[3], **rules)
    theirs = dense(*leaves[:3], sinks=leaves[3], **rules)
    errors = []
    for result in (own, theirs):
        exact = dense(*exact_leaves[:3], sinks=exact_leaves[3], **rules)
        errors.append(relative_errors(result, leaves, grad, exact, exact_leaves))
    for own_error, their_error in zip(*errors, strict=True):
        assert own_error < their_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (30.0, 0.0), (1.0, 20.0)])
def test_sixteen_bits_are_as_exact_as_pytorchs_kernel(dtype, scale, offset):
    """Large scores and values with a large common offset need careful products."""
    leaves, cu_seqlens, grad = inputs(dtype, scale=scale, offset=offset)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = dense(*exact_leaves)

    bounds = cu_seqlens.tolist()
    rows = [[x[a:b].transpose(0, 1)[None] for x in leaves] for a, b in pairwise(bounds) if a < b]
    kernel = [F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True) for row in rows]
    theirs = torch.cat([x[0].transpose(0, 1) for x in kernel])

    own_errors = relative_errors(document_attention(*leaves, cu_seqlens), leaves, grad, exact, exact_leaves)
    exact = dense(*exact_leaves)
    for own, their in zip(own_errors, relative_errors(theirs, leaves, grad, exact, exact_leaves), strict=True):
        assert own < 1.5 * their


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rules", [{}, {"num_ahead": 420}, {"sinks": 6, "softcap": 5.0}, {"ends": True}], ids=str)
def test_stacked_documents_have_the_bits_of_single_ones(rules, dtype, monkeypatch):
    leaves, cu_seqlens, grad = inputs(dtype)
    given = {"sinks": torch.randn(6).to(dtype), "ends": image_ends()}
    results = []
    for number in (4, 1000):
        monkeypatch.setattr("lean_ft.models.attention.documents._STACK", number)
        out = document_attention(*leaves, cu_seqlens, **{name: given.get(name, rule) for name, rule in rules.items()})
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(map(torch.equal, *results))


def test_other_documents_never_change_a_bit():
    (query, key, value), cu_seqlens, grad = inputs(torch.bfloat16)
    start, end = 71, 135  # the third document
    results = []
    for noise in (0.0, 100.0):
        leaves = [x.detach().clone() for x in (query, key, value)]
        for x in leaves:
            x[:start] += noise
            x[end:] -= noise
            x.requires_grad_()
        out = document_attention(*leaves, cu_seqlens)
        results.append([out[start:end], *(g[start:end] for g in torch.autograd.grad(out, leaves, grad))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.first(1)
@pytest.mark.parametrize(("longest", "num_packings", "bound"), [(300, 30, 30), (4096, 2, 159)])
def test_products_have_few_shapes_for_any_document_lengths(longest, num_packings, bound, monkeypatch):
    seen, multiply = set(), torch.bmm

    def noted(left, right):
        if left.dtype == torch.bfloat16:
            seen.add((left.shape, left.stride(), right.shape, right.stride()))
        return multiply(left, right)

    monkeypatch.setattr(torch, "bmm", noted)
    drawn, lengths = random.Random(0), set()
    for _ in range(num_packings):
        packing = [longest] + [round(longest ** drawn.random()) for _ in range(5)]
        lengths.update(packing)
        cu_seqlens = torch.tensor([0, *accumulate(packing)])
        leaves = [torch.randn(sum(packing), n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]
        out = document_attention(*leaves, cu_seqlens)
        out.backward(torch.ones_like(out))
    assert len(lengths) > 10  # without padding each would have its own shapes
    assert len(seen) <= num_product_shapes(longest) <= bound


def test_counting_shapes_does_not_loop_over_blocks():
    assert num_product_shapes(10**15) < 3000


@pytest.mark.parametrize("bounds", [[1, 420], [0, 200], [0, 500], [0, 100, 50, 420]])
def test_invalid_boundaries_are_refused(bounds):
    leaves, _, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 420"):
        document_attention(*leaves, torch.tensor(bounds))


def test_the_operator_passes_opcheck():
    leaves, cu_seqlens, _ = inputs(torch.float32)
    rules = None, None, None, None, 0, None, None, 0, None
    torch.library.opcheck(torch.ops.lean_ft.document_attention, (*leaves, cu_seqlens, *rules))


def test_autocast_does_not_narrow_the_scores():
    leaves, cu_seqlens, _ = inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = document_attention(*leaves, cu_seqlens)
    assert torch.equal(inside, document_attention(*leaves, cu_seqlens))
