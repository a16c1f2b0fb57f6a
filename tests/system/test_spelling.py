"""Suggestions for mistyped names."""

import pytest

from lean_ft.system.spelling import did_you_mean, nearest

KEYS = ["batch_size", "seed", "optimizer.lr", "optimizer.name", "schedule.name", "data.max_length", "model.path"]


@pytest.mark.parametrize(
    ("meant", "typed"),
    [
        ("batch_size", ["batchsize", "Batch_Size", "bat"]),
        ("seed", ["sed"]),
        ("optimizer.lr", ["lr", "optim.lr"]),
        ("optimizer.name", ["optimizer.nam"]),
        ("schedule.name", ["schedule.nam"]),
        ("data.max_length", ["max_len"]),
        ("model.path", ["modelpath"]),
        (None, ["qqqqqq", ""]),
    ],
)
def test_nearest(meant, typed):
    assert [nearest(name, KEYS) for name in typed] == [meant] * len(typed)


def test_did_you_mean_is_empty_if_nothing_is_near():
    assert did_you_mean("sed", KEYS) == " Did you mean 'seed'?"
    assert did_you_mean("qqqqqq", KEYS) == ""
    assert did_you_mean("seed", []) == ""
