"""The ladder adds one technique per rung, runs the unchanged recipe, and shows failed rungs."""

import json

import pytest
from measure import Budget
from memory_ladder import LADDER, measure_rungs, rung_settings, table_cells

from lean_ft.settings import MemoryConfig

GIB = 2**30
RESULT = {
    "benchmark": "memory_ladder",
    "hardware": {"device": "cpu", "cpu": "Some CPU", "cores": 4},
    "settings": {"shape": "tiny", "batch_size": 2, "length": 64},
    "rows": [
        {
            "label": "a",
            "status": "ok",
            "peak_memory_bytes": 8 * GIB,
            "peak_rss_bytes": 9 * GIB,
            "tokens_per_second": 50.0,
        },
        {"label": "b", "status": "out of memory", "reason": "CUDA out of memory"},
        {
            "label": "c",
            "status": "ok",
            "peak_memory_bytes": 4 * GIB,
            "peak_rss_bytes": 5 * GIB,
            "tokens_per_second": 75.0,
        },
    ],
}


def test_each_rung_changes_one_thing_and_keeps_the_rest():
    before = {}
    for rung in LADDER:
        settings = rung_settings(rung.name)
        changed = {key for key in settings if settings[key] != before.get(key)}
        assert settings.keys() >= before.keys()
        assert len(changed) == 1 or not before
        before = settings


def test_the_chunked_loss_rung_is_the_recipes_default():
    assert rung_settings("chunked_loss")["memory.loss_chunk_tokens"] == MemoryConfig().loss_chunk_tokens


def test_an_unknown_rung_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="in_backward"):
        rung_settings("backwards")


def test_changes_are_told_against_the_last_rung_that_has_a_number():
    assert table_cells(RESULT) == [
        ["a", "8.00 GiB", "-", "9.00 GiB", "50", "-"],
        ["b", "out of memory", "-", "-", "-", "-"],
        ["c", "4.00 GiB", "-50 %", "5.00 GiB", "75", "+50 %"],
    ]


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
