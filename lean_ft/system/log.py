"""The log of a run: lines that begin with a label."""

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.cells import cell_len
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
def slow_calls_reported(what: str, slow_seconds: float | None = None) -> Iterator[list[float]]:
    """Context manager that logs that a call of `what` is still running, after 5 s (or `slow_seconds`), twice that time,
    four times that time and so on.

    Yields the time at which the call began, in a list: set it at each of several calls, and to infinity in between.
    """
    began, done = [time.monotonic()], threading.Event()

    def report() -> None:
        first = limit = SLOW_SECONDS if slow_seconds is None else slow_seconds
        while not done.wait(first / 5):
            seconds = time.monotonic() - began[0]
            limit = first if seconds < first else limit
            if seconds >= limit:
                say("waiting", f"{what} has run for {seconds:.0f} s")
                limit *= 2

    threading.Thread(target=report, daemon=True).start()
    try:
        yield began
    finally:
        done.set()


LABEL_COLUMNS = 12
_WHOLE = re.compile(r"`[^`\n]+`|^(?:leanft|python) .*", re.MULTILINE)  # commands, and other text in backticks
_SPACE = "\ue000"  # a private character, in place of a space at which no line is broken


def say(label: str, text: str) -> None:
    """Print a label and a text, above the progress bar if there is one. A terminal gets lines of its width, broken at
    words, and everything else the whole line."""
    text = printable(text)
    if console.file.isatty() and not in_notebook():
        text = wrapped(text, console.width, LABEL_COLUMNS)
    console.print(f"{printable(label):<{LABEL_COLUMNS}}{text}")


def wrapped(text: str, columns: int, indent: int = 0) -> str:
    """Return the text with its lines broken at words, for a terminal of so many columns. The first line begins behind
    `indent` columns, and the others with as many spaces. An item of a list that begins with a dash is indented by it.

    Commands are not broken, so that they can be copied. The terminal breaks those that are too long.
    """
    text, lines = _WHOLE.sub(lambda whole: whole[0].replace(" ", _SPACE), text), list[str]()
    for line in text.split("\n"):
        content = line.lstrip(" ")
        broken, margin = "", " " * (len(line) - len(content) + indent)
        more = margin + ("  " if content.startswith("- ") else "")
        for word in re.findall(" *[^ ]+", content):
            if broken and cell_len(margin + broken + word) > columns:
                lines.append(margin + broken)
                margin, word, broken = more, word.lstrip(" "), ""
            broken += word
        lines.append(margin + broken)
    return "\n".join(lines).replace(_SPACE, " ")[indent:]


def show(text: str, end: str = "\n") -> None:
    """Print text of a model or a file. On a terminal, control characters become escapes such as `\\x1b`, because the
    terminal would act on them. A pipe or a file gets the unchanged text."""
    print(escaped(text) if sys.stdout.isatty() else text, end=end, flush=True)
