"""Recurrent and convolution mixers against token-by-token recurrences; documents of a row do not see each other."""

import copy
import functools
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.generation import Sampling, sample
from lean_ft.memory import apply_memory
from lean_ft.models import Decoder, load_model
from lean_ft.models.state import chunks, convolution, linear_attention
from lean_ft.models.state.convolution import causal_convolution
from lean_ft.models.state.linear_attention import linear_attention as by_chunks
from lean_ft.settings import MemoryConfig

ROWS, TOKENS, KEY_HEADS, HEADS, KEY, VALUE = 2, 21, 2, 4, 3, 5
BOUNDS = [0, 3, 8, 8, 9, 16, 21, 21]  # starts at and inside chunks, three chunks, one token, empty documents
HYBRIDS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "granitemoehybrid", "bamba"]
HYBRIDS += ["falcon_h1", "nemotron_h"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """A few tokens then make several chunks and segments."""
    for module, name, size in (
        (linear_attention, "CHUNK", 4),
        (chunks, "CHUNK", 4),
        (linear_attention, "SEGMENT", 8),
        (convolution, "_BLOCK", 5),
    ):
        monkeypatch.setattr(module, name, size)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def by_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    bounds: list[int],
    state: Tensor,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state, token by token, by the gated delta rule or Mamba-2."""
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (query, key))
    if corrects:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        query = query * KEY**-0.5
    read = []
    for t in range(value.shape[1]):
        state = torch.zeros_like(state) if t in bounds and t else state
        state = state * log_decay[:, t, :, None, None].exp()
        known = torch.einsum("bhk,bhkv->bhv", key[:, t], state) if corrects else 0.0
        written = beta[:, t, :, None] * (value[:, t] - known)
        state = state + key[:, t, :, :, None] * written[:, :, None]
        read.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(read, 1), state


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("form", ["chunks", "segments"])
def test_both_forms_equal_a_token_by_token_recurrence(form, is_packed, corrects, monkeypatch):
    monkeypatch.setattr(linear_attention, "form_of", lambda key, value: form)
    rows = 1 if is_packed else ROWS
    query, key = (numbers(rows, TOKENS, KEY_HEADS, KEY, seed=i) for i in (0, 1))
    value, step, beta = (numbers(rows, TOKENS, HEADS, *size, seed=i) for i, size in ((2, (VALUE,)), (3, ()), (4, ())))
    log_decay, beta = -F.softplus(step), beta.sigmoid()
    state = torch.zeros(rows, HEADS, KEY, VALUE).double() if is_packed else numbers(rows, HEADS, KEY, VALUE, seed=5)
    cu_seqlens = torch.tensor(BOUNDS).int() if is_packed else None
    given = [query, key, value, log_decay, beta]
    expected, last = by_tokens(query, key, value, log_decay, beta, BOUNDS if is_packed else [], state, corrects)
    found, states = by_chunks(query, key, value, log_decay, beta, cu_seqlens, None if is_packed else state, corrects)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(states[-1], last.detach(), atol=1e-12, rtol=1e-10)
    grad = numbers(*found.shape, seed=6).detach()
    grads = [torch.autograd.grad(out, given, grad, retain_graph=True) for out in (found, expected)]
    for own, true in zip(*grads, strict=True):
        torch.testing.assert_close(own, true, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("taps", [1, 4, 7])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_convolution_sees_the_previous_tokens_of_its_document(is_packed, taps, activation):
    x, weight, bias = numbers(1 if is_packed else ROWS, TOKENS, 6, seed=0), numbers(6, taps, seed=1), numbers(6, seed=2)
    bounds = BOUNDS if is_packed else [0, TOKENS]
    parts = [F.pad(x[:, a:b].mT, (taps - 1, 0)) for a, b in pairwise(bounds) if a < b]
    expected = torch.cat([F.conv1d(part, weight[:, None], bias, groups=6) for part in parts], 2).mT
    expected = expected if activation is None else F.silu(expected)
    cu_seqlens = torch.tensor(bounds).int() if is_packed else None
    found = causal_convolution(x, weight, bias, cu_seqlens, activation)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    grad = numbers(*x.shape, seed=3).detach()
    grads = [torch.autograd.grad(out, (x, weight, bias), grad) for out in (found, expected)]
    for own, true in zip(*grads, strict=True):
        torch.testing.assert_close(own, true, atol=1e-12, rtol=1e-10)


def test_both_operators_pass_opcheck():
    query, key = (numbers(1, 9, 2, 3, seed=i) for i in (0, 1))
    value, decay = numbers(1, 9, 2, 5, seed=2), (-numbers(1, 9, 2, seed=3).detach().abs()).requires_grad_()
    bounds = torch.tensor([0, 4, 9]).int()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # gradients are tested above
    arguments = (query, key, value, decay, decay.detach().exp().requires_grad_(), bounds, None)
    torch.library.opcheck(torch.ops.lean_ft.linear_attention.default, arguments, test_utils=checks)
    arguments = (value.flatten(2), numbers(10, 3, seed=4), None, bounds, "silu")
    torch.library.opcheck(torch.ops.lean_ft.causal_convolution.default, arguments, test_utils=checks)


CUTS = [0, 5, 13, 14, 27, 32]  # of a row of 32 tokens


def packed(model: Decoder, ids: Tensor) -> Tensor:
    return model(ids[None], cu_seqlens=torch.tensor(CUTS).int())[0]


def ids_of(num_tokens: int, seed: int) -> Tensor:
    return torch.randint(0, 101, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("changed", [1, *(pytest.param(i, marks=pytest.mark.long) for i in (0, 2, 3, 4))])
@pytest.mark.parametrize("case", HYBRIDS)
def test_a_changed_document_leaves_the_others_logits_and_gradients(case, changed, hybrid):
    model = hybrid(case)
    ids, start, end = ids_of(32, 1), CUTS[changed], CUTS[changed + 1]
    other = torch.cat((ids[:start], ids_of(end - start, 2), ids[end:]))
    is_other = torch.ones(32, dtype=torch.bool)
    is_other[start:end] = False
    results = []
    for text in (ids, other):
        logits = packed(model, text)
        loss = F.cross_entropy(logits[is_other], ids_of(32, 3)[is_other])
        results.append((logits.detach(), torch.autograd.grad(loss, [*model.parameters()])))
    (before, grads_before), (after, grads_after) = results
    assert not torch.equal(before[~is_other], after[~is_other])
    if model.mixture is None:
        assert torch.equal(before[is_other], after[is_other])
        assert all(torch.equal(a, b) for a, b in zip(grads_before, grads_after, strict=True))
    else:  # documents share an expert's product, whose kernel may go by its number of rows
        torch.testing.assert_close(before[is_other], after[is_other], atol=1e-5, rtol=1e-5)
        for a, b in zip(grads_before, grads_after, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.first(4)
@torch.no_grad()
@pytest.mark.parametrize("case", HYBRIDS)
def test_rows_that_end_leave_the_others_their_states(case, hybrid):
    """When a row ends, another row moves to its place in the cache."""
    model = hybrid(case)
    long, short = ids_of(11, 4).tolist(), ids_of(3, 5).tolist()
    prompts = [short, long, short, ids_of(7, 6).tolist()]
    whole = [answer.ids for answer in sample(model, prompts, Sampling(9, temperature=1.0, seed=3))]
    stops = frozenset((whole[0][2], whole[3][5]))
    cut = [answer.ids for answer in sample(model, prompts, Sampling(9, temperature=1.0, seed=3, stop_ids=stops))]
    ends = [next((i + 1 for i, token in enumerate(ids) if token in stops), 9) for ids in whole]
    assert len(set(ends)) > 1
    assert cut == [ids[:end] for ids, end in zip(whole, ends, strict=True)]


def test_prefixes_are_refused(hybrid):
    ids, cu_seqlens, bounds = ids_of(9, 0)[None], torch.tensor([0, 5, 9]).int(), torch.tensor([[0, 0], [0, 3]]).int()
    with pytest.raises(ValueError, match="the model has recurrent layers"):
        hybrid("lfm2")(ids, cu_seqlens=cu_seqlens, prefixes=bounds, num_prefix_tokens=3)


TECHNIQUES = {
    "checkpointed": MemoryConfig(activation_checkpointing="full"),
    "selective": MemoryConfig(activation_checkpointing="selective"),
    "tiled": MemoryConfig(tile_mlp=3),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("case", ["qwen3_next", "lfm2", "falcon_h1", "nemotron_h"])  # one per mixer and layout
def test_techniques_change_no_gradient(case, hybrid):
    ids = ids_of(32, 1)

    def gradients(settings: MemoryConfig | None) -> tuple[Tensor, ...]:
        model = copy.deepcopy(hybrid(case))
        if settings is not None:
            apply_memory(model, settings, compile=False)
        return torch.autograd.grad(F.cross_entropy(packed(model, ids), ids_of(32, 3)), [*model.parameters()])

    expected = gradients(None)
    for technique, settings in TECHNIQUES.items():
        for own, true in zip(gradients(settings), expected, strict=True):
            # Sums in another order round by amounts that do not depend on the element's size.
            torch.testing.assert_close(own, true, atol=2e-5 * true.abs().max().item(), rtol=0, msg=technique)


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3_5_text", "lfm2"])
def test_compiled_layers_have_the_same_gradients(case, hybrid):
    torch._dynamo.reset()
    model, ids = hybrid(case), ids_of(32, 1)
    compiled = copy.deepcopy(model)
    apply_memory(compiled, MemoryConfig(activation_checkpointing="full"), compile=True)
    results = []
    for module in (model, compiled):
        loss = F.cross_entropy(packed(module, ids), ids_of(32, 3))
        results.append(torch.autograd.grad(loss, [*module.parameters()]))
    for own, true in zip(*results, strict=True):
        torch.testing.assert_close(own, true, atol=1e-5, rtol=1e-3)


@pytest.fixture(scope="module")
def hybrid(checkpoint):
    """The model of a case, loaded once; tests must not change it."""
    return functools.cache(lambda case: load_model(checkpoint(case)[0]))
