"""A result keeps its measured numbers when its presets are planned again. Timed steps begin when all have compiled."""

import json
import subprocess
from functools import partial

import gpu_presets
import pytest
import typer
from make_tables import render
from typer.testing import CliRunner

MEASURED = {
    "label": "tiny/full",
    "status": "ok",
    "reason": None,
    "allocated_bytes": 7,
    "reserved_bytes": 8,
    "launches": 5,
    "step_seconds": 0.25,
    "kernels": {"a": [1, 0.1]},
}
PLANNED = {"predicted_bytes": 1, "predicted_reserved_bytes": 2, "predicted_launches": 3.0, "predicted_seconds": 4.0}


@pytest.mark.parametrize("is_rehearsed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_planning_again_replaces_the_planned_numbers_alone(tmp_path, monkeypatch, is_rehearsed):
    if not is_rehearsed:  # in a process, for seconds
        again = dict.fromkeys(PLANNED, 2**21) | {"predicted_seconds": 0.5, "tokens": 64}
        print_plan = ["echo", json.dumps(again)]
        process = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        monkeypatch.setattr(gpu_presets, "start", lambda *_: process(print_plan))
    failed = {"label": "tiny/dpo", "status": "failed", "reason": "out of memory"}
    gpu = {"name": "NVIDIA H200", "memory_bytes": 2**37}
    result = {"benchmark": "gpu_presets", "measured_at": "2026-01-02T03:04:05+00:00", "commit": "abc", "settings": {}}
    result |= {"hardware": {"device": "cuda", "gpu": gpu}, "versions": {"torch": "2.11.0"}}
    (file := tmp_path / "result.json").write_text(json.dumps(result | {"rows": [MEASURED | PLANNED, failed]}))
    app = typer.Typer()
    app.command()(gpu_presets.main)
    answer = CliRunner().invoke(app, ["--predict", str(file)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output

    new = json.loads(file.read_text())
    assert new | result == new
    row, kept = new["rows"]
    assert row | MEASURED == row
    assert kept == failed
    assert row["predicted_bytes"] > 2**20
    assert row["predicted_launches"] > 10
    assert row["predicted_seconds"] < 1
    assert new["planned"]["torch"] in render(new)


def test_timed_steps_begin_when_all_have_compiled_planned_or_ended(tmp_path, monkeypatch):
    started = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    plans = [subprocess.Popen(["true"]), subprocess.Popen(["sleep", "100"]), subprocess.Popen(["true"])]
    given = iter([process for pair in zip(started, plans, strict=True) for process in pair])
    monkeypatch.setattr(gpu_presets, "start", lambda *_, **__: next(given))
    compilations = gpu_presets.Compilations(tmp_path, 3)
    for name in "abc":
        assert not compilations.are_over()
        compilations.start(name, tmp_path)
    try:
        for process in started[:2]:
            (tmp_path / f"lock.{process.pid}").touch()
        started[2].kill()  # such as out of memory
        started[2].wait()
        plans[0].wait(), plans[2].wait()
        assert not compilations.are_over(), "a plan still runs"
        plans[1].kill()
        plans[1].wait()
        assert compilations.are_over()
        compilations.release()
        assert (tmp_path / "lock.go").exists()
    finally:
        for process in (*started, *plans):
            process.kill()
            process.wait()


def test_a_newer_kernel_takes_its_share_of_the_older_ones_time():
    times = {gpu_presets.REPLACED["kDequantizeBlockwise"]: {"own": [1.0], "library": [4.0]}}
    kernels = {"void kDequantizeBlockwise<a>": [2, 0.2], "void EmbeddingBag_updateOutputKernel_sum_mean": [1, 0.1]}
    row = {"step_seconds": 1.0, "kernels": kernels}
    assert gpu_presets.seconds_with_todays_kernels(row, times) == pytest.approx(1 - 0.15)
    assert gpu_presets.seconds_with_todays_kernels(row, {}) == 1
