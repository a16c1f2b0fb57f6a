"""With stochastic rounding, every rule moves bfloat16 weights as far as float32 weights in the mean."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.tiny_training import CONFIGS, build

ROUNDED = {name: settings for name, settings in CONFIGS.items() if settings.get("stochastic_rounding")}
LR = {"sgd": 0.05}  # SGD's steps are as large as the gradient, those of all other rules as the learning rate


def moved(settings: dict[str, Any], dtype: torch.dtype, rounding: bool) -> torch.Tensor:
    torch.manual_seed(0)
    weight = nn.Parameter((1 + torch.rand(64, 128)).to(dtype))
    start, grad = weight.detach().double(), (0.01 * torch.randn(64, 128)).to(dtype)
    optimizer = build(nn.ParameterList([weight]), {**settings, "stochastic_rounding": rounding})
    optimizer.set_lr(LR.get(settings["name"], 5e-4))  # an update is a fraction of bfloat16's last place, 2**-7
    for _ in range(25):
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach().double() - start


@pytest.mark.first(2)
@pytest.mark.parametrize("settings", ROUNDED.values(), ids=ROUNDED.keys())
def test_mean_drift_equals_float32(settings: dict[str, Any]) -> None:
    exact = moved(settings, torch.float32, False)
    share = [
        float((moved(settings, torch.bfloat16, rounding) * exact).sum() / exact.square().sum())
        for rounding in (True, False)
    ]
    assert share[0] == pytest.approx(1.0, abs=0.1)
    assert share[1] < 0.7  # to nearest, small updates are lost
