"""The chat recipe answers as `generate` does for the whole conversation."""

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lean_ft.generation import generate
from lean_ft.models import load_model
from tests.recipes.conftest import config_of, recipe_module

FIRST, SECOND = "What is the capital of Zanemar?", "And of Galostan?"


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*lines: str, **settings: object) -> list[str]:
        """Return the printed lines, with these lines as input from a pipe."""
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        given = {"model.path": "tiny", "model.dtype": "float32", "device": "cpu", "max_new_tokens": 12, **settings}
        recipe_module("chat").main(config_of("chat", *(f"{name}={value}" for name, value in given.items())))
        return capsys.readouterr().out.splitlines()

    return run


def said(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    beginning = [] if system is None else [{"role": "system", "content": system}]
    return beginning + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


@pytest.mark.parametrize("drawn", [{}, {"temperature": 2.0, "seed": 3}])
def test_each_answer_depends_on_the_whole_conversation(chat: Callable[..., list[str]], drawn: dict) -> None:
    def expected(messages: list[dict[str, str]]) -> str:
        return generate(load_model("tiny"), [messages], max_new_tokens=12, **drawn)[0]

    system = "Answer in one word."
    one = expected(said(FIRST, system=system))
    two = expected(said(FIRST, one, SECOND, system=system))
    assert chat(FIRST, "", SECOND, "/reset", FIRST, system=system, **drawn) == [*f"{one}\n{two}\n{one}".splitlines()]
    told = chat(f"/system {system}", FIRST, "/reset", FIRST, "/system", FIRST, **drawn)
    assert told == f"{one}\n{one}\n{expected(said(FIRST))}".splitlines()
    assert not drawn or two != expected(said(SECOND, system=system))


def test_a_conversation_is_saved_as_a_row_of_data(chat: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    answer, *told = chat(
        FIRST, f"/save {file}", "/reset", f"/save {file}", "/save", "/save /no/where", "/sav x", "/quit", "x"
    )
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert rows == [said(FIRST, answer), []]
    assert told == [
        f"2 messages added to {file}.",
        f"0 messages added to {file}.",
        "/save needs a file name, as in /save chat.jsonl.",
        "/no/where: No such file or directory.",
        "unknown command /sav; /help lists the commands.",
    ]


def test_ctrl_c_stops_an_answer_and_not_the_program(
    chat: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = recipe_module("chat")
    whole, stream, before = chat(FIRST)[0], recipe.stream, signal.getsignal(signal.SIGINT)

    def interrupted(*arguments, **settings):
        for count, text in enumerate(stream(*arguments, **settings)):
            yield text
            if count == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(recipe, "stream", interrupted)
    answer, *_ = chat(FIRST, f"/save {tmp_path / 'kept.jsonl'}")
    assert whole.startswith(answer) and 0 < len(answer) < len(whole)
    assert json.loads((tmp_path / "kept.jsonl").read_text())["messages"] == said(FIRST, answer)
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_chat_template_the_error_names_generate(chat: Callable[..., list[str]], tmp_path: Path) -> None:
    from lean_ft.models import save_model
    from lean_ft.tokenizers import load_tokenizer

    save_model(load_model("tiny"), tmp_path)
    load_tokenizer("tiny").save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    with pytest.raises(ValueError, match="no chat template, .*`leanft generate`"):
        chat(FIRST, **{"model.path": tmp_path})
