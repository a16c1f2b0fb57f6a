"""APOLLO-Mini against its authors' update, written out in float64."""

import pytest
import torch
from torch import Tensor, nn

from lean_ft.optim import apollo_mini
from tests.optim.tiny_training import build


def authors(weight: Tensor, grads: list[Tensor], vectors: list[Tensor], lr: float, decay: float) -> Tensor:
    """`apollo_torch.APOLLOAdamW` 1.0.3 with rank=1, scale_type="tensor" and scale=128; weight decay as everywhere here.

    The ratio and the limit on its growth are of moments without bias correction, which comes with the step's size.
    """
    weight, m, v, last = weight.double(), 0.0, 0.0, None
    for step, (grad, p) in enumerate(zip(grads, vectors, strict=True), 1):
        grad, p = grad.double(), p.double()
        low = p @ grad if grad.shape[0] <= grad.shape[1] else grad @ p
        m = 0.9 * m + 0.1 * low
        v = 0.999 * v + 0.001 * low**2
        adam = m / (v.sqrt() + 1e-8)
        scaled = grad * (adam.norm() / (low.norm() + 1e-8))
        if last is not None:
            scaled = scaled / (max(scaled.norm() / (last + 1e-8), 1.01) / 1.01)
        last = scaled.norm()
        step_size = lr * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        weight = weight - step_size * 128**0.5 * scaled - lr * decay * weight
    return weight


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
def test_a_matrix_moves_as_in_its_authors_code(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apollo_mini, "STEPS_PER_PROJECTION", 2)
    monkeypatch.setattr(apollo_mini, "slice_length", lambda *_, **__: 100)  # several slices
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    start = weight.detach().clone()
    optimizer = build(nn.ParameterList([weight]), {"name": "apollo_mini", "weight_decay": 0.1})
    optimizer.set_lr(1e-2)
    grads = [torch.randn(shape) * size for size in (1.0, 1.0, 30.0, 0.1, 2.0)]
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    vectors = [torch.randn(24, generator=torch.Generator().manual_seed(step // 2 * 2**16)) for step in range(5)]
    assert not torch.equal(vectors[1], vectors[2])
    exact = authors(start, grads, vectors, 1e-2, 0.1)
    torch.testing.assert_close(weight.detach().double(), exact, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zero_does_not_hold_back_those_after_it() -> None:
    weight = nn.Parameter(torch.zeros(24, 40))
    optimizer = build(nn.ParameterList([weight]), {"name": "apollo_mini"})
    optimizer.set_lr(1.0)
    moved = []
    for size in (1.0, 0.0, 1.0, 1.0):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
        moved.append(float((weight.detach() - before).norm()))
    assert moved[1] == 0.0
    assert min(moved[2:]) > 0.1 * moved[0]


def test_bytes_of_state_are_two_vectors_and_a_number() -> None:
    matrix = nn.Linear(256, 64, bias=False).bfloat16()
    assert build(matrix, {"name": "apollo_mini"}).state_bytes == (2 * 256 + 1) * 4
