"""On a GPU: PyTorch's kernels and the float32 path against the CPU's."""

import pytest
import torch

from lean_ft.models.attention.attention import Scoring, Sight, attend_documents, attend_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CU_SEQLENS = torch.tensor([0, 1, 70, 100, 164, 200], dtype=torch.int32)
PREFIXES = torch.tensor([(0, 0), (0, 0), (1, 40), (0, 0), (100, 130)], dtype=torch.int32)


def inputs(dtype: torch.dtype, device: str, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 100, 6, size), (2, 100, 2, size), (2, 100, 2, size)]
    made = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


@pytest.mark.first(24)
@pytest.mark.parametrize("packed", [False, True, "going on from a prefix"])
@pytest.mark.parametrize("size", [64, 20])
@pytest.mark.parametrize(
    "scoring",
    [
        *(Scoring(), Scoring(window=7), Scoring(0.3, window=20), Scoring(softcap=1.5)),
        *(Scoring(window=window, sees_later=True) for window in (None, 7)),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)])
def test_results_and_gradients_equal_the_cpus(packed, size, scoring, with_sinks, dtype, tolerance):
    if scoring.sees_later and packed not in (False, True):
        pytest.skip("prefixes are refused")
    results = []
    for device, used in (("cpu", torch.float32), ("cuda", dtype)):
        leaves = inputs(used, device, size)
        if with_sinks:
            leaves.append(torch.linspace(-1, 1, 6).bfloat16().to(device, used).requires_grad_())
        sinks = leaves[3] if with_sinks else None
        if packed:
            cu_seqlens = CU_SEQLENS.to(device)
            prefixes = None if packed is True else Sight.of(PREFIXES.to(device), 39 + 30, cu_seqlens, 200)
            out = attend_documents(*leaves[:3], cu_seqlens, scoring, sinks, prefixes)
        else:
            out = attend_rows(*leaves[:3], scoring, sinks)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        grads = torch.autograd.grad(out, leaves, grad.to(device, used))
        results.append([x.float().cpu() for x in (out, *grads)])
    for expected, own in zip(*results, strict=True):
        assert (own - expected).norm() < tolerance * expected.norm()


def test_other_documents_never_change_a_bit():
    results = []
    for noise in (0.0, 3.0):
        leaves = [x.detach().clone() for x in inputs(torch.bfloat16, "cuda", 64)]
        for x in leaves:
            x.view(200, *x.shape[2:])[:70] += noise
        results.append(attend_documents(*leaves, CU_SEQLENS.cuda()).flatten(0, 1)[70:])
    assert torch.equal(*results)
