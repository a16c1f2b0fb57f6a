"""Words about evaluations."""

from pathlib import Path

import pytest

from lean_ft.training.evaluations import describe_evaluation, missing_evaluations
from lean_ft.training.length import Length
from lean_ft.training.starting import Start
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


ANSWERED = {"step": 0, "eval_exact_match": 0.5, "eval_questions": 8}


@pytest.mark.parametrize(
    ("rows", "settings", "is_complete", "is_missing"),
    [
        ([], (), False, True),  # a setting that is new in this start
        ([ANSWERED], (), False, False),  # asked before training
        ([ANSWERED], ("eval_pattern=(.)",), False, True),
        ([ANSWERED], (), True, True),  # killed before the answers after the last step
        ([ANSWERED, {**ANSWERED, "step": 4}], (), True, False),
        ([ANSWERED, {**ANSWERED, "step": 4}], ("eval_answers=9",), True, True),
        ([], ("eval_answers=0",), True, False),
    ],
)
def test_answers_are_asked_that_no_start_has_written(rows, settings, is_complete, is_missing) -> None:
    cfg = config_of("finetune", *SETTINGS["finetune"], "model.path=tiny", "eval_answers=8", *settings)
    start = Start(Path("run/step_00000004"), {"step": 4}, is_own=True, is_complete=is_complete, rows=rows)
    missing = missing_evaluations(cfg, start, Length(cfg, 10), has_held_out=True)
    assert missing.answers == is_missing
