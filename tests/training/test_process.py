"""`start` seeds every generator and keeps float32 products exact."""

import random

import numpy as np
import pytest
import torch

from lean_ft.training import start


def draws():
    return random.random(), np.random.rand(), torch.rand(2).tolist()


def test_start_seeds_every_generator(config, tmp_path):
    start(config(tmp_path / "run", seed=7))
    first = draws()
    assert draws() != first
    start(config(tmp_path / "run", seed=7))
    assert draws() == first
    start(config(tmp_path / "run", seed=2**40))  # more than numpy takes
    assert draws() != first


def test_float32_products_keep_their_digits(config, tmp_path):
    torch.set_float32_matmul_precision("medium")
    start(config(tmp_path / "run"))
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_start_on_a_gpu(config, tmp_path):
    device = start(config(tmp_path / "run", device="cuda", seed=3))
    first = torch.rand(4, device=device)
    start(config(tmp_path / "run", device="cuda", seed=3))
    assert torch.equal(torch.rand(4, device=device), first)
