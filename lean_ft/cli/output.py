"""Where the command line's words go: results to stdout, everything else to stderr.

In a terminal there is colour and text is folded to its width; in a pipe or file every line is plain and whole.
"""

import sys
import traceback
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lean_ft.redaction import redact

_PIPE_WIDTH = 100_000  # columns: nothing is folded or cut, so that `grep` and `cut` see whole lines


def stdout() -> Console:
    return _console(sys.stdout)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Prints a titled table of names and what they are."""
    console = stdout()
    console.print(Text(title, style="bold"))
    if not console.is_terminal:
        width = max(map(len, rows), default=0)
        for name, text in rows.items():
            console.print(f"  {name:<{width}}  {text}".rstrip(), markup=False)
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=True)
        table.add_column(style="cyan", overflow="fold")
        table.add_column(overflow="fold")
        for name, text in rows.items():
            table.add_row(Text("  " + name), Text(text))
        console.print(table)
    console.print("" if rows else "  none\n")


def print_error(message: str, traceback_of: BaseException | None = None) -> None:
    """Prints `error: message` to stderr, after the traceback where one is wanted."""
    if traceback_of is not None:
        traceback.print_exception(traceback_of)
    console = _console(sys.stderr)
    console.print(Text("error: ", style="bold red") + Text(redact(message), style="default"), soft_wrap=True)
