"""Output of the command line: results to stdout, everything else to stderr.

A terminal gets colors, and text wrapped to its width. A pipe or a file gets plain, unwrapped lines.
"""

import re
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
_PIPE_COLUMNS = 100  # of a layout in columns
Rows = Sequence[Sequence[str]]

_BELOW = 8  # spaces before a cell that is below its row


def stdout() -> Console:
    return _console(sys.stdout)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False)


def layout_columns(console: Console) -> int:
    """The width of a table or of curves: the terminal's, or 100 columns for a pipe or a file."""
    return console.width if console.is_terminal else _PIPE_COLUMNS


def print_lines(text: str, before: str = "", stream: TextIO | None = None) -> None:
    """Print sentences, `before` in front of the first line, to stdout or the stream. A terminal gets lines of its
    width, broken at words and indented behind `before`."""
    out: TextIO = stream if stream is not None else sys.stdout
    lines = wrapped(text, _console(out).width, len(before)) if out.isatty() else text
    print(before + lines, file=out, flush=True)


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Print a titled table of names and their descriptions."""
    stdout().print(Text(title, style="bold"))
    if rows:
        print_table(("", ""), [("  " + name, text) for name, text in rows.items()])
    stdout().print("" if rows else "  none\n")


def print_table(columns: Sequence[str], rows: Rows) -> None:
    """Print rows of cells below their column names. A column whose name begins with `>` is right-aligned. If all names
    are empty, no header is printed. In a terminal too narrow for the longest words, the last column is below its rows,
    or each row is a paragraph."""
    console, right = stdout(), [name.startswith(">") for name in columns]
    rows = [[on_one_line(cell) for cell in row] for row in rows]
    names = [name.removeprefix(">") for name in columns]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    if not console.is_terminal:
        _print_padded(console, names, rows, right)
        return
    room = console.width - 2 * (len(names) - 1)
    fitted = _fitted(widths, _widths_of_words(names, rows, right), room)
    if sum(fitted) <= room:
        _print_wrapped(console, names, rows, fitted, right)
    elif not right[-1] and sum(widths[:-1]) <= room:
        _print_padded(console, names, rows, right, is_last_below=True)
    else:
        for row in rows:
            _print_paragraph(console, names, row)


def _print_wrapped(
    console: Console, names: Sequence[str], rows: Rows, widths: Sequence[int], right: Sequence[bool]
) -> None:
    """Print columns of these widths, in which cells take several lines."""
    table = Table(box=None, show_header=any(names), padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        side, style = "right" if right[i] else "left", "" if i else "cyan"
        table.add_column(name, justify=side, no_wrap=right[i], overflow="fold", style=style, width=widths[i])
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_padded(
    console: Console, names: Sequence[str], rows: Rows, right: Sequence[bool], *, is_last_below: bool = False
) -> None:
    """Print columns as wide as their widest cells; with `is_last_below`, the last cell below its row."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in [names, *rows] if any(names) else rows:
        padded = zip(row, widths, right, strict=True)
        cells = [f"{cell:{'>' if is_right else '<'}{width}}" for cell, width, is_right in padded]
        style = "bold" if row is names and console.is_terminal else ""
        line = "  ".join(cells[:-1] if is_last_below else cells).rstrip()
        if is_last_below and row[-1]:
            line += "\n" + " " * _BELOW + wrapped(row[-1], console.width, _BELOW)
        console.print(Text(line, style), soft_wrap=True)


def _widths_of_words(names: Sequence[str], rows: Rows, right: Sequence[bool]) -> list[int]:
    """The width that each column of a table needs, so that no word is broken."""

    def parts(cell: str, is_whole: bool) -> list[str]:
        return [cell] if is_whole else re.findall(r"^ *\S*|\S+", cell)

    columns = zip(zip(names, *rows, strict=True), right, strict=True)
    return [max(len(part) for cell in column for part in parts(cell, is_whole)) for column, is_whole in columns]


def _fitted(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Columns made narrower, the widest first and none below its `least`, until they fit into the room."""
    fitted = list(widths)
    while sum(fitted) > room and fitted != list(least):
        widest = max((i for i in range(len(fitted)) if fitted[i] > least[i]), key=lambda i: fitted[i])
        fitted[widest] -= 1
    return fitted


def _print_paragraph(console: Console, names: Sequence[str], row: Sequence[str]) -> None:
    """Print the first cell of a row, and below it the others with their column names."""
    facts = [f"{name}: {cell}" if name else cell for name, cell in list(zip(names, row, strict=True))[1:] if cell]
    indent = len(row[0]) - len(row[0].lstrip()) + 2
    console.print(Text(row[0], style="cyan"), soft_wrap=True)
    if facts:
        lines = wrapped(" " * indent + "; ".join(facts), console.width)
        console.print(Text(lines), soft_wrap=True)


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
