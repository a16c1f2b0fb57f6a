import json
import math
from types import SimpleNamespace

import pytest
import torch

from lean_ft.system.run_directory import lines_until
from lean_ft.training.metrics import Metrics, trim_metrics

CPU = torch.device("cpu")


def batch(tokens, targets):
    return SimpleNamespace(num_tokens=tokens, num_targets=targets)


def record(metrics, step, loss=1.0, grad_norm=None):
    metrics.begin_step()
    values = {"loss": loss, "grad_norm": grad_norm}
    metrics.record(step, lr=0.1, values=values, micro_batches=[batch(10, 4), batch(6, 1)])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def read(path):
    # parse_constant: NaN and Infinity are Python extensions, not JSON
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_values_are_those_at_the_time_of_recording(path):
    metrics = Metrics(path, CPU, steps_per_epoch=4)
    loss, norm = torch.tensor(0.1), torch.tensor(2.0, dtype=torch.float64)
    record(metrics, 1, loss, norm)
    loss.zero_()
    norm.zero_()
    record(metrics, 2, 0.1, None)
    assert not path.exists()
    metrics.flush()
    first, second = read(path)
    assert first["loss"] == second["loss"] == torch.tensor(0.1).item()  # float32, digit for digit
    assert (first["grad_norm"], second["grad_norm"]) == (2.0, None)
    assert (first["tokens"], first["target_tokens"], second["epoch"]) == (16, 5, 0.5)
    assert metrics.flush() == []


def test_further_values_of_a_step_end_its_line_and_none_is_left_out(path):
    metrics = Metrics(path, CPU, steps_per_epoch=1)
    for step, extra in enumerate((torch.tensor(0.25), None, 0.5), start=1):
        metrics.begin_step()
        values = {"loss": 1.0, "grad_norm": 2.0, "router_aux_loss": extra}
        metrics.record(step, lr=0.1, values=values, micro_batches=[batch(8, 4)])
    metrics.flush()
    lines = read(path)
    assert [line.get("router_aux_loss", "absent") for line in lines] == [0.25, "absent", 0.5]
    assert [(line["loss"], line["grad_norm"]) for line in lines] == [(1.0, 2.0)] * 3


def test_values_that_are_not_finite_are_named(path):
    metrics = Metrics(path, CPU, steps_per_epoch=1)
    record(metrics, 1, torch.tensor(math.nan), torch.tensor(-math.inf))
    metrics.flush()
    metrics.write_line(1, {"eval_loss": math.inf, "accuracy": 0.5})
    step, evaluation = read(path)
    assert step["loss"] is step["grad_norm"] is evaluation["eval_loss"] is None
    assert step["non_finite"] == {"loss": "nan", "grad_norm": "-inf"}
    assert evaluation["non_finite"] == {"eval_loss": "inf"}
    assert evaluation["accuracy"] == 0.5


def test_recording_does_not_read_the_tensors(path, monkeypatch):
    """Reading a value synchronizes with the device; only flush may do it."""
    metrics = Metrics(path, CPU, steps_per_epoch=1)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "__bool__", "__int__", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("read a tensor's value"))
        for step in range(1, 4):
            record(metrics, step, torch.tensor(0.5), torch.tensor(0.5))
    assert len(metrics.flush()) == 3


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 2), (2, 3), (9, 3)])
def test_trimming_keeps_whole_lines_up_to_the_step(step, kept, path):
    lines = ['{"step": 1, "loss": 1}\n', '{"step": 1, "eval_loss": 1}\n', '{"step": 2, "loss": 2}\n']
    path.write_text("".join(lines) + '{"step": 3, "lo')
    assert lines_until(path, step)[0] == [json.loads(line) for line in lines[:kept]]
    trim_metrics(path, step)
    assert path.read_text() == "".join(lines[:kept])


@pytest.mark.parametrize(
    "damage", [lambda lines: [b"\0" * 60], lambda lines: [lines[0], b"\0" * 9 + lines[1], lines[2]]]
)
def test_lines_lost_in_a_power_cut_are_reported_and_the_file_kept(damage, path, capsys):
    lines = [b'{"step": %d, "loss": 1}\n' % step for step in (1, 2, 3)]
    path.write_bytes(damaged := b"".join(damage(lines)))
    kept, _ = lines_until(path, 3)
    trim_metrics(path, 3)
    assert f"lost the lines of steps {len(kept) + 1} to 3" in capsys.readouterr().out
    assert (path.parent / "metrics.damaged.jsonl").read_bytes() == damaged
    assert path.read_bytes() == b"".join(lines[: len(kept)])
    trim_metrics(path, len(kept))  # no further line is removed
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
def test_on_a_gpu_recording_waits_for_nothing_and_times_the_device(path):
    device = torch.device("cuda")
    metrics = Metrics(path, device, steps_per_epoch=1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.begin_step()
        torch.cuda._sleep(200_000_000)  # cycles: 0.1 s or more
        loss = torch.ones((), device=device)
        metrics.record(1, lr=0.1, values={"loss": loss, "grad_norm": loss}, micro_batches=[batch(10, 4)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (row,) = metrics.flush()
    assert row["step_seconds"] > 0.05
