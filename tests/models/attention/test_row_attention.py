"""Row attention, the path for GPUs, against a dense masked softmax in float64."""

import pytest
import torch
import torch.nn.functional as F

from lean_ft.models.attention import row_attention
from lean_ft.models.attention.document_attention import document_attention
from lean_ft.models.attention.row_attention import Rows, attend_rows, attend_rows_backward
from tests.models.attention import test_document_attention as documents

LENGTHS, ROW = [1, 70, 64, 0, 129, 6], 135  # two rows


def inputs(dtype: torch.dtype, with_sinks: bool = False):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 16) for heads in (6, 2, 2)] + [(6,)] * with_sinks
    leaves = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator).to(dtype)
    return leaves, F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int(), grad


def by_rows(leaves, cu_seqlens, grad, **rules) -> list[torch.Tensor]:
    """The output and the gradients of the leaves."""
    sinks = leaves[3] if len(leaves) == 4 else None
    own = Rows(cu_seqlens, sinks, rules.get("scale"), rules.get("window"), rules.get("softcap"), ROW)
    own = own._replace(num_ahead=rules.get("num_ahead", 0))
    if "ends" in rules:
        own = own._replace(ends=documents.image_ends(), num_ahead=89)
    out = attend_rows(*leaves[:3], own)
    *grads, grad_sinks = attend_rows_backward(grad, *leaves[:3], own)
    return [out, *grads, *([] if grad_sinks is None else [grad_sinks])]


def exactly(leaves, grad, **rules) -> list[torch.Tensor]:
    exact = [x.double().requires_grad_() for x in leaves]
    out = documents.dense(*exact[:3], **rules, **({"sinks": exact[3]} if len(exact) == 4 else {}))
    return [out.detach(), *torch.autograd.grad(out, exact, grad.double())]


@pytest.mark.first(9)
@pytest.mark.parametrize("block_scores", [2**23, 2 * 6 * 129 * 7])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"scale": 0.7},
        {"window": 2},
        {"window": 64},
        {"softcap": 0.8},
        {"with_sinks": True},
        {"with_sinks": True, "window": 17, "softcap": 1.5, "scale": 0.3},
        {"ends": True},
        {"ends": True, "window": 17, "softcap": 1.5},
        {"num_ahead": 134},
        {"num_ahead": 16, "window": 17},
    ],
    ids=str,
)
def test_it_equals_a_masked_softmax(rules, block_scores, monkeypatch):
    monkeypatch.setattr(documents, "LENGTHS", LENGTHS)
    monkeypatch.setattr(row_attention, "BLOCK_SCORES", block_scores)
    rules = dict(rules)
    leaves, cu_seqlens, grad = inputs(torch.float32, rules.pop("with_sinks", False))
    found, exact = by_rows(leaves, cu_seqlens, grad, **rules), exactly(leaves, grad, **rules)
    assert [x.shape for x in found] == [x.shape for x in exact]
    assert max(float((own - true).norm() / true.norm()) for own, true in zip(found, exact, strict=True)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_as_exact_as_document_attention(dtype, monkeypatch):
    monkeypatch.setattr(documents, "LENGTHS", LENGTHS)
    leaves, cu_seqlens, grad = inputs(dtype)
    exact = exactly(leaves, grad)
    for x in leaves:
        x.requires_grad_()
    out = document_attention(*leaves, cu_seqlens)
    theirs = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    own = by_rows([x.detach() for x in leaves], cu_seqlens, grad)
    for ours, other, true in zip(own, theirs, exact, strict=True):
        assert ours.dtype == dtype
        assert (ours - true).norm() < 1.05 * (other - true).norm()


def test_other_documents_never_change_a_bit():
    leaves, cu_seqlens, grad = inputs(torch.bfloat16)
    start, end = 71, 135  # the third document
    results = []
    for noise in (0.0, 100.0):
        noisy = [x.clone() for x in leaves]
        for x in noisy:
            x[:start] += noise
            x[end:] -= noise
        results.append([x[start:end] for x in by_rows(noisy, cu_seqlens, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_document_across_the_end_of_a_row_is_refused():
    leaves, _, _ = inputs(torch.float32)
    with pytest.raises(RuntimeError, match="no document may cross the end of a row of 135"):
        attend_rows(*leaves, Rows(torch.tensor([0, 100, 200, 270]), None, None, None, None, ROW))
