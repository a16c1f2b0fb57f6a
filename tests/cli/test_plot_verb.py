"""`leanft plot`: output files, text and input errors."""

import sys
from pathlib import Path

import pytest

from lean_ft.training import curves

METRICS = (
    '{"step": 1, "loss": 2.0, "tokens": 8, "step_seconds": 1.0}\n{"step": 2, "loss": 1.0, "tokens": 8, '
    '"step_seconds": 1.0}\n'
)


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """The current directory, with runs `a` and `b`."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(METRICS)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("arguments", "picture"),
    [
        (("a", "b"), "curves.png"),
        (("a",), "a/curves.png"),
        (("a", "b", "-o", "mine"), "mine.png"),
        (("a", "-o", "b/c.png"), "b/c.png"),
    ],
)
def test_one_run_keeps_its_curves_and_several_have_them_here(leanft, two_runs, arguments, picture):
    answer = leanft("plot", *arguments)
    assert (answer.code, answer.out) == (0, f"{picture}\n"), answer.err
    assert Path(picture).stat().st_size


def test_no_file_is_overwritten_without_a_word(leanft, two_runs, monkeypatch):
    monkeypatch.setattr(curves, "draw_curves", lambda runs, picture: picture.write_bytes(b"drawn"))
    assert leanft("plot", "a", "b").out == "curves.png\n"
    assert leanft("plot", "a", "b").out == "curves_2.png\n"
    leanft("plot", "a")
    assert leanft("plot", "a").out == "a/curves.png (replaced)\n"
    Path("mine.png").write_text("mine")
    refused = leanft("plot", "a", "-o", "mine")
    assert (refused.code, Path("mine.png").read_text()) == (2, "mine")
    assert "mine.png exists already. Choose another name, or overwrite it with --force" in refused.err
    leanft.ok("plot", "a", "-o", "mine", "--force")


def test_text_needs_no_matplotlib_and_writes_no_file(leanft, two_runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    before = sorted(Path().rglob("*"))
    assert "`leanft plot RUN --text` prints the curves without it" in leanft("plot", "a").err
    printed = leanft.ok("plot", "a", "b", "--text").out
    assert printed.startswith("a a\nb b\n\nloss")
    assert sorted(Path().rglob("*")) == before
    assert "Pass one of them" in leanft("plot", "a", "--text", "-o", "mine").err


def test_a_folder_of_runs(leanft, two_runs, tmp_path, monkeypatch):
    (tmp_path / "a" / "step_00000001").mkdir()
    (tmp_path / "a" / "step_00000001" / "config.json").touch()
    drawn = []
    monkeypatch.setattr(curves, "draw_curves", lambda runs, picture: drawn.extend([*runs, picture]))
    leanft.ok("plot", tmp_path)
    assert drawn == [tmp_path / "a", tmp_path / "b", Path("curves.png")]
    assert f"Name one of them, such as {tmp_path}/a." in leanft("export", tmp_path, "out").err
