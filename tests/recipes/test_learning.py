"""Each objective improves on held-out rows; online recipes sample as in training."""

import math

import pytest

from tests.recipes import test_distill, test_dpo, test_grpo, test_kto, test_online_dpo, test_ppo, test_reward
from tests.recipes.conftest import run_recipe

HELD_OUT_PAIRS = ("data.source=tiny/pairs_train.jsonl", "data.validation_source=tiny/pairs_validation.jsonl")
ONLINE = ("rewards=[exact_answer]", "data.validation_source=tiny/problems_validation.jsonl", "optimizer.lr=3e-4")
ONLINE += ("gradient_accumulation_steps=1", "generation.num_answers=8")
STUDENT = (*test_distill.LIVE, "model.path=tiny", "model.random_init=true", "data.validation_fraction=0.3")
ABOVE, BELOW = 1, -1
ROWS = [  # test module, settings, bounds of the last evaluation
    (test_grpo, (*ONLINE, "batch_size=64", "max_steps=12", "seed=1"), {"eval_reward": (ABOVE, 0.45)}),  # from 0.22
    (test_online_dpo, (*ONLINE, "batch_size=16", "max_steps=12"), {"eval_reward": (ABOVE, 0.4)}),
    pytest.param(
        test_ppo,
        (*ONLINE[:-1], "generation.passes=4", "batch_size=64", "max_steps=16"),
        {"eval_reward": (ABOVE, 0.45)},
        marks=pytest.mark.long,
    ),
    pytest.param(
        test_dpo,
        (*HELD_OUT_PAIRS, "batch_size=16", "optimizer.lr=1e-3", "max_steps=20"),
        {"eval_rewards/accuracies": (ABOVE, 0.6), "eval_loss": (BELOW, math.log(2))},
        marks=pytest.mark.long,
    ),
    pytest.param(
        test_kto,
        (*HELD_OUT_PAIRS, "batch_size=32", "optimizer.lr=3e-4", "max_steps=40"),
        {"eval_rewards/accuracies": (ABOVE, 0.55), "eval_loss": (BELOW, 0.497), "eval_rewards/margins": (ABOVE, 0)},
        marks=pytest.mark.long,
    ),
    pytest.param(
        test_reward,
        (*HELD_OUT_PAIRS, "batch_size=16", "max_steps=30", "eval_every=30"),
        {"eval_rewards/accuracies": (ABOVE, 0.52), "eval_loss": (BELOW, 0.692)},
        marks=pytest.mark.long,
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("module", "settings", "bounds"), ROWS, ids=lambda value: getattr(value, "RECIPE", ""))
def test_held_out_rows_improve(module, settings, bounds, tmp_path):
    lines = run_recipe(module.RECIPE, tmp_path / "run", *module.SETTINGS, *settings)
    *_, evaluation = [line for line in lines if bounds.keys() <= line.keys() and line["step"]]
    for name, (sign, bound) in bounds.items():
        assert sign * evaluation[name] > sign * bound, name


@pytest.mark.long
def test_the_divergence_from_the_teacher_falls(tmp_path):
    given = (*STUDENT, "data.train_on=all", "epochs=8", "max_steps=40", "eval_every=5")
    lines = run_recipe("distill", tmp_path / "run", *test_distill.SETTINGS, *given)
    evaluations = [line for line in lines if "eval_loss" in line]
    assert evaluations[-1]["eval_divergence"] < 0.8 * evaluations[0]["eval_divergence"]
    assert evaluations[-1]["eval_loss"] == evaluations[-1]["eval_divergence"]
