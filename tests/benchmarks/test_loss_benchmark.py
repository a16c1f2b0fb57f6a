"""All compared losses compute the same, and a missing peer has a reason."""

import linear_cross_entropy as benchmark
import pytest
import torch
from measure import Budget, measure_contestants


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


@pytest.mark.long
def test_a_contestant_is_measured_in_a_fresh_process():
    arguments = ["--shape", "tiny", "--tokens", "256", "--chunk-tokens", "64", "--repeats", "2", "--device", "cpu"]
    (row,) = measure_contestants(benchmark.__file__, {"lean_ft": "lean_ft"}, arguments, Budget(120))
    assert row["status"] == "ok", row
    assert row["seconds"] > 0
    # At least half of the weight's gradient, less than the plain computation's copies of the logits.
    assert row["extra_bytes"] is None or 0.5 * 8192 * 64 * 2 < row["extra_bytes"] < 100 * 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="Liger's kernels run on a GPU")
def test_an_absent_peer_has_a_reason():
    with pytest.raises(LookupError, match=r"not installed|need a GPU"):
        benchmark.contestant("liger", chunk_tokens=64)
