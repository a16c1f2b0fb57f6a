"""Suggestions for mistyped names and names of other frameworks."""

import pytest

from lean_ft.losses import LOSSES
from lean_ft.settings.text import describe
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.spelling import ELSEWHERE, did_you_mean, nearest
from lean_ft.tokenizers import ROLES

KEYS = ["batch_size", "seed", "optimizer.lr", "optimizer.name", "schedule.name", "data.max_length", "model.path"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("batchsize", "batch_size"),
        ("Batch_Size", "batch_size"),
        ("sed", "seed"),
        ("lr", "optimizer.lr"),
        ("optim.lr", "optimizer.lr"),
        ("schedule.nam", "schedule.name"),
        ("optimizer.nam", "optimizer.name"),
        ("max_len", "data.max_length"),
        ("modelpath", "model.path"),
        ("bat", "batch_size"),
        ("learning_rate", "optimizer.lr"),
        ("training.max_seq_length", "data.max_length"),
        ("per_device_train_batch_size", "batch_size"),
        ("lr_scheduler_type", "schedule.name"),
        ("qqqqqq", None),
        ("", None),
    ],
)
def test_nearest(typed, meant):
    assert nearest(typed, KEYS) == meant


def test_names_of_other_frameworks_lead_to_existing_settings():
    names = ("finetune", "dpo", "reward", "grpo", "ppo")
    keys = {s.key for name in names for s in describe(load_recipe(find_recipe(name)).Config)}
    assert set(ELSEWHERE.values()) <= keys | set(LOSSES) | set(ROLES)


def test_did_you_mean_is_empty_if_nothing_is_near():
    assert did_you_mean("sed", KEYS) == " Did you mean 'seed'?"
    assert did_you_mean("qqqqqq", KEYS) == ""
    assert did_you_mean("seed", []) == ""
