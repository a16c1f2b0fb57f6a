import json
import random

import numpy as np
import pytest
import torch

from lean_ft.training.random_state import capture_random_state, restore_random_state

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draws(device):
    # gauss and randn of one number leave half a pair behind in the generator, which is state too.
    return (
        [random.random(), random.gauss(0, 1)],
        [np.random.rand(), np.random.randn()],
        torch.randn(5).tolist(),
        torch.randn(5, device=device).tolist(),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_draws_repeat_after_a_trip_through_json(device):
    device = torch.device(device)
    draws(device)
    state = json.loads(json.dumps(capture_random_state(device)))
    first = draws(device)
    assert draws(device) != first
    restore_random_state(state, device)
    assert draws(device) == first


def seed():
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)


def test_capturing_draws_nothing():
    seed()
    expected = draws("cpu")
    seed()
    capture_random_state(torch.device("cpu"))
    assert draws("cpu") == expected
