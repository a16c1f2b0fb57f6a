"""Planned memory of optimizer updates on a GPU."""

from typing import Any

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
@pytest.mark.parametrize("name", ["adamw", "adamw_4bit", "sgd"])
def test_a_compiled_update_holds_a_slice_and_not_the_tensor(name: str):
    """For 2**28 elements, noise for all would take 0.5 GiB, and a float32 copy 1 GiB."""
    workspace_bytes, _ = planned_update({"name": name, "stochastic_rounding": True}, "A100 80GB")
    assert 0 < workspace_bytes < 0.3 * 2**30


def test_the_kernel_of_8_bit_adamw_takes_one_launch_and_no_workspace() -> None:
    assert planned_update({"name": "adamw_8bit", "stochastic_rounding": True}, "A100 80GB") == (0, 1)


@pytest.mark.long
def test_update_clipping_takes_the_kernel_of_8_bit_adamw_after_its_sum() -> None:
    settings = {"name": "adamw_8bit", "stochastic_rounding": True, "update_clipping": True}
    (workspace_bytes, launches), (sliced_bytes, sliced_launches) = (
        planned_update(settings, card)
        for card in ("A100 80GB", "T4")  # the kernel needs compute capability 8.0
    )
    assert 1 < launches < sliced_launches and workspace_bytes < 2**20 < sliced_bytes


def planned_update(settings: dict[str, Any], card: str) -> tuple[int, float]:
    """Bytes of workspace and launches of one update of 2**28 elements."""
    trace = Trace(DEVICES[card])
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
        optimizer = build(model, settings, compile=True)
        (state,) = optimizer.states
        before, launches = trace.memory.live_bytes, trace.time.spent.num_launches
        trace.memory.peak.bytes_by_label.clear()
        trace.memory._peak_bytes = before
        state.rule.update(
            [state], StepInfo(lr=1e-3, number=1, noise_seed=1 if settings.get("stochastic_rounding") else None)
        )
    torch._dynamo.reset()
    assert isinstance(state, ParameterState)
    return trace.memory._peak_bytes - before, trace.time.spent.num_launches - launches
