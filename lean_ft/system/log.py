"""The log of a run: lines that begin with a label."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from lean_ft.system.redaction import escaped, printable
from lean_ft.system.whole_files import open_in_place


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


# A notebook claims to be a terminal. It joins plain lines into one output, and not those that rich would display.
_plain = {"force_jupyter": False, "force_terminal": False if in_notebook() else None}
console = Console(highlight=False, markup=False, soft_wrap=True, **_plain)


def log_to(path: Path) -> None:
    """Append further lines to a file instead of printing them."""
    console.file = file = open_in_place(path, "a")
    file.reconfigure(line_buffering=True)  # type: ignore[attr-defined]


SLOW_SECONDS = 5.0


@contextmanager
def slow_calls_reported(what: str) -> Iterator[list[float]]:
    """Context manager that logs that a call of `what` is still running, after 5 s, 10 s, 20 s and so on.

    Yields the time at which the call began, in a list: set it at each of several calls, and to infinity in between.
    """
    began, done = [time.monotonic()], threading.Event()

    def report() -> None:
        limit = SLOW_SECONDS
        while not done.wait(SLOW_SECONDS / 5):
            seconds = time.monotonic() - began[0]
            limit = SLOW_SECONDS if seconds < SLOW_SECONDS else limit
            if seconds >= limit:
                say("waiting", f"{what} has run for {seconds:.0f} s")
                limit *= 2

    threading.Thread(target=report, daemon=True).start()
    try:
        yield began
    finally:
        done.set()


def say(label: str, text: str) -> None:
    """Print a label and a text, above the progress bar if there is one."""
    console.print(printable(f"{label:<12}{text}"))


def show(text: str, end: str = "\n") -> None:
    """Print text of a model or a file. On a terminal, control characters become escapes such as `\\x1b`, because the
    terminal would act on them. A pipe or a file gets the unchanged text."""
    print(escaped(text) if sys.stdout.isatty() else text, end=end, flush=True)
