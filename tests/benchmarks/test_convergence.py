"""Differences are relative to float32, and rows beyond their limit are found."""

import pytest
from convergence import BASE, ROWS, TASKS, table_cells
from measure import overrides

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes

REFERENCE = {"name": "float32", "label": "a", "status": "ok", "bound": 0.0, "state": "1 KiB", "losses": [4.0, 2.0]}
REFERENCE |= {"last_loss": 2.0, "eval_loss": 1.0}
RESULT = {
    "hardware": {"device": "cpu", "cpu": "Some CPU", "cores": 4},
    "rows": [
        REFERENCE,
        {**REFERENCE, "name": "b", "label": "b", "bound": 0.05, "last_loss": 2.05, "eval_loss": 1.1},
        {"name": "c", "label": "c", "status": "timed out", "reason": "slow", "bound": 0.1},
    ],
}


def test_differences_are_from_float32_and_a_missing_number_keeps_its_row() -> None:
    assert table_cells(RESULT) == [
        ["a", "1 KiB", "2.0000", "-", "1.0000", "-", "-"],
        ["b", "1 KiB", "2.0500", "+2.5%", "1.1000", "+10.0%", "+5%"],
        ["c", "timed out", "-", "-", "-", "-", "-"],
    ]


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_row_is_settings_of_the_recipe(tmp_path, task) -> None:
    config = load_recipe(recipes()["full_finetune_single_device"]).Config
    own = {"model.path": "x", "data.source": "x", "output_dir": tmp_path, **BASE, **task.settings}
    for row in ROWS:
        load_config(config, None, overrides({**own, **row.settings}))
