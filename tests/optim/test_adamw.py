"""AdamW against the formula in float64, over bfloat16, float32, clipped and stochastically rounded weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.tiny_training import build

BETAS, EPS, DECAY, LR = (0.8, 0.95), 1e-6, 0.1, 1e-2


class Reference:
    """AdamW of one tensor in float64, StableAdamW's update clipping included (Wortsman et al. 2023, algorithm 2)."""

    def __init__(self, weight: Tensor, *, decay: float, clipping: bool = False) -> None:
        self.weight = weight.detach().double().clone()
        self.m, self.v, self.t = torch.zeros_like(self.weight), torch.zeros_like(self.weight), 0
        self.decay, self.clipping = decay, clipping
        self.largest_rms = 0.0

    def step(self, grad: Tensor, lr: float) -> None:
        grad = grad.double()
        self.t += 1
        # The paper's form: moments debiased by decays that depend on the step.
        beta1, beta2 = (beta * (1 - beta ** (self.t - 1)) / (1 - beta**self.t) for beta in BETAS)
        self.m = beta1 * self.m + (1 - beta1) * grad
        self.v = beta2 * self.v + (1 - beta2) * grad**2
        rms = (grad**2 / self.v.clamp(min=EPS**2)).mean().sqrt().item()
        self.largest_rms = max(self.largest_rms, rms)
        if self.clipping:
            lr /= max(1.0, rms)
        self.weight = self.weight - lr * self.decay * self.weight - lr * self.m / (self.v.sqrt() + EPS)


def gradients(like: Tensor, steps: int) -> list[Tensor]:
    """Random, with a burst at the end."""
    generator = torch.Generator().manual_seed(2)
    scales = [1.0] * (steps - 2) + [30.0, 1.0]
    return [scale * 1e-2 * torch.randn(like.shape, generator=generator) for scale in scales]


def run(model: nn.Module, settings: dict[str, Any], steps: int = 8, **kwargs: Any) -> dict[str, Reference]:
    """Train `model` and references with the same gradients, and return the references."""
    clipping = settings.get("update_clipping", False)
    references = {
        name: Reference(param, decay=DECAY if param.ndim > 1 else 0.0, clipping=clipping)
        for name, param in model.named_parameters()
    }
    settings = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, **settings}
    optimizer = build(model, settings, **kwargs)
    optimizer.set_lr(LR)
    grads = {name: gradients(param, steps) for name, param in model.named_parameters()}
    for step in range(steps):
        for name, param in model.named_parameters():
            param.grad = grads[name][step].to(param.dtype)
            references[name].step(param.grad, LR)
        optimizer.step()
    return references


@pytest.mark.parametrize("clipping", [False, True])
def test_float32_weights_equal_the_formula(clipping: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(33, 21)
    references = run(model, {"name": "adamw", "update_clipping": clipping})
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.double(), references[name].weight, rtol=1e-5, atol=1e-6)
        assert references[name].largest_rms > 2  # the burst is large enough to be clipped


@pytest.mark.parametrize("rounding", [False, True])
def test_bfloat16_weights_stay_within_their_rounding_of_the_formula(rounding: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 500).bfloat16()
    references = run(model, {"name": "adamw", "stochastic_rounding": rounding}, steps=6)
    for name, param in model.named_parameters():
        error = (param.double() - references[name].weight).abs()
        # Six roundings of weights and moments with 8 bits.
        assert error.max() <= 6 * 2**-7 * param.abs().max()
        assert error.mean() < 0.1 * (6 * LR)


def test_a_bfloat16_second_moment_decays_only_with_stochastic_rounding() -> None:
    """The documented weakness of plain bfloat16 state, and its fix."""
    after = {}
    for rounding in (False, True):
        model = nn.Linear(200, 200, bias=False).bfloat16()
        optimizer = build(model, {"name": "adamw", "betas": (0.9, 0.999), "stochastic_rounding": rounding})
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        model.weight.grad = torch.zeros_like(model.weight)
        for _ in range(300):
            optimizer.step()
        after[rounding] = optimizer.state_dict()["weight.exp_avg_sq"].double().mean().item() / 1e-3
    assert after[False] > 0.99
    assert after[True] == pytest.approx(0.999**300, rel=0.02)
