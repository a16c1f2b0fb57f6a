"""Norms against float64, of bfloat16 gradients too large to be copied."""

import pytest
import torch

from lean_ft.optim.gradients import global_norm, gradient_norm, scale_gradients, zero_unless_finite

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (1500, 300)])
def test_norms_equal_float64s(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    grads = [(torch.randn(shape) * 10 ** (-i)).to(dtype) for i in range(3)]
    norms = [gradient_norm(grad) for grad in grads]
    for norm, grad in zip(norms, grads, strict=True):
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(grad.double().norm().item(), rel=1e-5)
    together = torch.cat([grad.double().flatten() for grad in grads])
    assert global_norm(norms, CPU).item() == pytest.approx(together.norm().item(), rel=1e-5)
    assert global_norm([], CPU).item() == 0.0


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    grad = torch.ones(300_000, dtype=torch.bfloat16)
    grad[299_999] = float("nan")
    assert gradient_norm(grad).isnan()


def test_scaling_takes_a_factor_on_the_device() -> None:
    grads = [torch.tensor([2.0, 4.0]), torch.tensor([[8.0]])]
    scale_gradients(grads, torch.tensor(0.5))
    assert [grad.flatten().tolist() for grad in grads] == [[1.0, 2.0], [4.0]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [1.5, -0.0, float("nan"), float("inf"), -float("inf")])
def test_a_gradient_becomes_zero_only_if_its_norm_is_not_finite(value: float, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    grad = torch.randn(30, 40).to(device, dtype).t()
    grad[7, 5] = value
    expected = grad.clone() if abs(value) < 2 else torch.zeros_like(grad)
    zero_unless_finite(grad, gradient_norm(grad))
    assert torch.equal(grad, expected)
