"""PPO's losses, gradients, returns and advantages compared with results of verl's functions, which make_verl_values.py
recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lean_ft.losses import generalized_advantages, policy_loss, value_loss, whitened

VERL: dict[str, Any] = json.loads(Path(__file__).with_name("verl_values.json").read_text())
CLOSE = {"rtol": 1e-6, "atol": 1e-9}  # verl adds 1e-8 to denominators


def grid(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(VERL["shape"])


@pytest.fixture
def given() -> dict[str, Tensor]:
    return {name: grid(values) for name, values in VERL["given"].items()}


def test_a_policy_loss_with_advantages_per_token(given: dict[str, Tensor]) -> None:
    logps = given["logps"].requires_grad_()
    loss = policy_loss(
        "dapo", logps, given["old_logps"], given["rewards"], given["mask"], epsilon=0.2, epsilon_high=0.2
    )
    expected, gradient = VERL["policy_loss"]
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert_close(torch.autograd.grad(loss, logps)[0], grid(gradient), **CLOSE)


def test_a_value_model(given: dict[str, Tensor]) -> None:
    mask, returns, above = given["mask"] > 0, torch.zeros(VERL["shape"], dtype=torch.float64), []
    for row, length in enumerate(mask.sum(1).tolist()):
        own = [given[name][row : row + 1, :length] for name in ("rewards", "old_values")]
        if length:
            found, returns[row : row + 1, :length] = generalized_advantages(*own, gamma=0.97, gae_lambda=0.9)
            above.append(found[0])
    assert_close(returns, grid(VERL["returns"]), **CLOSE)
    assert_close(whitened(torch.cat(above)), grid(VERL["whitened"])[mask], **CLOSE)
    values = given["values"].requires_grad_()
    loss = value_loss(values, given["old_values"], returns, mask, 0.3, int(mask.sum()))
    expected, gradient = VERL["value_loss"]
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert_close(torch.autograd.grad(loss, values)[0], grid(gradient), **CLOSE)
    assert whitened(torch.ones(3)).tolist() == [0, 0, 0] == whitened(torch.ones(1)).tolist() * 3
