"""Progress: a bar in a terminal, a bar and a curve in a notebook, a plain line every few seconds elsewhere."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lean_ft.system.log import console, in_notebook, say
from lean_ft.system.observer import Observer
from lean_ft.system.units import duration, gibibytes, number
from lean_ft.training.metrics import HEADLINES, Row
from lean_ft.training.notebook_view import NotebookView

T = TypeVar("T")

PLAIN_LINE_SECONDS = 10.0  # least time between two plain lines


def shown(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items, and show how many of `total` are done."""
    last_line = time.perf_counter()
    columns = (TextColumn(f"{what:<12}"), BarColumn(bar_width=12), MofNCompleteColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        for i, item in enumerate(items, start=1):
            yield item
            bar.update(task, completed=i, refresh=True)
            if not console.is_terminal and time.perf_counter() - last_line >= PLAIN_LINE_SECONDS:
                last_line = time.perf_counter()
                say(what, f"{i} of {total}")


class ProgressBar(Observer):
    """Shows training steps. Redrawn when metrics lines are written, without a thread."""

    def __init__(self, start_step: int, total_steps: int, directory: Path = Path()):
        self._start_step = start_step
        self._total_steps = total_steps
        # The time left is computed from here: the start, then the first step shown, which compiles and warms up.
        self._since = (start_step, time.perf_counter())
        self._last_line = float("-inf")
        self._bar: Progress | None = None
        self._view = NotebookView(directory) if in_notebook() else None

    def __enter__(self) -> "ProgressBar":
        if console.is_terminal:
            columns = (BarColumn(bar_width=12), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
            self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._bar.add_task("", total=self._total_steps, completed=self._start_step, state="first step ...")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._view is not None:
            self._view.close()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def written(self, row: Row) -> None:
        """Show the newest metrics line."""
        step, left, state = row["step"], f"{duration(self._seconds_left(row))} left", _state(row)
        if self._bar is not None:
            fields = [left, *state]
            room = console.width - 15 - 2 * len(str(self._total_steps))  # beside the bar and the steps
            while len("  ".join(fields)) > room and len(fields) > 1:
                fields.pop()
            self._bar.update(self._bar.task_ids[0], completed=step, state="  ".join(fields), refresh=True)
            return
        if self._view is not None:
            self._view.update(step, self._total_steps, "  ".join([*state, left]))
            return
        now = time.perf_counter()
        if now - self._last_line >= PLAIN_LINE_SECONDS or step == self._total_steps:
            self._last_line = now
            place = f"{step}/{self._total_steps}  epoch {row['epoch']:.2f}  lr {row['lr']:.2e}"
            say("step", "  ".join([place, *state, left]))

    def _seconds_left(self, row: Row) -> float:
        step, now = row["step"], time.perf_counter()
        first_step, then = self._since
        if first_step == self._start_step:
            self._since = (step, now)
        return (now - then) / max(1, step - first_step) * (self._total_steps - step)


def _state(row: Row) -> list[str]:
    """The objective's progress, the speed and the memory, the most important first."""
    loss = "- (no targets)" if row.get("target_tokens") == 0 else number(row["loss"])
    if "completion_length" in row:  # sampled completions, whose policy loss is about 0
        names = [name for name in HEADLINES if name in row and (name != "loss" or "value_loss" not in row)]
        shown = [f"{HEADLINES[name]} {loss if name == 'loss' else number(row[name])}" for name in names]
    else:
        shown = [f"loss {loss}"]
        if (drafting := row.get("mtp_loss")) is not None and drafting != row["loss"]:
            shown.append(f"mtp loss {number(drafting)}")
        if (margin := row.get("rewards/margins")) is not None:
            shown.append(f"margin {number(margin)}")
        if (right := row.get("rewards/accuracies")) is not None:
            shown.append(f"right {right:.0%}")
    return [*shown, f"{row['tokens_per_second']:,.0f} tok/s", f"peak {gibibytes(row['peak_memory_bytes'])}"]
