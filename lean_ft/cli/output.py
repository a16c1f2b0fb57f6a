"""Output of the command line: results to stdout, everything else to stderr.

A terminal gets colors, and text wrapped to its width. A pipe or a file gets plain, unwrapped lines.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lean_ft.system.log import wrapped
from lean_ft.system.redaction import MAX_MESSAGE_CHARACTERS, escaped, on_one_line, printable

_PIPE_WIDTH = 100_000  # columns; lines are not wrapped, so that `grep` and `cut` see whole lines


def stdout() -> Console:
    return _console(sys.stdout)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Print a titled table of names and their descriptions."""
    stdout().print(Text(title, style="bold"))
    if rows:
        print_table(("", ""), [("  " + name, text) for name, text in rows.items()])
    stdout().print("" if rows else "  none\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells below their column names. A column whose name begins with `>` is right-aligned. If all names
    are empty, no header is printed."""
    console, right = stdout(), [name.startswith(">") for name in columns]
    rows = [[on_one_line(cell) for cell in row] for row in rows]
    names = [name.removeprefix(">") for name in columns]
    if console.is_terminal:
        table = Table(box=None, show_header=any(names), padding=(0, 2, 0, 0), header_style="bold")
        for i, name in enumerate(names):
            style = "" if i else "cyan"
            table.add_column(
                name, justify="right" if right[i] else "left", no_wrap=right[i], overflow="fold", style=style
            )
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in [names, *rows] if any(names) else rows:
        cells = zip(row, widths, right, strict=True)
        line = "  ".join(f"{cell:{'>' if is_right else '<'}{width}}" for cell, width, is_right in cells)
        console.print(Text(line.rstrip()), soft_wrap=True)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints progress to stderr: a status line in a terminal, otherwise one line per call."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        yield lambda doing: console.print(Text(doing))
        return
    with console.status("") as status:
        yield lambda doing: status.update(Text(doing))


def print_error(message: str, traceback_of: BaseException | None = None) -> None:
    """Print `error: message` to stderr, after the traceback if there is one to print."""
    if traceback_of is not None:
        print_traceback(traceback_of)
    console, message = _console(sys.stderr), f"error: {printable(message, MAX_MESSAGE_CHARACTERS)}"
    message = wrapped(message, console.width) if sys.stderr.isatty() else message
    label = Text("error: ", style="bold red")
    console.print(label + Text(message.removeprefix("error: "), style="default"), soft_wrap=True)


def print_note(text: str) -> None:
    """Print `note: text` to stderr."""
    print_remark(f"note: {text}")


def print_remark(text: str) -> None:
    """Print text to stderr."""
    note = escaped(text)
    print(wrapped(note, _console(sys.stderr).width) if sys.stderr.isatty() else note, file=sys.stderr, flush=True)


def print_traceback(error: BaseException) -> None:
    print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
