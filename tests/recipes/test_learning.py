"""Each objective improves on held-out rows; online recipes sample as in training."""

from pathlib import Path

import pytest

from tests.recipes.cases import LEARNED, SETTINGS, STUDENT
from tests.recipes.conftest import run_recipe

pytestmark = pytest.mark.long


@pytest.mark.parametrize("recipe", LEARNED)
def test_held_out_rows_improve(recipe: str, tmp_path: Path) -> None:
    settings, bounds = LEARNED[recipe]
    lines = run_recipe(recipe, tmp_path / "run", *SETTINGS[recipe], *settings)
    *_, evaluation = [line for line in lines if bounds.keys() <= line.keys() and line["step"]]
    for name, (sign, bound) in bounds.items():
        assert sign * evaluation[name] > sign * bound, name


def test_the_divergence_from_the_teacher_falls(tmp_path: Path) -> None:
    given = (*STUDENT, "data.validation_fraction=0.3", "data.train_on=all", "epochs=8", "max_steps=40", "eval_every=5")
    lines = run_recipe("distill", tmp_path / "run", *SETTINGS["distill"], *given)
    evaluations = [line for line in lines if "eval_loss" in line]
    assert evaluations[-1]["eval_divergence"] < 0.8 * evaluations[0]["eval_divergence"]
    assert evaluations[-1]["eval_loss"] == evaluations[-1]["eval_divergence"]
