"""Where the command line's words go: results to stdout, everything else to stderr.

In a terminal there is colour and text is folded to its width; in a pipe or file every line is plain and whole.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lean_ft.system.redaction import MAX_MESSAGE_CHARACTERS, printable

_PIPE_WIDTH = 100_000  # columns: nothing is folded or cut, so that `grep` and `cut` see whole lines


def stdout() -> Console:
    return _console(sys.stdout)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Prints a titled table of names and what they are."""
    stdout().print(Text(title, style="bold"))
    if rows:
        print_table(("", ""), [("  " + name, text) for name, text in rows.items()])
    stdout().print("" if rows else "  none\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of cells under the names of their columns, of which those that begin with `>` are right-aligned; no
    line of names where all are empty."""
    console, right = stdout(), [name.startswith(">") for name in columns]
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
    """A function that shows on stderr what is being done: in one line that changes in a terminal, else in a line each."""
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
    console = _console(sys.stderr)
    console.print(
        Text("error: ", style="bold red") + Text(printable(message, MAX_MESSAGE_CHARACTERS), style="default"),
        soft_wrap=True,
    )


def print_traceback(error: BaseException) -> None:
    print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
