"""Words about evaluations."""

import pytest

from lean_ft.training.evaluations import describe_evaluation
from tests.recipes.cases import SETTINGS
from tests.recipes.conftest import config_of

OF_PAIRS = {"eval_loss": 0.5, "eval_rewards/accuracies": 0.75}
OF_TEXTS = {"eval_loss": 0.5, "eval_accuracy": 0.75, "eval_macro_f1": 0.7}


@pytest.mark.parametrize(
    ("recipe", "row", "words"),
    [
        ("dpo", OF_PAIRS, "held-out loss 0.5, 75.0% of pairs right"),
        ("kto", OF_PAIRS, "held-out loss 0.5, 75.0% of pairs right"),
        ("classify", OF_TEXTS, "held-out loss 0.5, 75.0% of texts right, macro-F1 0.700"),
        ("grpo", {"eval_loss": 0.5, "eval_accuracy": 0.75}, "held-out loss 0.5, 75.0% right"),
        ("finetune", {"eval_loss": None}, "no held-out token has a label"),
    ],
)
def test_an_evaluation_names_what_was_right(recipe: str, row: dict, words: str) -> None:
    assert describe_evaluation(config_of(recipe, *SETTINGS[recipe], "model.path=tiny"), row) == words
