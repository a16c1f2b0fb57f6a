"""Tables and sentences in terminals of several widths."""

import io

import pytest
from rich.console import Console

from lean_ft.cli import output

PLAN_NAMES = ("", ">peak", ">speed", "overrides")
PLAN_ROWS = [
    ("*", "18.02 GiB", "1.18x", "memory.checkpointing=none optimizer.state=streamed"),
    ("", "9 GiB", "1x", "given"),
]
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

NAMES = ("  preset", "recipe", ">params", "what it trains on")
ROWS = [
    ("  a_model_of_8b/full", "full_finetune_single_device", "8.03 B", "completions with all parameters, on one device"),
    ("  b/lora", "finetune", "-", "completions with an adapter"),
]


@pytest.fixture
def shown(monkeypatch):
    """Return a function that prints to a terminal of a width and returns its lines."""

    def at(width: int, print_to, *arguments) -> list[str]:
        file = io.StringIO()
        monkeypatch.setattr(file, "isatty", lambda: True)
        console = Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False)
        monkeypatch.setattr(output, "_console", lambda stream: console)
        monkeypatch.setattr("sys.stdout", file)
        print_to(*arguments)
        return file.getvalue().splitlines()

    return at


@pytest.mark.parametrize("width", [40, 58, 59, 69, 70, 80, 120])
def test_no_word_of_a_table_is_broken(shown, width: int) -> None:
    lines = shown(width, output.print_table, NAMES, ROWS)
    assert max(map(len, lines)) <= width
    words = {word for row in ROWS for cell in row for word in cell.split()}
    assert words <= {word.strip(";,") for line in lines for word in line.split()} | {"parameters,"}
    # All columns but the last need 20, 27 and 6 columns, and 6 are between them.
    assert any(line.startswith("  preset ") for line in lines) == (width >= 59)


@pytest.mark.parametrize(("width", "expected"), [(40, BELOW), (56, BESIDE)])
def test_words_of_the_last_column_are_whole(shown, width: int, expected: str) -> None:
    lines = shown(width, output.print_table, PLAN_NAMES, PLAN_ROWS)
    assert [line.rstrip() for line in lines] == expected.splitlines()


def test_lines_are_indented_behind_their_beginning(shown) -> None:
    lines = shown(30, output.print_lines, "one commit adds or replaces the files", "to    ")
    assert lines == ["to    one commit adds or", "      replaces the files"]
