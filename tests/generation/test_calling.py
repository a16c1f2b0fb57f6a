"""Calls of tools through `leanft serve`, with OpenAI's client as the judge. The sampled tokens are given; all else is
real."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

from lean_ft.generation.server import ChatServer
from lean_ft.models import Decoder, load_model
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers.conftest import byte_level_tokenizer, published_templates, with_tokens

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city's name."}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks it up.", "parameters": PARAMETERS}}
    for name in ("get_weather", "get_time")
]
ASKED = [{"role": "user", "content": "How is it in Reykjavík?"}]
WORDS = "Let me look, 1 < 2."
CALLS = [("get_weather", {"city": "Reykjavík <b>", "days": 3}), ("get_time", {"city": "x"})]
ONE_CALL = ("llama3_1", "gptoss")  # templates that write one call per turn
NAMES = ["qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "glm4moe", "lfm2_2_5_v2", "nemotron_3_nano", *ONE_CALL]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load_model("tiny")


class Served:
    """A server whose model samples `said`, and its client."""

    def __init__(self, server: ChatServer, tokenizer: Tokenizer) -> None:
        self.client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        self.tokenizer, self.theirs = tokenizer, AutoTokenizer.from_pretrained(tokenizer.folder)
        self.said, self.prompt = list[int](), list[int]()
        self.streamed: Any = None  # the last message, as the client puts it together

    def steps(self, _: object, prompts: list[Any], how: Any, *args: Any, **kwargs: Any) -> Iterator[list[int | None]]:
        self.prompt = prompts[0].ids.tolist()
        for token in self.said[: how.max_new_tokens]:
            yield [token]
            if token in how.stop_ids:
                return

    def rendered(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The text of a chat by transformers."""
        return str(self.theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False, **kwargs))

    def says(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        """Let the model sample a turn with these calls, as the template writes it."""
        made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        turn = {"role": "assistant", "content": WORDS, "tool_calls": made}
        prompt = self.rendered(ASKED, add_generation_prompt=True)
        text = self.rendered([*ASKED, turn])
        assert text.startswith(prompt) or "think" in prompt
        self.said = self.tokenizer.encode(text[len(prompt) :] if text.startswith(prompt) else f"</think>{after(text)}")

    def ask(self, messages: list[Any] = ASKED, **given: Any) -> tuple[Any, list[Any]]:
        """Return the whole completion, and the deltas of the streamed one, which are checked to agree."""
        given = {"model": "mine", "messages": messages, "tools": TOOLS} | given
        whole = self.client.chat.completions.create(**given)
        with self.client.chat.completions.stream(**given) as stream:
            deltas = [one.chunk.choices[0].delta for one in stream if one.type == "chunk"]
            final = stream.current_completion_snapshot
        (one,), (other,) = whole.choices, final.choices
        assert (one.message.content or "") == (other.message.content or "")
        assert one.finish_reason == other.finish_reason
        assert called(one.message) == called(other.message)
        self.streamed = other.message
        return one, deltas


def after(text: str) -> str:
    return text[text.rindex(WORDS) :]


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.fixture
def serve(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    if not (templates := published_templates()):
        pytest.skip("needs TRL, which ships published chat templates")
    servers = list[ChatServer]()
    monkeypatch.setattr("lean_ft.generation.server.context_length", lambda _: 1 << 15)
    monkeypatch.setattr("lean_ft.generation.texts.context_length", lambda _: 1 << 15)

    def start(name: str, spelled: bool = False) -> Served:
        """Serve with the published template `name`. spelled: the tags of calls are no tokens of their own."""
        source, tokens, plain = templates[name], templates[name], byte_level_tokenizer()
        if spelled:
            tokens = re.sub("</?tool_call>", "", tokens)
            plain = HFTokenizer.from_str(plain.to_str().replace("tool_call", "unused"))
        tokenizer = with_tokens(plain, [tokens])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"chat_template": source, "bos_token": "<bos>", "eos_token": "<eos>"}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        servers.append(ChatServer(model, load_tokenizer(tmp_path), "mine"))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        served = Served(servers[-1], servers[-1].tokenizer)
        monkeypatch.setattr("lean_ft.generation.server.sample_steps", served.steps)
        return served

    yield start
    for server in servers:
        server.shutdown()


@pytest.mark.first(2)
@pytest.mark.parametrize(("name", "spelled"), [*((name, False) for name in NAMES), ("qwen2_5", True)])
def test_calls_are_returned_whole_and_streamed_and_can_be_sent_back(
    serve: Callable[..., Served], name: str, spelled: bool
) -> None:
    served = serve(name, spelled)
    calls = CALLS[: 1 if name in ONE_CALL else 2]
    served.says(calls)
    choice, deltas = served.ask()
    assert choice.finish_reason == "tool_calls"
    assert called(choice.message) == calls
    content = choice.message.content or ""
    assert not any(part in content for part in ("get_", "tool_call", "Reykjav", "{", "}", "commentary")), content
    assert (WORDS in content) == (name != "llama3_1")  # whose template writes calls without words
    order = ["call" if delta.tool_calls else "text" for delta in deltas if delta.tool_calls or delta.content]
    assert order == sorted(order, reverse=True) and order.count("call") == len(calls)

    served.said = served.tokenizer.encode("It is cold.")
    for message in (choice.message, served.streamed):
        ids = [call.id for call in message.tool_calls or ()]
        results = [{"role": "tool", "tool_call_id": one, "content": "-3 °C"} for one in ids]
        answered, _ = served.ask([*ASKED, message, *results])
        assert (answered.message.content, answered.finish_reason) == ("It is cold.", "stop")
        made = [
            {"type": "function", "id": one, "function": {"name": n, "arguments": a}}
            for one, (n, a) in zip(ids, calls, strict=True)
        ]
        theirs = [{**result, "name": n} for result, (n, _) in zip(results, calls, strict=True)]
        history = [*ASKED, {"role": "assistant", "content": content, "tool_calls": made}, *theirs]
        assert served.tokenizer.decode(served.prompt) == served.rendered(history, add_generation_prompt=True)


TEXTS = [
    "plain words  ",
    "  1 < 2 and [a] {b}\n\n",
    "<tool_call>\n{broken",
    'Look:\n<tool_call>\n{"name": "get_weather", "arguments": []}\n</tool_call>',
    '{"name": 5}',
    "<tool",
    "",
]


@pytest.mark.first
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "qwen3_5_nothink"])
@pytest.mark.parametrize("spelled", [False, True])
def test_what_is_no_call_is_text(serve: Callable[..., Served], name: str, spelled: bool) -> None:
    served = serve(name, spelled)
    for text in TEXTS:
        served.said = served.tokenizer.encode(text) + sorted(served.tokenizer.turn_ends)[:1]
        choice, _ = served.ask()
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_a_call_that_is_cut_off_is_no_call(serve: Callable[..., Served]) -> None:
    served = serve("qwen2_5")
    served.says(CALLS[:1])
    choice, _ = served.ask(max_tokens=len(served.said) // 2)
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


def test_text_in_front_of_a_call_is_streamed_at_once(serve: Callable[..., Served]) -> None:
    served = serve("qwen2_5")
    served.says(CALLS)
    _, deltas = served.ask()
    assert len([delta for delta in deltas if delta.content]) > 5


@pytest.mark.first
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "gptoss", "glm4moe"])
def test_a_choice_of_tools_is_kept(serve: Callable[..., Served], name: str) -> None:
    served = serve(name)
    served.says(CALLS[:1])
    prompt, full = served.rendered(ASKED, add_generation_prompt=True), served.tokenizer.decode(served.said)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        served.said = []
        served.ask(tool_choice=choice)
        begun = served.tokenizer.decode(served.prompt).removeprefix(prompt)
        assert ("get_weather" in begun) == (choice is named) and "city" not in begun
        served.said = served.tokenizer.encode(full.rpartition(begun[-11:])[2])
        found, _ = served.ask(tool_choice=choice)
        assert called(found.message) == CALLS[:1] and not found.message.content
    served.said = served.tokenizer.encode("words")
    found, _ = served.ask(tool_choice="none")
    assert served.tokenizer.decode(served.prompt) == str(
        served.theirs.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    )
    assert found.message.content == "words"
