"""The log lines at a run's start and end."""

from pathlib import Path

import pytest

from tests.recipes.cases import SETTINGS, SIZES
from tests.recipes.conftest import run_recipe


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "settings", "size"), SIZES, ids=str)
def test_the_size_of_a_step_has_the_unit_of_batch_size(name, settings, size, tmp_path: Path, capsys) -> None:
    run_recipe(name, tmp_path / "run", *SETTINGS[name], *settings, "max_steps=1")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    assert line.endswith(f" per epoch; {size}")
