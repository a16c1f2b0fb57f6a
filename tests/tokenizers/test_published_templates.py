"""Published chat templates, each with a version with generation tags, as TRL ships them.

The tagged version, read by transformers, defines the assistant's text. For the original, our masks must agree without
tags. TRL tags a few more tokens (a line break after the end, a header before the turn), which do not matter for prompts
and padding.
"""

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from lean_ft.system.foreign_values import MARKERS
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from lean_ft.tokenizers.chat_template import ChatTemplate, with_defaults, without_generation_tags
from tests.tokenizers.conftest import with_tokens

NAMES = ["qwen3", "llama3", "deepseekv3", "gemma", "cohere", "deepseek_r1_distill", "gemma3", "lfm2", "nemotron_3_nano"]
NAMES += ["phi3", "qwen2_5", "qwen3_5_think", "qwen3_instruct_2507"]
# By default, some of all templates: of a plain form, with variables, with generation tags.
SOME = ["llama3", "qwen3", "gptoss", "qwen3_training"]


@pytest.fixture(params=["some", pytest.param("all", marks=pytest.mark.long)])
def templates(request: pytest.FixtureRequest, published: dict[str, str]) -> dict[str, str]:
    return {name: published[name] for name in (published if request.param == "all" else SOME)}


CHAT = [
    {"role": "user", "content": "What is   1 + 1?\n"},
    {"role": "assistant", "content": "It is two."},
    {"role": "user", "content": "Und 你好?"},
    {"role": "assistant", "content": "Guten Tag,\n\n世界"},
]


CONTINUED = {
    "an answer": [*CHAT[:3], {"role": "assistant", "content": "Guten Tag,\n\n世"}],
    "alone": [{"role": "assistant", "content": "Hello"}],
    "spaces at both ends": [CHAT[0], {"role": "assistant", "content": " a  \n"}],
    "nothing": [CHAT[0], {"role": "assistant", "content": ""}],
    "a question in it": [CHAT[0], {"role": "assistant", "content": CHAT[0]["content"]}],
    "a reason": [CHAT[0], {"role": "assistant", "content": "It is", "reasoning_content": "one and one"}],
}


FolderOf = Callable[..., Path]


@pytest.fixture
def folder_of(published: dict[str, str], byte_level: HFTokenizer, make_folder: Callable[..., Path]) -> FolderOf:
    """A tokenizer folder with the template `name`, and a vocabulary with the tokens of this and the `others`."""

    def make(name: str, *others: str) -> Path:
        if not {name, *others} <= published.keys():
            pytest.skip(f"this version of TRL does not have {name} and {others}")
        tokenizer = with_tokens(byte_level, [published[one] for one in (name, *others)])
        return make_folder(tokenizer, chat_template=published[name], bos_token="<bos>", eos_token="<eos>")

    return make


CALL = {
    "type": "function",
    "id": "a1b2c3d4e",
    "function": {"name": "f", "arguments": {"x": 1, "y": ["<", {"é": None}]}},
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "description": "A number."}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Calls.", "parameters": SCHEMA}}] * 2
LONG = [{"role": "user", "content": "q <think> \n" * 5}, {"role": "assistant", "content": "a</think> b 字\n" * 5}] * 4
CALLED = {"role": "assistant", "content": "", "reasoning": "Hm.\n", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "a1b2c3d4e"}


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def test_every_template_writes_what_it_writes_in_transformers(templates: dict[str, str]):
    chats = [(CHAT, None), (LONG, None), ([CHAT[0], *[CALLED, RESULT] * 3, CHAT[1]], TOOLS)]
    special, num_compared = {"bos_token": "<s>", "eos_token": "</s>"}, 0
    plain = {name: source for name, source in templates.items() if not name.endswith("_training")}
    for name, source in plain.items():
        ours = ChatTemplate(source)
        for messages, tools in chats:
            try:
                theirs = render_jinja_template([messages], tools=tools, chat_template=source, **special)[0][0]
                if messages[0]["content"].split()[0] not in theirs:  # it drops texts that are not content parts
                    theirs = render_jinja_template([as_parts(messages)], chat_template=source, **special)[0][0]
            except (jinja2.TemplateError, TypeError):
                continue  # some templates take no tools
            assert MARKERS.sub("", ours.render(messages, tools, False, special)) == theirs, name
            num_compared += 1
    assert num_compared > len(plain) >= (3 if len(templates) == len(SOME) else 20)


VALUES = [False, True, None, 3, -0.5, "low", 'a"b\\n\nä🙂{{ x }} %}', ["a", {"b": [None, True]}], {}]


def test_a_template_with_defaults_writes_what_it_writes_with_these_variables(templates: dict[str, str]):
    special, num_different = {"bos_token": "<s>", "eos_token": "</s>"}, 0
    names = "enable_thinking", "preserve_thinking", "date_string", "reasoning_effort", "builtin_tools", "add_vision_id"
    variables: list[dict[str, Any]] = [dict.fromkeys(names[:2], False), dict.fromkeys(names, "low"), {names[-1]: True}]

    def render(source: str, **given: Any) -> str:
        return render_jinja_template(
            [[*CHAT, CHAT[0]]], chat_template=source, add_generation_prompt=True, **special, **given
        )[0][0]

    for source in templates.values():
        for given in variables:
            try:
                expected = render(source, **given)
            except (jinja2.TemplateError, TypeError):
                continue
            changed = with_defaults(source, given)
            assert (render(changed), render(changed, **given)) == (expected, expected)
            assert with_defaults(changed, given) == changed
            num_different += expected != render(source)
    assert num_different > (1 if len(templates) == len(SOME) else 10)
    for value in VALUES:
        source = "\n  {{ x | tojson }}"
        assert render(with_defaults(source, {"x": value})) == render(source, x=value)
    with pytest.raises(ValueError, match="is inf; expected a JSON value"):
        with_defaults("", {"x": float("inf")})


# A tag in all spellings, where it removes spaces and line breaks before or after it.
TAGS = [f"{{%{before}{space}{name}{space}{after}%}}" for before in ("", "-", "+") for after in ("", "-", "+")
        for space in (" ", "") for name in ("generation",)]  # fmt: skip
QUOTED = (
    "{{ '{% generation %}' }}{% set x = \"a'{% generation %}\" %}{{ x }}{% raw %}{% generation %}{% endraw %}{# {% "
    "generation %} #}"
)


def test_a_template_without_generation_tags_writes_the_same_text(templates: dict[str, str]):
    special, num_tagged = {"bos_token": "<s>", "eos_token": "</s>"}, 0
    chats = [(CHAT, None), (LONG, None), ([CHAT[0], *[CALLED, RESULT] * 3, CHAT[1]], TOOLS)]
    sources, tags = [*templates.values()], TAGS[:: 4 if len(templates) == len(SOME) else 1]
    for start in tags:
        end = start.replace("generation", "endgeneration")
        sources.append(f"a \n  {start}  \n {{{{ messages[0].role }}}} \n \t{end} \n  b{QUOTED}")
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # knows no such tag
    for source in sources:
        stripped = without_generation_tags(source)
        assert QUOTED in source or "generation %}" not in stripped
        if stripped == source:
            continue
        num_tagged += 1
        if "break" not in source:
            plain.parse(stripped)
        for messages, tools in chats:
            try:
                expected = ChatTemplate(source).render(messages, tools, False, special)
            except ValueError:
                continue
            assert ChatTemplate(stripped).render(messages, tools, False, special) == MARKERS.sub("", expected)
    assert num_tagged > len(tags) + (0 if len(templates) == len(SOME) else 10)


def trained_texts(tokenizer: Tokenizer, messages: list[dict[str, Any]], **settings: Any) -> list[str]:
    passage = tokenizer.passage(messages, **settings)
    return [passage.text[start:end] for start, end in passage.trained]


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SIZE = {"type": "function", "function": {"name": "size", "arguments": {"of": 1}}}
CALLS = {"tool_calls": [SIZE]}
ASKED, AGAIN = CHAT[0], CHAT[2]
CONVERSATIONS = {
    "plain": CHAT,
    "reasoning": [ASKED, said("b", thinking="hm"), AGAIN, said("d", thinking="oh")],
    "two in a row": [ASKED, said("b"), said("b2", thinking="y"), AGAIN, said("d"), said("d2", thinking="w")],
    "empty": [ASKED, said(""), AGAIN, said("")],
    "calls": [
        *(ASKED, said("", thinking="t", **CALLS), RESULT, said("b", thinking="u")),
        *(AGAIN, said("", thinking="v", **CALLS), RESULT, said("d", thinking="w")),
    ],
    "ends with a call": [ASKED, said("z"), AGAIN, said("", thinking="t", **CALLS), RESULT, said("", **CALLS)],
}


@pytest.mark.first(4)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["deepseekv3", "gptoss", *NAMES, "nemotron_3_super", "phi3_5", "qwen3_8"])
def test_masks_are_those_of_the_template_with_tags(name: str, conversation: str, folder_of: FolderOf):
    messages = CONVERSATIONS[conversation]
    original = folder_of(name, f"{name}_training")
    ours, theirs = load_tokenizer(original), load_tokenizer(folder_of(f"{name}_training", name))
    try:
        passage = ours.passage(messages)
    except ValueError as error:
        # No calls, strictly alternating roles, or the second call of a chat begins like the first one's continuation.
        reasons = ("cannot render these messages", "does not write a tool call", "cannot find the start")
        assert conversation in ("calls", "ends with a call", "two in a row")
        assert any(reason in str(error) for reason in reasons)  # noqa: PT017
        return
    form = ours._template(None).whole(messages, None, False, ours.special_tokens).messages
    transformers = AutoTokenizer.from_pretrained(original)
    assert ours.tokenize([passage])[0][0].tolist() == transformers.apply_chat_template(form, return_dict=False)
    expected = theirs.passage(messages)
    if expected.text != passage.text:
        pytest.skip("TRL's tagged template writes other text")
    own, others = [{i for start, end in p.trained for i in range(start, end)} for p in (passage, expected)]
    assert own <= others
    # TRL also trains line breaks after a turn, and in some templates the prompt that opens it. gpt-oss: docs/data.md.
    only_theirs = "".join(passage.text[i] if i in others - own else "\0" for i in range(len(passage.text)))
    opening = r"<｜Assistant｜>|<｜tool▁outputs▁end｜>|<\|start\|>assistant|<think>\n?|\s"
    left = re.sub(opening, "", only_theirs).strip("\0")
    ended = [i for i, m in enumerate(messages[:-1]) if m["role"] == "assistant" and "tool_calls" not in m]
    assert re.split("\0+", left) == (["<|end|>"] * len(ended) or [""]) if name == "gptoss" else not left


@pytest.mark.first(4)
@pytest.mark.parametrize("answers_in_a_row", [1, 2])
@pytest.mark.parametrize("name", [*NAMES, "phi3_5", "gptoss", "glm4moe", "lfm2_v2", "qwen3_6"])
def test_blocks_belong_to_their_messages(name: str, answers_in_a_row: int, folder_of: FolderOf):
    tokenizer = load_tokenizer(folder_of(f"{name}_training"))
    messages, turns = [], []
    for said in ("Zero", "One", "Two"):
        messages.append({"role": "user", "content": f"What, {said}?"})
        for again in range(answers_in_a_row):
            turns.append(len(messages))
            messages.append({"role": "assistant", "content": f"{said} {again}."})
    try:
        whole = tokenizer.passage(messages)
    except ValueError as error:
        assert answers_in_a_row == 2 and "alternat" in str(error)  # noqa: PT017 - a template that takes no such chat
        return
    for count in range(1, len(turns) + 1):
        for left_out in combinations(turns, count):
            kept = set(turns) - set(left_out)
            trained = tokenizer.passage(messages, untrained=left_out).trained
            texts = [whole.text[start:end] for start, end in trained]
            for i in turns:
                assert any(messages[i]["content"] in text for text in texts) == (i in kept)
            # The spans of these messages and of the others are all spans.
            others = tokenizer.passage(messages, untrained=kept).trained
            assert sorted(trained + others) == whole.trained
    last = tokenizer.passage(messages, train_on="last").trained
    assert last == tokenizer.passage(messages, untrained=turns[:-1]).trained


@pytest.mark.parametrize("name", ["phi3_training", "phi3_5_training"])
def test_a_block_at_the_end_of_the_chat_belongs_to_the_last_message(name: str, folder_of: FolderOf):
    tokenizer = load_tokenizer(folder_of(name))
    first, last = CHAT[1]["content"] + "<|end|>\n", CHAT[3]["content"] + "<|end|>\n"
    assert trained_texts(tokenizer, CHAT) == [first, last, "<eos>"]
    assert trained_texts(tokenizer, CHAT, untrained={3}) == [first]
    assert trained_texts(tokenizer, CHAT, untrained={1}) == [last, "<eos>"]


@pytest.mark.first(3)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe", "nemotron_3_nano", "gemma4", "lfm2_2_5_v2", "llama3"])
def test_reasoning_under_each_of_its_names(name: str, key: str, folder_of: FolderOf):
    folder = folder_of(name)
    messages = [CHAT[0], {**CHAT[1], key: "One, one."}, CHAT[2], {**CHAT[3], key: "Hmm,\nGerman."}]
    ids, mask = load_tokenizer(folder).render(messages, train_on="last")
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, return_dict=False)
    num_added = {"glm4moe": 1}.get(name, 0)  # the token that ends the turn, which the template writes for the next one
    assert ids[: len(ids) - num_added] == expected
    said = load_tokenizer(folder).decode([token_id for token_id, trained in zip(ids, mask, strict=True) if trained])
    assert ("German." in said) == (name not in ("llama3", "gemma4"))  # which read none, and only with tool calls


class TestArguments:
    """Arguments of tool calls that are JSON in a string."""

    GIVEN = '{"of":"1 & 2", "x": 1.0}'  # with spaces that no template writes

    def chat(self, arguments: Any, **call: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "size", "arguments": arguments}}
        return [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "7"}]

    @pytest.mark.first
    @pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "deepseekv3", "qwen3_vl"])
    def test_a_template_that_writes_strings_gets_the_string(self, name: str, folder_of: FolderOf):
        folder, messages = folder_of(name), self.chat(self.GIVEN)
        tokenizer = load_tokenizer(folder)
        assert tokenizer.render(messages)[0] == AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, return_dict=False
        )
        assert self.GIVEN in "".join(trained_texts(tokenizer, messages))

    @pytest.mark.first
    @pytest.mark.parametrize("name", ["qwen2_5", "gptoss", "qwen3_6", "nemotron_3_nano"])
    def test_a_template_that_writes_objects_gets_the_object(self, name: str, folder_of: FolderOf):
        folder = folder_of(name)
        ids, _ = load_tokenizer(folder).render(self.chat(self.GIVEN))
        theirs = AutoTokenizer.from_pretrained(folder)
        assert ids == theirs.apply_chat_template(self.chat({"of": "1 & 2", "x": 1.0}), return_dict=False)

    @pytest.mark.first(6)
    @pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
    @pytest.mark.parametrize("arguments", ['{"of": 1}', {"of": 1}])
    @pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3", "qwen2_5", "qwen3"])
    def test_forms_that_a_template_distinguishes(self, name: str, arguments: Any, content: Any, folder_of: FolderOf):
        messages = self.chat(arguments)
        del messages[1]["content"]
        messages[1] |= content
        if name == "deepseek_r1_distill":  # it ends no turn with one call
            messages[1]["tool_calls"] *= 2
        text = load_tokenizer(folder_of(name)).passage(messages, train_on="all").text
        assert '{"of": 1}' in text and "None" not in text


def test_gpt_oss(folder_of: FolderOf):
    """The text of earlier answers is trained, but not their `<|end|>`: only `<|return|>` stops generation."""
    tokenizer = load_tokenizer(folder_of("gptoss"))
    call = ' to=functions.size<|channel|>commentary json<|message|>{"of": 1}<|call|>'
    thought = "<|channel|>analysis<|message|>%s<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    expected = {
        "plain": [final + CHAT[1]["content"], f"{final}{CHAT[3]['content']}<|return|>"],
        "reasoning": [f"{final}b", f"{thought % 'oh'}{final}d<|return|>"],
        "two in a row": [f"{final}b", f"{final}b2", f"{final}d", f"{thought % 'w'}{final}d2<|return|>"],
        "empty": [final, f"{final}<|return|>"],
        "calls": [call, f"{final}b", call, f"{thought % 'w'}{final}d<|return|>"],
        "ends with a call": [f"{final}z", thought % "t" + call, call],
    }
    num_rewritten = {"two in a row": 3}
    for name, messages in CONVERSATIONS.items():
        assert trained_texts(tokenizer, messages) == expected[name]
        assert trained_texts(tokenizer, messages, train_on="last") == expected[name][-1:]
        assert tokenizer.passage(messages).num_rewritten == num_rewritten.get(name, 1)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "ends"),
    {
        "gptoss": {"<|return|>", "<|call|>"},  # not <|end|>, which also ends the reasoning inside of a turn
        "glm4moe": {"<|user|>", "<|observation|>"},
        "phi3": {"<|end|>", "<eos>"},
        "qwen3": {"<|im_end|>"},
        "deepseekv3": {"<｜end▁of▁sentence｜>"},  # not the tokens that end one of several calls
        "llama3": {"<|eot_id|>"},
    }.items(),
)
def test_the_tokens_that_end_a_turn(name: str, ends: set[str], folder_of: FolderOf):
    for template in (name, f"{name}_training"):
        tokenizer = load_tokenizer(folder_of(template, name))
        assert {tokenizer.token_text(token_id) for token_id in tokenizer.turn_ends} == ends


@pytest.mark.first(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_continued_as_by_transformers(name: str, folder_of: FolderOf) -> None:
    folder, num_equal = folder_of(name), 0
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for chat in CONTINUED.values():
        try:
            expected = theirs.apply_chat_template(chat, continue_final_message=True, return_dict=False)
        except (ValueError, jinja2.TemplateError):
            with pytest.raises(ValueError, match=r"chat template"):
                ours.continued(chat)
            continue
        assert ours.tokenize([ours.continued(chat)])[0][0].tolist() == expected
        num_equal += 1
    assert num_equal >= 4
