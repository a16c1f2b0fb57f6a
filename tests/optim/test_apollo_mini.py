"""APOLLO-Mini against the paper's equations, written out in float64."""

import pytest
import torch
from torch import Tensor, nn

from lean_ft.optim import apollo_mini
from tests.optim.tiny_training import build


def paper(weight: Tensor, grads: list[Tensor], vectors: list[Tensor], lr: float, decay: float) -> Tensor:
    """Algorithm 1 of the paper with rank 1, scaled per tensor, and its limit on the norm's growth."""
    weight, m, v, last = weight.double(), 0.0, 0.0, None
    for step, (grad, p) in enumerate(zip(grads, vectors, strict=True), 1):
        grad, p = grad.double(), p.double()
        low = p @ grad if grad.shape[0] <= grad.shape[1] else grad @ p
        m = 0.9 * m + 0.1 * low
        v = 0.999 * v + 0.001 * low**2
        adam = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        scaled = grad * (adam.norm() / low.norm()) * 128**0.5
        if last is not None and scaled.norm() > 1.01 * last:
            scaled = scaled / scaled.norm() * 1.01 * last
        last = scaled.norm()
        weight = weight - lr * (scaled + decay * weight)
    return weight


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
def test_a_matrix_moves_as_the_paper_says(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apollo_mini, "STEPS_A_PROJECTION", 2)
    monkeypatch.setattr(apollo_mini, "slice_length", lambda *_, **__: 100)  # several slices
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    start = weight.detach().clone()
    optimizer = build(nn.ParameterList([weight]), {"name": "apollo_mini", "weight_decay": 0.1})
    optimizer.set_lr(1e-2)
    grads = [torch.randn(shape) * size for size in (1.0, 1.0, 30.0, 0.1)]
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    vectors = [torch.randn(24, generator=torch.Generator().manual_seed(step // 2 * 2**16)) for step in range(4)]
    assert not torch.equal(vectors[1], vectors[2])
    exact = paper(start, grads, vectors, 1e-2, 0.1)
    torch.testing.assert_close(weight.detach().double(), exact, rtol=1e-5, atol=1e-6)


def test_bytes_of_state_are_two_vectors_and_a_number() -> None:
    matrix = nn.Linear(256, 64, bias=False).bfloat16()
    assert build(matrix, {"name": "apollo_mini"}).state_bytes == (2 * 256 + 1) * 4
