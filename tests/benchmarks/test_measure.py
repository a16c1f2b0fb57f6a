"""Measuring a process from outside: its memory, how it ends, and that no child remains."""

import os
import sys
import time
from pathlib import Path

import pytest
from measure import judge, measure_training, run_measured, summarize

MIB = 2**20


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def gone(pid: int) -> bool:
    """Whether a process ends within seconds; one that was killed and waits to be collected has ended."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def line(step: int, seconds: float, **more: float) -> dict[str, float]:
    return {"step": step, "step_seconds": seconds, "tokens": 64, "target_tokens": 60, "loss": 1.0} | more


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are watched through /proc")


@needs_proc
def test_the_memory_of_a_process_and_of_its_child_is_seen():
    code = """
import subprocess, sys, time
held = bytearray(150 * 2**20)
child = "import time; held = bytearray(100 * 2**20); time.sleep(1)"
subprocess.run([sys.executable, "-c", child])
"""
    measured = run_measured(python(code), timeout_seconds=60)
    assert measured.status == "ok"
    assert measured.peak_rss_bytes > 150 * MIB  # no upper bound: the kernel counts this process's own size in it
    assert 250 * MIB < measured.peak_tree_rss_bytes < 330 * MIB


@needs_proc
def test_a_process_that_takes_too_long_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
"""
    measured = run_measured(python(code), timeout_seconds=2)
    assert measured.status == "timed out"
    assert measured.seconds < 20
    for pid in pids.read_text().split():
        assert gone(int(pid))


def test_a_run_is_stopped_once_it_has_written_the_lines_that_are_wanted(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    code = f"""
import json, time
for step in range(1, 4):
    with open({str(metrics)!r}, "a") as file:
        file.write(json.dumps({{"step": step, "step_seconds": 0.1}}) + "\\n")
time.sleep(60)
"""
    started = time.monotonic()
    measured = run_measured(python(code), timeout_seconds=50, metrics_file=metrics, stop_after_steps=3)
    assert measured.status == "ok"
    assert [row["step"] for row in measured.steps] == [1, 2, 3]
    assert time.monotonic() - started < 40


@pytest.mark.parametrize(
    ("exit_code", "output", "status"),
    [
        (0, "error: of an earlier attempt", "ok"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "out of memory"),
        (1, "Traceback\nMemoryError", "out of memory"),
        (-9, "", "out of memory"),
        (1, "ValueError: no", "failed"),
        (2, "", "failed"),
        (-11, "", "failed"),
    ],
)
def test_how_a_command_ended(exit_code, output, status):
    assert judge(exit_code, output)[0] == status
    assert (judge(exit_code, output)[1] is None) == (status == "ok")


def test_speed_is_that_of_the_median_step_after_the_warmup():
    seconds = [9.0, 1.0, 4.0, 2.0]
    lines = [line(step, s, peak_memory_bytes=100 * step) for step, s in enumerate(seconds, 1)]
    summary = summarize(lines, warmup_steps=1, tokens_per_step=64)
    assert summary["step_seconds"] == 2.0
    assert summary["tokens_per_second"] == 32.0
    assert summary["peak_memory_bytes"] == 400
    assert summary["all_step_seconds"] == seconds


def test_a_failed_run_has_a_reason_and_no_number():
    row = measure_training(
        lambda run: python("raise ValueError('of its own')"),
        steps=1,
        warmup_steps=0,
        tokens_per_step=1,
        timeout_seconds=60,
    )
    assert (row["status"], row["reason"]) == ("failed", "ValueError: of its own")
    assert "tokens_per_second" not in row
    assert "peak_memory_bytes" not in row
