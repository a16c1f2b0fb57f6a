import io
from pathlib import Path

import pytest
from rich.console import Console

from lean_ft.system import log
from lean_ft.training import progress
from lean_ft.training.progress import ProgressBar


def row(step, loss=1.25):
    return {
        "step": step,
        "epoch": step / 10,
        "loss": loss,
        "lr": 1e-5,
        "tokens_per_second": 1234.5,
        "peak_memory_bytes": 3 * 2**30,
    }


@pytest.fixture
def screen(monkeypatch):
    def replace(**settings):
        file = io.StringIO()
        settings = {"file": file, "highlight": False, "markup": False, "soft_wrap": True, **settings}
        for module in (log, progress):
            monkeypatch.setattr(module, "console", Console(**settings))
        return file

    return replace


def test_without_a_terminal_lines_come_now_and_then(screen, monkeypatch):
    file = screen()
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with ProgressBar(0, 100, Path()) as bar:
        for step in range(1, 101):
            clock[0] += 1
            bar.update(row(step))
    steps = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert "loss 1.25" in file.getvalue()
    assert "1,234 tok/s" in file.getvalue()
    assert "peak 3.00 GiB" in file.getvalue()


def test_time_left_counts_from_where_this_start_began(screen, monkeypatch):
    file, clock = screen(), [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with ProgressBar(90, 100, Path()) as bar:
        for clock[0], step, left in ((20.0, 92, "1 min 20 s left"), (32.0, 94, "36 s left")):
            bar.update(row(step))  # 8 steps of 10 s; 6 steps of 6 s, without the 1st, which compiles
            assert left in file.getvalue()


def test_on_a_terminal_a_bar_is_shown_and_cleared(screen):
    file = screen(force_terminal=True, width=150)
    with ProgressBar(0, 10, Path()) as bar:
        bar.update(row(4, loss=None))
        log.say("saved", "somewhere")
    shown = file.getvalue()
    assert "4/10" in shown
    assert "loss not finite" in shown
    assert "saved       somewhere" in shown
    assert shown.rstrip("\r\n").endswith(("\x1b[2K", "\x1b[?25h"))  # the bar is cleared and the cursor visible
