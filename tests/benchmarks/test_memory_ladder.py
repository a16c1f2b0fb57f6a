"""The ladder adds one technique per rung, runs the unchanged recipe, and shows failed rungs."""

import json

import pytest
from measure import Budget
from memory_ladder import LADDER, measure_rungs, rung_settings


def test_each_rung_changes_one_thing_and_keeps_the_rest():
    before = {}
    for rung in LADDER:
        settings = rung_settings(rung.name)
        changed = {key for key in settings if settings[key] != before.get(key)}
        assert settings.keys() >= before.keys()
        assert len(changed) == 1 or not before
        before = settings


@pytest.mark.long
@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_the_recipe_is_measured_in_a_fresh_process(packing):
    (row,) = measure_rungs(
        ["nothing"],
        shape="tiny",
        batch_size=2,
        length=64,
        packing=packing,
        steps=2,
        warmup_steps=1,
        device="cpu",
        budget=Budget(120),
    )
    assert row["status"] == "ok", row
    assert row["tokens_per_second"] == pytest.approx(2 * 64 / row["step_seconds"])
    assert len(row["all_step_seconds"]) == 3
    assert 100 * 2**20 < row["peak_memory_bytes"] < 4 * 2**30
    if packing == "none":
        assert row["target_tokens_per_step"] == 2 * 63  # no position is padding; a row's last has nothing to predict
    json.dumps(row)
