"""Tables in terminals of several widths."""

import io

import pytest
from rich.console import Console

from lean_ft.cli import output

COLUMNS = ("", ">peak", ">speed", "overrides")
ROWS = [("*", "18.02 GiB", "1.18x", "memory.checkpointing=none optimizer.state=streamed"), ("", "9 GiB", "1x", "given")]
BELOW = """\
        peak  speed
        overrides
*  18.02 GiB  1.18x
        memory.checkpointing=none
        optimizer.state=streamed
       9 GiB     1x
        given
"""
BESIDE = """\
        peak  speed  overrides
*  18.02 GiB  1.18x  memory.checkpointing=none
                     optimizer.state=streamed
       9 GiB     1x  given
"""


@pytest.mark.parametrize(("width", "expected"), [(40, BELOW), (56, BESIDE)])
def test_words_of_the_last_column_are_whole(monkeypatch, width, expected):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(output, "stdout", lambda: console)
    output.print_table(COLUMNS, ROWS)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == expected.splitlines()
