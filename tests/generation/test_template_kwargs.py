"""`data.chat_template_kwargs` of a run reaches what is sampled from it; settings, rows and requests win."""

import json
import shutil
import threading
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from lean_ft.generation import open_model
from lean_ft.generation.server import ChatServer
from lean_ft.generation.texts import asked_of
from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings import AskConfig
from tests.recipes.conftest import run_recipe

TEMPLATE = """\
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' ~ effort ~ limits.most }}{% endif %}"""
CHAT = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a model whose template reads `effort` and `limits`."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(resolve_model_path("tiny"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"Say {i}", "completion": f"{i}"} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = "data.chat_template_kwargs={effort: low, limits: {most: 3}}"
    settings = ["model.dtype=float32", "max_steps=1", "batch_size=2", "device=cpu", "plan=false", kwargs]
    paths = [f"model.path={folder}/model", f"data.source={folder}/rows.jsonl"]
    run_recipe("full_finetune_single_device", folder / "run", *settings, "data.train_on=all", *paths)
    return folder / "run"


@pytest.mark.long
def test_a_model_of_a_run_is_asked_with_its_variables(run: Path) -> None:
    model, tokenizer = open_model(run, device="cpu")
    theirs = AutoTokenizer.from_pretrained(tokenizer.folder)

    def ids(prompt: object, **given: object) -> list[int]:
        sampling = AskConfig.model_validate({"model": {"path": str(run)}, **given}).sampling
        _, (found,) = asked_of(model, tokenizer, [prompt], "auto", sampling)  # pyright: ignore[reportArgumentType]
        return found.ids.tolist()

    def expected(**variables: object) -> list[int]:
        text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **variables)
        return tokenizer.encode(text)

    most = {"limits": {"most": 3}}
    assert ids(CHAT) == ids("q") == expected(effort="low", **most)
    setting = {"chat_template_kwargs": {"effort": "high"}}
    assert ids(CHAT, **setting) == expected(effort="high", **most)
    row = {"messages": CHAT, "chat_template_kwargs": {"effort": "mid"}}
    assert ids(row, **setting) == expected(effort="mid", **most)
    with pytest.raises(ValueError, match="chat_template_kwargs.other: the chat template does not mention it"):
        ids(CHAT, chat_template_kwargs={"other": 1})
    _, base = open_model(run.parent / "model", device="cpu")
    assert base.chat_template_kwargs == {}


@pytest.mark.long
def test_a_request_wins(run: Path) -> None:
    model, tokenizer = open_model(run, device="cpu")
    with ChatServer(model, tokenizer, "mine", max_new_tokens=2) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        theirs, counts = AutoTokenizer.from_pretrained(tokenizer.folder), []
        for given in ({"other": 1}, {"effort": "as much as it takes"}):  # a client may send any variable
            body = {"chat_template_kwargs": given}
            asked = {"model": "mine", "messages": CHAT, "temperature": 0, "extra_body": body}
            done = client.chat.completions.create(**asked)
            variables = {"effort": "low", "limits": {"most": 3}} | given
            text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **variables)
            assert done.usage.prompt_tokens == len(tokenizer.encode(text))
            counts.append(done.usage.prompt_tokens)
        assert counts[0] < counts[1]
        with pytest.raises(
            openai.BadRequestError, match="reasoning_effort is a variable of chat templates that this model's"
        ):
            client.chat.completions.create(model="mine", messages=CHAT, reasoning_effort="low")
        asked = {"model": "mine", "messages": CHAT, "extra_body": {"chat_template_kwargs": {"messages": []}}}
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs.messages"):
            client.chat.completions.create(**asked)
        server.shutdown()


def test_fields_that_are_variables_of_the_template(tmp_path: Path) -> None:
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    write = "{{ 'Reasoning: ' ~ reasoning_effort }}{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(
        TEMPLATE.replace("{{ '<|assistant|>' ~ effort ~ limits.most }}", write)
    )
    model, tokenizer = open_model(tmp_path / "model", device="cpu")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    with ChatServer(model, tokenizer, "mine", max_new_tokens=2) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        asked = {"model": "mine", "messages": CHAT, "temperature": 0}
        for given, more in (
            ({"reasoning_effort": "high"}, {}),
            ({"reasoning_effort": "low"}, {"enable_thinking": False}),
        ):
            body = {"chat_template_kwargs": given} if more else {}
            done = client.chat.completions.create(**asked, **given, extra_body={**more, **body})
            text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **given, **more)
            assert done.usage.prompt_tokens == len(tokenizer.encode(text))
        for bad, message in (
            ({"reasoning_effort": "a b"}, "reasoning_effort is 'a b'"),
            ({"reasoning_effort": "<|end|>"}, "reasoning_effort is"),
            ({"enable_thinking": "no"}, "enable_thinking is 'no'"),
            (
                {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
                "reasoning_effort is 'low', and chat_template_kwargs sets 'high'",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.chat.completions.create(**asked, extra_body=bad)
        server.shutdown()
