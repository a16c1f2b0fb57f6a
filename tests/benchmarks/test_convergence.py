"""Settings of the rows are settings of the recipe."""

import pytest
from convergence import BASE, ROWS, TASKS
from measure import overrides

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_row_is_settings_of_the_recipe(tmp_path, task) -> None:
    config = load_recipe(recipes()["full_finetune_single_device"]).Config
    own = {"model.path": "x", "data.source": "x", "output_dir": tmp_path, **BASE, **task.settings}
    for row in ROWS:
        load_config(config, None, overrides({**own, **row.settings}))
