"""Suggestions for mistyped names and names of other frameworks."""

import pytest

from lean_ft.losses import LOSSES
from lean_ft.settings.text import describe
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.spelling import ELSEWHERE, did_you_mean, nearest
from lean_ft.tokenizers import ROLES

KEYS = ["batch_size", "seed", "optimizer.lr", "optimizer.name", "schedule.name", "data.max_length", "model.path"]


@pytest.mark.parametrize(
    ("meant", "typed"),
    [
        ("batch_size", ["batchsize", "Batch_Size", "bat", "per_device_train_batch_size"]),
        ("seed", ["sed"]),
        ("optimizer.lr", ["lr", "optim.lr", "learning_rate"]),
        ("optimizer.name", ["optimizer.nam"]),
        ("schedule.name", ["schedule.nam", "lr_scheduler_type"]),
        ("data.max_length", ["max_len", "training.max_seq_length"]),
        ("model.path", ["modelpath"]),
        (None, ["qqqqqq", ""]),
    ],
)
def test_nearest(meant, typed):
    assert [nearest(name, KEYS) for name in typed] == [meant] * len(typed)


def test_names_of_other_frameworks_lead_to_existing_settings():
    names = ("finetune", "dpo", "reward", "grpo", "ppo")
    keys = {s.key for name in names for s in describe(load_recipe(find_recipe(name)).Config)}
    assert set(ELSEWHERE.values()) <= keys | set(LOSSES) | set(ROLES)


def test_did_you_mean_is_empty_if_nothing_is_near():
    assert did_you_mean("sed", KEYS) == " Did you mean 'seed'?"
    assert did_you_mean("qqqqqq", KEYS) == ""
    assert did_you_mean("seed", []) == ""
