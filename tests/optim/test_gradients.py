"""Norms against float64, of bfloat16 gradients too large to be copied."""

import pytest
import torch

from lean_ft.optim.gradients import global_norm, gradient_norm, gradient_norms, scale_gradients, zero_unless_finite

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (1500, 300)])
def test_norms_equal_float64s(device: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    grads = [(torch.randn(shape) * 10 ** (-i)).to(device, dtype) for i, dtype in enumerate(dtypes)]
    norms = gradient_norms(grads, device)
    assert norms.dtype == torch.float32
    error = 1e-5 if device == "cpu" else 1e-4  # a GPU adds the squares in other groups
    for norm, grad in zip(norms, grads, strict=True):
        assert norm.item() == pytest.approx(grad.double().norm().item(), rel=error)
        assert norm.item() == pytest.approx(gradient_norms([grad], device).item(), rel=error)
    together = torch.cat([grad.double().flatten() for grad in grads])
    assert global_norm(norms.unbind(), CPU).item() == pytest.approx(together.norm().item(), rel=error)
    assert global_norm([], CPU).item() == 0.0


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    grad = torch.ones(300_000, dtype=torch.bfloat16)
    grad[299_999] = float("nan")
    assert gradient_norm(grad, "cpu").isnan()


def test_scaling_takes_a_factor_on_the_device() -> None:
    grads = [torch.tensor([2.0, 4.0]), torch.tensor([[8.0]])]
    scale_gradients(grads, torch.tensor(0.5))
    assert [grad.flatten().tolist() for grad in grads] == [[1.0, 2.0], [4.0]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [1.5, -0.0, float("nan"), float("inf"), -float("inf")])
def test_gradients_become_zero_only_if_a_norm_is_not_finite(value: float, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    others = [torch.randn(9, device=device), torch.randn(5, 6, device=device).bfloat16()]
    grad = torch.randn(30, 40).to(device, dtype).t()
    grad[7, 5] = value
    for grads in ([grad], [others[0], grad, others[1]]):
        before = [each.clone() for each in grads]
        zero_unless_finite(grads, gradient_norms(grads, device), device)
        for each, old in zip(grads, before, strict=True):
            assert torch.equal(each, old if abs(value) < 2 else torch.zeros_like(old))
        grad[7, 5] = value
