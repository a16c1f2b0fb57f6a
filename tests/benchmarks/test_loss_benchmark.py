"""All compared losses compute the same."""

import linear_cross_entropy as benchmark
import pytest
import torch


@pytest.mark.first(2)
@pytest.mark.parametrize("name", [n for n in benchmark.LABELS if "compiled" not in n and "weight_sums" not in n])
def test_every_contestant_gives_the_loss_and_the_gradients(name, monkeypatch):
    monkeypatch.setattr(benchmark, "ERROR_TOKENS", 256)
    monkeypatch.setattr(benchmark, "ERROR_VOCAB", 1024)
    try:
        loss_of = benchmark.contestant(name, chunk_tokens=64)
    except LookupError as absent:
        pytest.skip(str(absent))
    errors = benchmark.errors(loss_of, torch.device("cpu"))
    # PyTorch's chunks accumulate in bfloat16; a mistake is much larger.
    assert max(errors.values()) < 3e-2
