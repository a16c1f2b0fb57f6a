import io
import json
import re

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
    with ProgressBar(0, 100) as bar:
        for step in range(1, 101):
            clock[0] += 1
            bar.written(row(step))
    steps = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert "loss 1.25" in file.getvalue()
    assert "1,234 tok/s" in file.getvalue()
    assert "peak 3.00 GiB" in file.getvalue()


def test_time_left_counts_from_where_this_start_began(screen, monkeypatch):
    file, clock = screen(), [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with ProgressBar(90, 100) as bar:
        for clock[0], step, left in ((20.0, 92, "1 min 20 s left"), (32.0, 94, "36 s left")):
            bar.written(row(step))  # 8 steps of 10 s; 6 steps of 6 s, without the 1st, which compiles
            assert left in file.getvalue()


ONLINE = {"reward": 0.5, "reward_std": 0.25, "completion_length": 9.0, "kl": 0.125, "loss": 1e-9}


@pytest.mark.parametrize(
    ("more", "state"),
    [
        (ONLINE, "reward 0.5  reward std 0.25  length 9  kl 0.125  loss 1e-09  1,234 tok/s"),
        (
            {**ONLINE, "value_loss": 0.75},
            "reward 0.5  reward std 0.25  length 9  kl 0.125  value loss 0.75  1,234 tok/s",
        ),
        ({"completion_length": 9.0, "target_tokens": 0, "loss": None}, "length 9  loss - (no targets)  1,234 tok/s"),
        ({"rewards/margins": 0.5, "rewards/accuracies": 0.75}, "loss 1.25  margin 0.5  right 75%  1,234 tok/s"),
    ],
)
def test_the_objectives_progress_comes_first_and_fits_a_terminal(more, state, screen):
    file = screen()
    with ProgressBar(0, 10) as bar:
        bar.written({**row(1), **more})
    assert f"  {state}  peak 3.00 GiB  " in file.getvalue()
    file = screen(force_terminal=True, width=80)
    with ProgressBar(0, 10) as bar:
        bar.written({**row(1), **more})
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).splitlines()
    (drawn,) = {line.strip() for line in lines if "left  " in line}
    shown = drawn.partition("left  ")[2]
    assert len(drawn) <= 80 and "1/10" in drawn
    assert f"{state}  peak".startswith(f"{shown}  ") or shown == f"{state}  peak 3.00 GiB"


def test_on_a_terminal_a_bar_is_shown_and_cleared(screen):
    file = screen(force_terminal=True, width=150)
    with ProgressBar(0, 10) as bar:
        bar.written(row(4, loss=None))
        log.say("saved", "somewhere")
    shown = file.getvalue()
    assert "4/10" in shown
    assert "loss not finite" in shown
    assert "saved       somewhere" in shown
    assert shown.rstrip("\r\n").endswith(("\x1b[2K", "\x1b[?25h"))  # the bar is cleared and the cursor visible


@pytest.fixture
def notebook(screen, monkeypatch):
    """The outputs of a notebook's cell, each as the list of its versions."""
    outputs = []

    class Handle:
        def __init__(self, versions):
            self.update = lambda output, raw: versions.append(output)

    def display(output, raw, display_id):
        assert raw and display_id
        outputs.append([output])
        return Handle(outputs[-1])

    ipython = pytest.importorskip("IPython.display")
    monkeypatch.setattr(ipython, "display", display)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    return outputs


@pytest.mark.long
def test_in_a_notebook_one_bar_and_one_curve_are_updated(notebook, monkeypatch, tmp_path):
    clock, lines = [0.0], tmp_path / "metrics.jsonl"
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with ProgressBar(0, 100, tmp_path) as bar:
        for step in range(1, 23):  # ended early
            clock[0] += 0.5
            with lines.open("a") as file:
                file.write(json.dumps({**row(step), "reward": step / 9, "eval_reward": 1.0}) + "\n")
            bar.written(row(step))
    bars, curves = notebook
    steps = [output["text/plain"].split("/")[0] for output in bars]
    assert steps == ["1", *map(str, range(5, 22, 4)), "22"], "every 2 s, and at the end"
    assert all('<progress value="' in output["text/html"] for output in bars)
    assert bars[-1]["text/html"].startswith('<progress value="22" max="100"></progress> <code>22/100  loss 1.25')
    assert len({output["image/png"] for output in curves}) == len(curves) == len(bars)
    assert all(output["image/png"].startswith(b"\x89PNG") for output in curves)


def test_what_fails_to_draw_ends_the_drawing_and_not_the_run(notebook, capsys, screen, tmp_path):
    file = screen()
    with ProgressBar(0, 3, tmp_path / "none") as bar:
        for step in (1, 2, 3):
            bar.written(row(step))
    assert notebook == []
    assert file.getvalue().count("notebook    the bar and the curve stop here: ValueError") == 1
