"""Planned memory of optimizer updates on a GPU."""

import pytest
import torch
from torch import nn

from lean_ft.optim.rule import ParameterState, StepInfo
from lean_ft.plan.devices import DEVICES
from lean_ft.plan.fusion import fusing_backend
from lean_ft.plan.trace import Trace
from lean_ft.plan.world import PlannedWorld
from lean_ft.system.world import inside
from tests.optim.tiny_training import build


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adamw_4bit", "sgd"])
def test_a_compiled_update_holds_a_slice_and_not_the_tensor(name: str):
    """For 2**28 elements, noise for all would take 0.5 GiB, and a float32 copy 1 GiB."""
    trace = Trace(DEVICES["A100 80GB"])
    planned = PlannedWorld(trace)
    torch._dynamo.reset()
    with (
        inside(planned),
        torch.compiler.set_stance("default", force_backend=fusing_backend(trace)),
        planned.fake_mode,
        trace,
        torch.no_grad(),
    ):
        model = nn.Linear(2**14, 2**14, bias=False, dtype=torch.bfloat16)
        model.weight.grad = torch.empty_like(model.weight)
        optimizer = build(model, {"name": name, "stochastic_rounding": True}, compile=True)
        (state,) = optimizer.states
        before = trace.memory.live_bytes
        trace.memory.peak.bytes_by_label.clear()
        trace.memory._peak_bytes = before
        state.rule.update([state], StepInfo(lr=1e-3, number=1, noise_seed=1))
    torch._dynamo.reset()
    assert isinstance(state, ParameterState)
    assert 0 < trace.memory._peak_bytes - before < 0.3 * 2**30
