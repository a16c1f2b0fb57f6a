"""Short training runs and plans equal those of earlier commits, so that a change of structure moves no number."""

import pytest
import torch

from lean_ft.system import catalog
from tests import gate

EXPLANATION = """{name} moved: {moved}.
A change of structure must move no number. If the change is meant to move this one, write the new numbers with
    python scripts/write_gate.py {name}
and say in the commit message why they moved."""


@pytest.mark.first(len(gate.FIRST))
@pytest.mark.parametrize("name", gate.CURVES)
def test_a_run_has_the_same_curve_and_batches(name, tmp_path):
    assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1"
    moved = gate.moved_of_run(name, gate.read("curves")[name], gate.run(name, tmp_path))
    assert not moved, EXPLANATION.format(name=name, moved="; ".join(moved))


@pytest.mark.first(len(gate.FIRST_PLANS))
@pytest.mark.parametrize("name", gate.PLANS)
def test_a_plan_has_the_same_peak(name, tmp_path):
    """A plan computes no values, so its bytes are equal on every CPU. Another version of torch may plan other
    kernels."""
    moved = gate.moved_of_plan(gate.read("plans")[name], gate.plan(name, tmp_path))
    assert not moved, EXPLANATION.format(name=name, moved="; ".join(moved))


def test_each_preset_is_in_the_gate():
    tiny = {name for name in catalog.presets() if name.startswith("tiny/")}
    assert {preset for _, preset, _ in gate.RECIPES.values()} == tiny
    assert set(gate.PLANS) <= gate.read("plans").keys()
