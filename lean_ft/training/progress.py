"""What a run says: a bar that lives in the terminal, or a plain line now and then where there is none."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lean_ft.redaction import redact
from lean_ft.training.metrics import Row

PLAIN_LINE_SECONDS = 10.0  # least time between two lines where no terminal shows a bar
GIB = 2**30

console = Console(highlight=False, markup=False, soft_wrap=True)


def say(label: str, text: str) -> None:
    """Print one line of the log: a word for what it is about, then the text. Goes above the bar where one is shown."""
    console.print(redact(f"{label:<12}{text}"))


def gibibytes(count: float) -> str:
    """Bytes in the unit that suits their size: `512 B`, `3.1 MiB`, `13.25 GiB`."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:.1f} MiB"
    if count >= 2**10:
        return f"{count / 2**10:.1f} KiB"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as people read them: `0.4 s`, `42 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


class ProgressBar:
    """Shows steps as their metrics lines are written. Redrawn then only, with no thread that draws in between."""

    def __init__(self, start_step: int, total_steps: int):
        self._start_step = start_step
        self._total_steps = total_steps
        self._started = self._last_line = time.perf_counter()
        self._bar: Progress | None = None

    def __enter__(self) -> "ProgressBar":
        self._started = time.perf_counter()
        self._last_line = float("-inf")
        if console.is_terminal:
            columns = (BarColumn(bar_width=12), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))  # within 80
            self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(
                "", total=self._total_steps, completed=self._start_step, state="first step ..."
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, row: Row) -> None:
        """Show the state that the newest metrics line tells."""
        step = row["step"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, state=self._state(row), refresh=True)
            return
        now = time.perf_counter()
        if now - self._last_line >= PLAIN_LINE_SECONDS or step == self._total_steps:
            self._last_line = now
            place = f"{step}/{self._total_steps}  epoch {row['epoch']:.2f}  lr {row['lr']:.2e}"
            say("step", f"{place}  {self._state(row)}")

    def _state(self, row: Row) -> str:
        step = row["step"]
        elapsed = time.perf_counter() - self._started
        left = elapsed / max(1, step - self._start_step) * (self._total_steps - step)
        return (
            f"loss {number(row['loss'])}  {row['tokens_per_second']:,.0f} tok/s  "
            f"peak {gibibytes(row['peak_memory_bytes'])}  {duration(left)} left"
        )
