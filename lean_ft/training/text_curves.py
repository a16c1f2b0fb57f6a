"""Curves of runs as text, for a terminal without a viewer of pictures: the panels of the picture (curves.py)."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from lean_ft.system.redaction import on_one_line
from lean_ft.system.units import number
from lean_ft.training.curves import MAX_COLUMNS, Panel, Points, drawing_of, read_curves

_ROWS = 8  # of a panel's curves
_LEAST_COLUMNS = 40  # of a panel, with the gap beside it
_STYLES = "bright_blue", "yellow", "green", "red", "magenta", "cyan"
_DOTS = (0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)  # bits of a Braille character, by column and row of the dot
_SYMBOLS = "⣿│└─┤┴●"


@dataclass(frozen=True)
class _Style:
    """How curves are drawn: in Braille dots, or as a letter per run where colors or Unicode are missing."""

    encoding: str
    is_unicode: bool
    is_letters: bool

    def text(self, foreign: str) -> str:
        """Foreign text on one line, with escapes for characters that the encoding lacks."""
        return on_one_line(foreign).encode(self.encoding, "backslashreplace").decode(self.encoding)

    def mark(self, run: int, is_held_out: bool, dots: int = 0xFF) -> str:
        """The character of a run's curve in a cell with these dots, or of a held-out value."""
        if self.is_letters:
            return chr(ord("A" if is_held_out else "a") + run % 26)
        return "●" if is_held_out else chr(0x2800 + dots)

    def colored(self, run: int, text: str) -> Text:
        return Text(text, "" if self.is_letters else _STYLES[run % len(_STYLES)])


def text_of(runs: Sequence[Path], columns: int, encoding: str, has_colors: bool) -> Text:
    """The curves of runs in lines of `columns` characters, at least 40.

    Without colors, several runs are drawn as letters. An encoding without Braille characters gets ASCII. Raises
    ValueError as `read_curves`.
    """
    curves = read_curves(runs)
    drawn = drawing_of(curves)
    is_unicode = _can_encode(_SYMBOLS, encoding)
    style = _Style(encoding, is_unicode, is_letters=not is_unicode or (len(runs) > 1 and not has_colors))
    marks = [style.mark(i, is_held_out=False, dots=0x36) for i in range(len(curves))]
    lines = [style.colored(i, f"{marks[i]} {style.text(run.name)}") for i, run in enumerate(curves)]
    notes = [f"{style.mark(0, is_held_out=True)} held-out"] if drawn.has_held_out else []
    if drawn.has_held_out and style.is_letters:
        notes = ["capital letters: held-out"]
    notes += [f"curves: {drawn.means}"] if drawn.means else []
    lines += [Text(line) for note in notes for line in textwrap.wrap(note, columns)]
    first, last = (function(row["step"] for run in curves for row in run.rows) for function in (min, max))
    side_by_side = max(1, min(MAX_COLUMNS, columns // _LEAST_COLUMNS, len(drawn.panels)))
    width = (max(_LEAST_COLUMNS, columns) + 2) // side_by_side - 2
    margin = max((len(number(limit)) for panel in drawn.panels for limit in _limits(panel)), default=0)
    blocks = [_block(panel, width, margin, (first, last), style) for panel in drawn.panels]
    for start in range(0, len(blocks), side_by_side):
        lines += [Text(), *(Text("  ").join(row) for row in zip(*blocks[start : start + side_by_side], strict=True))]
    lines += [Text()] * bool(blocks and drawn.lines)
    lines += (Text(line) for text in drawn.lines for line in textwrap.wrap(style.text(text), columns))
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _limits(panel: Panel) -> tuple[float, float]:
    shown = [value for run in panel.runs for points in (run.curve, run.held_out) for value in points[1]]
    return panel.limits or (min(shown), max(shown))


def _block(panel: Panel, width: int, margin: int, steps: tuple[int, int], style: _Style) -> list[Text]:
    """A panel as lines of `width` characters: the title, the curves between the axes, and the first and last step.

    The limits of the vertical axis are in a margin of `margin` characters.
    """
    low, high = _limits(panel)
    labels = {0: number(high), _ROWS - 1: number(low)}
    cells = _cells(panel, width - margin - 1, steps, (low, high), style)
    bar, tick, corner, dash = "│┤└─" if style.is_unicode else "||+-"
    lines = [Text(style.text(panel.title), "bold")]
    for row in range(_ROWS):
        axis = f"{labels.get(row, ''):>{margin}}{tick if row in labels else bar}"
        lines.append(Text.assemble(axis, *(cells.get((column, row), " ") for column in range(width - margin - 1))))
    lines.append(Text(" " * margin + corner + dash * (width - margin - 1)))
    begin, end = f"step {steps[0]:,}", f"{steps[1]:,}"
    lines.append(Text(" " * (margin + 1) + begin + f"{end:>{width - margin - 1 - len(begin)}}"))
    for line in lines:
        line.truncate(width, pad=True)
    return lines


def _cells(
    panel: Panel, width: int, steps: tuple[int, int], limits: tuple[float, float], style: _Style
) -> dict[tuple[int, int], Text]:
    """The characters of a panel's curves by column and row; a later run covers an earlier one."""
    low, high = map(panel.scaled, limits)
    across = (2 * width - 1) / max(1, steps[1] - steps[0])
    down = (4 * _ROWS - 1) / ((high - low) or 1.0)

    def places(points: Points) -> list[tuple[int, int]]:
        """Dots, 2 across and 4 down in each character."""
        return [
            (round((step - steps[0]) * across), round((high - max(low, panel.scaled(value))) * down))
            for step, value in zip(*points, strict=True)
        ]

    cells: dict[tuple[int, int], Text] = {}
    for i, run in enumerate(panel.runs):
        dots: dict[tuple[int, int], int] = {}
        corners = places(run.curve)
        for (x, y), (to_x, to_y) in zip(corners, corners[1:] or corners, strict=False):
            length = max(abs(to_x - x), abs(to_y - y), 1)
            for part in range(length + 1):
                at_x, at_y = x + round(part * (to_x - x) / length), y + round(part * (to_y - y) / length)
                cell = at_x // 2, at_y // 4
                dots[cell] = dots.get(cell, 0) | _DOTS[at_x % 2][at_y % 4]
        cells |= {cell: style.colored(i, style.mark(i, False, bits)) for cell, bits in dots.items()}
    for i, run in enumerate(panel.runs):
        marks = {(x // 2, y // 4): style.colored(i, style.mark(i, True)) for x, y in places(run.held_out)}
        cells |= marks
    return cells
