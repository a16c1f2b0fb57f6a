"""Settings that a recipe refuses once it has read its data, model and rewards."""

from pathlib import Path

import pytest

from tests.recipes.cases import REFUSED, SETTINGS
from tests.recipes.conftest import run_recipe


@pytest.mark.parametrize(
    ("recipe", "settings"), [(recipe, one) for recipe, rows in REFUSED.items() for one in rows], ids=str
)
def test_settings_are_refused_with_the_reason(recipe: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED[recipe][settings]):
        run_recipe(recipe, tmp_path / "run", *SETTINGS[recipe], *settings)
