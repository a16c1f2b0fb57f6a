"""The suite exits without a GPU, can run small on a CPU, and keeps its time budget."""

import json

import gpu_suite
import pytest
import results
import typer
from typer.testing import CliRunner


@pytest.fixture
def suite(monkeypatch):
    """Run the suite's command with fixed hardware, because detecting it starts a process."""
    cpu = results.Hardware(
        device="cpu", cpu="Some CPU", cpu_features=[], cores=2, threads=1, memory_bytes=8 * 2**30, gpu=None
    )
    monkeypatch.setattr(results, "describe_hardware", lambda device="auto": cpu)
    app = typer.Typer()
    app.command()(gpu_suite.main)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_without_a_gpu_nothing_is_measured(suite, tmp_path):
    answer = suite("--results-dir", str(tmp_path))
    assert answer.exit_code == 0
    assert "No GPU" in answer.output
    assert list(tmp_path.iterdir()) == []


def test_what_the_budget_does_not_reach_is_listed_as_not_run(suite, tmp_path):
    answer = suite("--device", "cpu", "--shape", "tiny", "--budget-seconds", "0", "--results-dir", str(tmp_path))
    assert answer.exit_code == 0, answer.output
    (file,) = tmp_path.glob("gpu_suite_*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == [stage.name for stage in gpu_suite.STAGES]
    assert {row["status"] for row in rows} == {"not run"}
    assert list(tmp_path.glob("*")) == [file]  # and no stage wrote a result without a number


@pytest.mark.long
def test_a_stage_runs_at_a_small_size_and_writes_its_result(suite, tmp_path):
    arguments = ("--device", "cpu", "--shape", "tiny", "--stages", "attention", "--budget-seconds", "120")
    answer = suite(*arguments, "--results-dir", str(tmp_path))
    assert answer.exit_code == 0, answer.output
    (file,) = tmp_path.glob("attention_tiny_2x128_*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 3, rows
    packed, padded, whole = rows
    assert packed["computed_tokens"] == whole["computed_tokens"] == 256 < padded["computed_tokens"]
