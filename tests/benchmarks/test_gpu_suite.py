"""The suite exits without a GPU, can run small on a CPU, keeps its time limit, and resumes after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def rows_in(folder: Path) -> dict:
    (file,) = folder.glob("gpu_suite_*.json")
    return {row["name"]: row for row in json.loads(file.read_text())["rows"]}


def test_what_the_time_limit_does_not_reach_is_listed_as_not_run(suite, tmp_path):
    answer = suite("--device", "cpu", "--shape", "tiny", "--minutes", "0", "--results-dir", str(tmp_path))
    assert answer.exit_code == 0, answer.output
    rows = rows_in(tmp_path)
    assert list(rows) == [part.name for part in gpu_suite.PARTS]
    assert {row["status"] for row in rows.values()} == {"not run"}
    assert len(list(tmp_path.glob("*"))) == 1  # and no part wrote a result without a number


@pytest.fixture
def one_second(monkeypatch):
    """Three parts that take no time: one writes a result with all rows, one with a row that lacked time, one fails."""
    write = "import json, sys; json.dump({{'rows': [{{'label': 'a', 'status': {0!r}}}]}}, open({1!r}, 'w'))"

    def part(name: str, code: str) -> gpu_suite.Part:
        return gpu_suite.Part(name, name, lambda sizes: ["-c", code], is_benchmark=False)

    def use(folder: Path) -> None:
        parts = [part(name, write.format(status, str(folder / f"{name}.json"))) for name, status in (
            ("whole", "ok"), ("cut", "timed out"))]  # fmt: skip
        monkeypatch.setattr(gpu_suite, "PARTS", (*parts, part("wrong", "raise SystemExit('a reason')")))

    return use


def test_a_second_call_skips_what_ended(suite, one_second, tmp_path):
    """A part that failed has ended too. A part with rows that lacked time runs again; --again repeats all."""
    one_second(tmp_path)
    arguments = ("--device", "cpu", "--shape", "tiny", "--results-dir", str(tmp_path))
    for more, skipped in (((), 0), ((), 2), (("--again",), 0)):
        answer = suite(*arguments, *more)
        assert answer.exit_code == 0, answer.output
        assert answer.output.count("skipped: ") == skipped, answer.output
        found = {name: (row["status"], row["reason"]) for name, row in rows_in(tmp_path).items()}
        assert found["cut"] == ("timed out", "no time was left for a")
        assert found["whole"][0] == "ok" and found["wrong"] == ("failed", "a reason")


def test_parts_of_other_code_or_sizes_run_again(suite, one_second, monkeypatch, tmp_path):
    one_second(tmp_path)
    arguments = ("--device", "cpu", "--parts", "whole", "--results-dir", str(tmp_path))
    assert "skipped" not in suite(*arguments, "--shape", "tiny").output
    assert "skipped" not in suite(*arguments, "--shape", "smollm2_135m").output
    assert "skipped" in suite(*arguments, "--shape", "smollm2_135m").output
    monkeypatch.setattr(gpu_suite, "commit", lambda: "another")
    assert "skipped" not in suite(*arguments, "--shape", "smollm2_135m").output


@pytest.mark.long
def test_a_killed_suite_leaves_nothing_running_and_resumes(tmp_path):
    """`kill -9` in the second part ends its processes. The next call runs this part and no earlier one."""
    command = [sys.executable, gpu_suite.__file__, "--device", "cpu", "--shape", "tiny", "--results-dir", str(tmp_path)]
    command += ["--parts", "kernels,attention"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("gpu_suite_*.json")):
        time.sleep(0.1)
    while not (children := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{child}/exe") for child in children):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the part still runs")
    assert rows_in(tmp_path).keys() == {"kernels"}
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.count("skipped: ok in an earlier call") == 1, again.stdout
    assert {row["status"] for row in rows_in(tmp_path).values()} == {"ok"}
    (file,) = tmp_path.glob("attention_tiny_2x128_*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 3, rows
    packed, padded, whole = rows
    assert packed["computed_tokens"] == whole["computed_tokens"] == 256 < padded["computed_tokens"]
