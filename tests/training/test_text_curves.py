"""Curves as text: the panels of the picture, at the places of the values."""

import json
from pathlib import Path

import pytest

from lean_ft.training.curves import figure_of
from lean_ft.training.text_curves import text_of

LAST = 30  # step
LOSSES = [{"step": n, "loss": 4 - n / 10, "grad_norm": 1.0} for n in range(LAST + 1)]
ROWS = [*LOSSES, {"step": 15, "eval_loss": 2.5, "eval_exact_match": 0.5, "eval_questions": 4}]
ROWS += [{"step": LAST, "eval_loss": 1.0, "eval_exact_match": 0.75, "eval_questions": 4}]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "first", tmp_path / "zweiter Lauf é"]
    for folder, factor in zip(folders, (1.0, 0.5), strict=True):
        folder.mkdir()
        rows = [row | {"loss": row["loss"] * factor} if "loss" in row else row for row in ROWS]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folders


def panel_of(text: str, title: str) -> list[str]:
    """The lines of the leftmost panel between its axes."""
    lines = text.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith(title))
    return [line[line.index("┤│"[line.find("┤") < 0]) + 1 :] for line in lines[begin + 1 : begin + 9]]


def test_the_dots_are_at_the_values(runs):
    text = text_of(runs[:1], 40, "utf-8", has_colors=False).plain
    cells = panel_of(text, "loss")
    bits = (0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)
    dots = {
        (2 * column + x, 4 * row + y)
        for row, line in enumerate(cells)
        for column, character in enumerate(line)
        if 0x2800 <= ord(character) <= 0x28FF
        for x in range(2)
        for y in range(4)
        if ord(character) - 0x2800 & bits[x][y]
    }
    width = max(map(len, cells))
    for x, y in dots:  # the loss falls from 4 at the top left to 1 at the bottom right
        assert y == pytest.approx(x * 31 / (2 * width - 1), abs=1)
    marks = [(row, column) for row, line in enumerate(cells) for column, mark in enumerate(line) if mark == "●"]
    assert marks == [(4, width // 2), (7, width - 1)]
    assert {x // 2 for x, _ in dots} == {*range(width)} - {column for _, column in marks}
    assert text.count("\n4┤") == 1 and text.count("\n1┤") == 2 and text.count("\n0┤") == 1


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize(("encoding", "has_colors"), [("utf-8", True), ("utf-8", False), ("ascii", True)])
def test_every_terminal_gets_the_panels_of_the_picture(runs, columns, encoding, has_colors):
    text = text_of(runs, columns, encoding, has_colors)
    lines = text.plain.encode(encoding).decode(encoding).splitlines()
    assert max(map(len, lines)) <= columns
    figure = figure_of(runs)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["loss", "held-out questions right"]
    places = [text.plain.index(title) for title in titles]
    assert places == sorted(places)
    assert " ".join(figure.get_supxlabel().split()).replace("é", "é" if encoding == "utf-8" else r"\xe9") in " ".join(
        text.plain.split()
    )
    has_letters = not (encoding == "utf-8" and has_colors)
    assert [line[0] for line in lines[:2]] == (["a", "b"] if has_letters else ["⠶"] * 2)
    assert has_letters == ("capital letters: held-out" in text.plain)
    assert {span.style for span in text.spans} - {"bold", ""} == (set() if has_letters else {"bright_blue", "yellow"})


def test_learning_rates_of_a_sweep_are_apart(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, highest in zip(folders, (1e-4, 1e-3, 1e-2), strict=True):
        folder.mkdir()
        rows = [{"step": n, "lr": highest * factor} for n, factor in enumerate((0.0, 1.0, 1.0, 0.0))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (axes,) = figure_of(folders).axes
    assert axes.get_yscale() == "log" and axes.get_ylim()[0] == pytest.approx(1e-5)
    lines = text_of(folders, 80, "ascii", has_colors=False).plain.splitlines()
    begin = lines.index("learning rate, logarithmic") + 1
    middles = [line[40] for line in lines[begin : begin + 8]]
    # 3 decades on 32 dots in 8 rows: a third of them is between two rates
    assert middles == ["c", " ", "b", " ", " ", "a", " ", " "]
    assert lines[begin].startswith(" 0.01|") and lines[begin + 7].startswith("1e-05|")


def test_a_letter_is_a_run(runs):
    lines = text_of(runs, 80, "ascii", has_colors=True).plain.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("loss")) + 1
    curves = [line.partition("|")[2][:30] for line in lines[begin : begin + 8]]
    assert curves[0].startswith("a") and "b" not in curves[0]  # 4 to 3.5
    assert "b" in curves[-1] and "a" not in curves[-1]  # 0.9 to 0.5
    assert curves[4].lstrip(" ")[0] == "b"
