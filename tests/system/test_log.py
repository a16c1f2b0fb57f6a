"""Lines of the log: a terminal gets lines that are broken at words, and everything else the whole line."""

import io

import pytest

from lean_ft.system import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [25, 40, 80])
def test_lines_are_broken_at_words_and_have_a_margin(columns: int) -> None:
    text = "a run of 3 steps; 日本語 が 続く and so on, until the limit of max_steps is reached"
    lines = log.wrapped(text, columns, 12).split("\n")
    assert " ".join(line.strip() for line in lines) == text
    assert all(line.startswith(" " * 12) for line in lines[1:])
    widths = [log.cell_len(line) + (0 if number else 12) for number, line in enumerate(lines)]
    assert max(widths) <= columns and len(lines) > 1
    after = [line.split()[0] for line in lines[1:]]
    assert all(width + 1 + log.cell_len(word) > columns for width, word in zip(widths, after, strict=False))


def test_commands_long_words_and_the_shape_of_a_text_stay() -> None:
    command = "leanft run finetune --config 'my file.yaml' output_dir=runs/a"
    assert log.wrapped(command, 30, 12) == command
    assert log.wrapped(f"now run `{command}` again", 30) == f"now run\n`{command}`\nagain"
    assert log.wrapped("see " + "x" * 40, 30) == "see\n" + "x" * 40
    items = "2 problems:\n- the first is long\n    and  spaced out\n\nend"
    assert log.wrapped(items, 16) == "2 problems:\n- the first is\n  long\n    and  spaced\n    out\n\nend"


def test_only_a_terminal_gets_broken_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(["word"] * 40)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(log.console, "_file", stream)
        monkeypatch.setattr(type(log.console), "width", 60)
        log.say("label", text)
        lines = stream.getvalue().rstrip("\n").split("\n")
        assert lines[0].startswith("label       word word")
        assert len(lines) == (5 if isinstance(stream, Terminal) else 1)
        assert max(map(len, lines)) <= 60 or len(lines) == 1
