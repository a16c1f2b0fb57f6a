"""`leanft plot`: output files and input errors."""

from pathlib import Path

import pytest

METRICS = '{"step": 1, "loss": 2.0, "tokens": 8, "step_seconds": 1.0}\n{"step": 2, "loss": 1.0, "tokens": 8, "step_seconds": 1.0}\n'


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """The current directory, with runs `a` and `b`."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(METRICS)


@pytest.mark.parametrize(
    ("arguments", "base"),
    [(("a",), "a/curves"), (("a", "b"), "curves"), (("a", "b", "-o", "mine"), "mine"), (("a", "-o", "b/c.png"), "b/c")],
)
def test_one_run_keeps_its_curves_and_several_have_them_here(leanft, two_runs, arguments, base):
    answer = leanft("plot", *arguments)
    assert (answer.code, answer.out.split()) == (0, [f"{base}.png", f"{base}.html"]), answer.err
    assert all(Path(file).stat().st_size for file in answer.out.split())


def test_no_file_is_overwritten_without_a_word(leanft, two_runs):
    assert leanft("plot", "a", "b").out.split() == ["curves.png", "curves.html"]
    assert leanft("plot", "a", "b").out.split() == ["curves_2.png", "curves_2.html"]
    leanft("plot", "a")
    assert leanft("plot", "a").out.splitlines() == ["a/curves.png (replaced)", "a/curves.html (replaced)"]
    Path("mine.html").write_text("mine")
    refused = leanft("plot", "a", "-o", "mine")
    assert (refused.code, Path("mine.html").read_text()) == (2, "mine")
    assert "mine.html exists already; choose another name, or overwrite it with --force" in refused.err
    assert leanft("plot", "a", "-o", "mine", "--force").code == 0
