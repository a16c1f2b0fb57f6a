"""The scale over a run of good and overflowed steps is torch.amp.GradScaler's."""

import json

import pytest
import torch

from lean_ft.optim import LossScaler


def test_the_scale_follows_torchs_grad_scaler() -> None:
    torch.manual_seed(0)
    overflows = (torch.rand(6000) < 0.001).tolist()
    overflows[2500:4700] = [False] * 2200  # long enough to grow
    reference = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    ours = LossScaler(enabled=True)
    seen = set()
    for overflowed in overflows:
        reference.scale(parameter.sum())
        parameter.grad = torch.full((1,), float("inf") if overflowed else 1.0)
        reference.step(optimizer)
        reference.update()
        ours.update(overflowed=overflowed)
        assert ours.value == reference.get_scale()
        seen.add(ours.value)
    assert len(seen) > 3


def test_disabled_it_returns_the_loss_itself() -> None:
    loss = torch.ones(())
    scaler = LossScaler(enabled=False)
    scaler.update(overflowed=True)
    assert scaler.scale(loss) is loss
    assert scaler.value == 1.0


def test_state_goes_through_json() -> None:
    first, second = LossScaler(enabled=True), LossScaler(enabled=True)
    for overflowed in (True, False, False):
        first.update(overflowed=overflowed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(1998):
        first.update(overflowed=False)
        second.update(overflowed=False)
    assert second.value == first.value == 2.0**16
    assert second.scale(torch.ones(())).item() == pytest.approx(2.0**16)
