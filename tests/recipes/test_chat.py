"""The chat recipe answers as `generate` does for the whole conversation."""

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lean_ft.generation import generate
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model
from lean_ft.tokenizers import load_tokenizer
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


@pytest.mark.first(1)
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
    whole, converse, before = chat(FIRST)[0], recipe.converse, signal.getsignal(signal.SIGINT)

    def interrupted(*arguments, **settings):
        for count, text in enumerate(converse(*arguments, **settings)):
            yield text
            if count == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(recipe, "converse", interrupted)
    answer, *_ = chat(FIRST, f"/save {tmp_path / 'kept.jsonl'}")
    assert whole.startswith(answer) and 0 < len(answer) < len(whole)
    assert json.loads((tmp_path / "kept.jsonl").read_text())["messages"] == said(FIRST, answer)
    assert signal.getsignal(signal.SIGINT) is before


TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ eos_token }}{% endif %}
{%- for m in messages %}{{ '<|user|>result: ' if m.role == 'tool' else '<|' ~ m.role ~ '|>' }}{{ m.content }}
{%- for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
FUNCTIONS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b
'''


def test_tools_run_and_their_results_are_given_to_the_model(
    chat: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampled tokens are given."""
    model, tools, file = tmp_path / "model", tmp_path / "my_tools.py", tmp_path / "kept.jsonl"
    shutil.copytree(resolve_model_path("tiny"), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tools.write_text(FUNCTIONS)
    tokenizer, prompts = load_tokenizer(model), list[str]()
    turns = [
        f'Look. <tool_call>{{"name": "{name}", "arguments": {{"a": 2, "b": 3}}}}</tool_call>' for name in ("add", "ad")
    ]
    said = iter([*turns, "It is 5.", *turns * 2])

    def steps(_: object, asked: list, *__: object):
        prompts.append(tokenizer.decode(asked[0].ids))
        return ([token] for token in tokenizer.encode(f"{next(said)}<|end|>"))

    monkeypatch.setattr("lean_ft.generation.calling.sample_steps", steps)
    monkeypatch.setattr("sys.stderr", shown := io.StringIO())
    given = {"model.path": model, "tools": f"[{tools}:add]", "tools.calls": 2}
    assert chat("2 + 3?", f"/save {file}", "/reset", "again", **given) == [
        "Look.Look.It is 5.", f"6 messages added to {file}.", "Look.Look.Look."
    ]  # fmt: skip
    calls = ["add(a=2, b=3): '5'", "ad(a=2, b=3): \"error: unknown tool 'ad'. Did you mean 'add'? Tools: add.\""]
    last = "not called, since the model may call tools in 2 turns: 'add'"
    assert shown.getvalue().splitlines() == [*calls, *calls, last]
    assert "result: 5<|end|><|assistant|>" in prompts[1] and "result: error: unknown tool" in prompts[2]
    row = json.loads(file.read_text())
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert row["tools"][0]["function"]["name"] == "add"
    assert tokenizer.decode(tokenizer.render(row["messages"], row["tools"])[0]).startswith(prompts[2])


def test_tools_need_a_template_that_writes_them(chat: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(FUNCTIONS)
    with pytest.raises(ValueError, match="the chat template writes no tools"):
        chat(tools=f"[{tmp_path}/my_tools.py:add]")


def test_without_a_chat_template_the_error_names_generate(chat: Callable[..., list[str]], tmp_path: Path) -> None:
    from lean_ft.models import save_model

    save_model(load_model("tiny"), tmp_path)
    load_tokenizer("tiny").save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    with pytest.raises(ValueError, match="no chat template, .*`leanft generate`"):
        chat(FIRST, **{"model.path": tmp_path})
