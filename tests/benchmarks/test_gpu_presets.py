"""A result keeps its measured numbers when its presets are planned again."""

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
