"""With stochastic rounding every rule moves bfloat16 weights, in the mean, as far as float32 ones."""

import pytest
import torch
from torch import nn

from tests.optim.tiny_training import CONFIGS, build

RULES = sorted({settings["name"] for settings in CONFIGS.values()} - {"paged_adamw_8bit"})
LR = {"sgd": 0.05}  # its step is as large as the gradient, all others' as the learning rate


def moved(name: str, dtype: torch.dtype, rounding: bool) -> torch.Tensor:
    torch.manual_seed(0)
    weight = nn.Parameter((1 + torch.rand(64, 128)).to(dtype))
    start, grad = weight.detach().double(), (0.01 * torch.randn(64, 128)).to(dtype)
    optimizer = build(nn.ParameterList([weight]), {"name": name, "stochastic_rounding": rounding})
    optimizer.set_lr(LR.get(name, 5e-4))  # an update is a fraction of a unit in bfloat16's last place, 2**-7
    for _ in range(25):
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach().double() - start


@pytest.mark.parametrize("name", RULES)
def test_mean_drift_is_float32s(name: str) -> None:
    exact = moved(name, torch.float32, False)
    share = [
        float((moved(name, torch.bfloat16, rounding) * exact).sum() / exact.square().sum())
        for rounding in (True, False)
    ]
    assert share[0] == pytest.approx(1.0, abs=0.1)
    assert share[1] < 0.7  # to nearest, small updates are lost
