"""The output losses that are compared compute one thing, and an absent peer is named as absent."""

import linear_cross_entropy as benchmark
import pytest
import torch
from measure import Budget, measure_contestants


@pytest.mark.parametrize("name", [n for n in benchmark.LABELS if "compiled" not in n and "weight_sums" not in n])
def test_every_contestant_gives_the_loss_and_the_gradients(name):
    try:
        loss_of = benchmark.contestant(name, chunk_tokens=256)
    except LookupError as absent:
        pytest.skip(str(absent))
    errors = benchmark.errors(loss_of, torch.device("cpu"))
    # Far from a mistake, and wide enough for PyTorch's chunks, which sum in bfloat16.
    assert max(errors.values()) < 3e-2


def test_the_inputs_make_logits_of_ordinary_size():
    hidden, weight, labels = benchmark.inputs(256, 64, 512, torch.device("cpu"), seed=0)
    assert 0.8 < float((hidden.float() @ weight.float().T).std().detach()) < 1.2
    assert labels.shape == (256,)


@pytest.mark.long
def test_a_contestant_is_measured_in_a_fresh_process():
    arguments = ["--shape", "tiny", "--tokens", "256", "--chunk-tokens", "64", "--repeats", "2", "--device", "cpu"]
    (row,) = measure_contestants(benchmark.__file__, {"lean_ft": "lean_ft"}, arguments, Budget(120))
    assert row["status"] == "ok", row
    assert row["seconds"] > 0
    # At least half of the weight's gradient, at most the plain computation's several copies of the logits.
    assert row["extra_bytes"] is None or 0.5 * 8192 * 64 * 2 < row["extra_bytes"] < 100 * 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="Liger's kernels run on a GPU")
def test_an_absent_peer_has_a_reason():
    with pytest.raises(LookupError, match=r"not installed|need a GPU"):
        benchmark.contestant("liger", chunk_tokens=64)


def test_an_absent_peer_shows_as_absent():
    rows = [{"label": "liger", "status": "absent", "reason": "liger_kernel is not installed"}]
    assert benchmark.table_cells({"rows": rows}) == [["liger", "absent", "-", "-", "-"]]
