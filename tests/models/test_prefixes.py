"""Documents that continue a prefix equal documents with a copy of the prefix, in values and gradients, for every
family."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lean_ft.models import Decoder, load_model
from lean_ft.models.attention import row_attention
from lean_ft.models.attention.attention import Sight
from lean_ft.models.attention.document_attention import document_attention
from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward

ROW = 160  # two of these
BOUNDS = [0, 70, 80, 150, 160, 161, 300, 300, 320]
PREFIXES = [(0, 0), (0, 40), (0, 40), (0, 0), (7, 7), (160, 161), (0, 0), (170, 290)]
RULES = [
    {"with_sinks": True, "window": 70, "softcap": 1.5, "scale": 0.3},
    {},
    {"scale": 0.7},
    {"window": 2},
    {"window": 37},
    {"softcap": 0.8},
    {"with_sinks": True},
]


def dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rules: dict) -> Tensor:
    """Each document's queries attend to a copy of all keys that they see, in one softmax."""
    outs, group = [], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    for (start, end), (first, last) in zip(pairwise(BOUNDS), PREFIXES, strict=True):
        keys, values = (torch.cat((x[first:last], x[start:end])) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], keys) * rules.get("scale", query.shape[-1] ** -0.5)
        if cap := rules.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        back = torch.arange(end - start)[:, None] + (last - first) - torch.arange(len(keys))  # how far each key is
        scores = scores.masked_fill((back < 0) | (back >= rules.get("window", 1000)), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, end - start, 1)), -1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values))
    return torch.cat(outs)


def by_documents(leaves: list[Tensor], cu_seqlens: Tensor, grad: Tensor, rules: dict) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in leaves]
    sinks = leaves[3] if len(leaves) == 4 else None
    out = document_attention(*leaves[:3], cu_seqlens, sinks=sinks, prefixes=torch.tensor(PREFIXES).int(), **rules)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_rows(leaves: list[Tensor], cu_seqlens: Tensor, grad: Tensor, rules: dict) -> list[Tensor]:
    prefixes, sinks = torch.tensor(PREFIXES).int(), leaves[3] if len(leaves) == 4 else None
    own = Rows(cu_seqlens, sinks, rules.get("scale"), rules.get("window"), rules.get("softcap"), ROW, prefixes)
    out = attend_rows(*leaves[:3], own)
    grads = attend_rows_backward(grad, *leaves[:3], own)
    return [out, *(x for x in grads if x is not None)]


@pytest.mark.first(6)
@pytest.mark.parametrize("attend", [by_documents, by_rows], ids=["documents", "rows"])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_it_is_attention_to_a_copy_of_the_prefix(attend, rules, monkeypatch):
    rules = dict(rules)
    generator = torch.Generator().manual_seed(0)
    shapes = [(BOUNDS[-1], heads, 16) for heads in (6, 2, 2)] + [(6,)] * rules.pop("with_sinks", False)
    leaves = [torch.randn(shape, generator=generator).double() for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator).double()
    exact = [x.clone().requires_grad_() for x in leaves]
    out = dense(*exact[:3], exact[3] if len(exact) == 4 else None, rules)
    expected = [out.detach(), *torch.autograd.grad(out, exact, grad)]
    for scores in (2**22, 6 * 129 * 7):  # in one block of queries, and in several
        monkeypatch.setattr("lean_ft.models.attention.documents._BLOCK_SCORES", scores)
        monkeypatch.setattr(row_attention, "BLOCK_SCORES", 2 * scores)
        found = attend(leaves, torch.tensor(BOUNDS).int(), grad, rules)
        for ours, true in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, true, atol=1e-10, rtol=1e-10)


def test_the_keys_that_a_kernel_takes_are_those_of_each_document():
    """The index that is used on CUDA."""
    cu_seqlens, bounds = torch.tensor(BOUNDS).int(), torch.tensor(PREFIXES).int()
    num_prefix_tokens = int(bounds.diff(dim=1).sum())
    found = Sight.listing_keys(bounds, num_prefix_tokens, cu_seqlens, BOUNDS[-1])
    expected = [
        [*range(*prefix), *range(*document)] for document, prefix in zip(pairwise(BOUNDS), PREFIXES, strict=True)
    ]
    assert found.key_index is not None and found.key_cu_seqlens is not None
    ends = found.key_cu_seqlens.tolist()
    assert [found.key_index.tolist()[start:end] for start, end in pairwise(ends)] == expected
    assert ends[-1] == len(found.key_index)


PROMPT, CHOSEN, REJECTED, LONGER = 13, 17, 9, 20


def texts() -> tuple[Tensor, list[Tensor]]:
    """Two packed rows, each with a prompt, three completions and padding; and the prompt with each completion."""
    ids = torch.randint(3, 101, (2, 64), generator=torch.Generator().manual_seed(3))
    alone = []
    for row in ids:
        prompt, *answers, _ = row.split([PROMPT, CHOSEN, REJECTED, LONGER, 64 - PROMPT - CHOSEN - REJECTED - LONGER])
        alone += [torch.cat((prompt, answer)) for answer in answers]
    return ids, alone


@pytest.mark.first(4)
def test_completions_with_a_shared_prompt_equal_each_with_its_own(checkpoint, case):
    folder, _ = checkpoint(case)
    model: Decoder = load_model(folder).double()
    first = PROMPT + CHOSEN
    cuts = [0, first, first + REJECTED, first + REJECTED + LONGER, 64]
    cu_seqlens = torch.tensor([*cuts[:-1], *(64 + cut for cut in cuts)]).int()
    prefixes = torch.tensor(
        [(row + a, row + b) for row in (0, 64) for a, b in [(0, 0), (0, 13), (0, 13), (0, 0)]]
    ).int()
    refuses = model.config.has_states or model.has_chunks
    if refuses or not all(rope.same_frequencies(1, PROMPT + LONGER) for rope, _ in model.rotary):
        return  # `shares_prompts` refuses it
    ids, alone = texts()
    logits = model(ids, cu_seqlens=cu_seqlens, prefixes=prefixes, num_prefix_tokens=4 * PROMPT).flatten(0, 1)
    shared, separate = [], []
    for i, text in enumerate(alone):
        own = slice(*cu_seqlens[4 * (i // 3) + i % 3 :][:2].tolist())
        at = torch.cat((torch.arange(*prefixes[4 * (i // 3) + i % 3].tolist()), torch.arange(own.start, own.stop)))
        shared.append(logits[at])
        separate.append(model(text[None])[0])
        torch.testing.assert_close(shared[-1], separate[-1], atol=1e-10, rtol=1e-10)
    weights = [
        torch.randn(len(x), 101, generator=torch.Generator().manual_seed(i)).double() for i, x in enumerate(shared)
    ]
    ours, theirs = (
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, some, strict=True)), [*model.parameters()])
        for some in (shared, separate)
    )
    for mine, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-10 * float(true.abs().max() + 1), rtol=1e-10)
