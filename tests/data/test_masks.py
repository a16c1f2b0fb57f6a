"""Trained masks equal those of transformers for templates that mark assistant text, in all row formats."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from lean_ft.data.rows import Row
from lean_ft.data.sft import SFTReader
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from tests.data.conftest import rendering
from tests.tokenizers.conftest import byte_level_tokenizer

CALLS_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}[[{% if m.content is defined %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}]]{{ '\n' }}
{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501
PLAIN = CALLS_TOOLS.replace("[[", "").replace("]]", "")
TAGGED = CALLS_TOOLS.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")

TOOLS = [{"type": "function", "function": {"name": "size", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "size", "arguments": {"of": "1 & 2"}}}
TURNS = [
    {"role": "system", "content": "Be brief. 短く。"},
    {"role": "user", "content": "How  big?\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "1"},
    {"role": "assistant", "content": "Seven 🦙."},
    {"role": "user", "content": "And twice?"},
    {"role": "assistant", "content": "Fourteen."},
]
SAID = ['<tool_call>size {"of": "1 & 2"}</tool_call><|im_end|>', "Seven 🦙.<|im_end|>", "Fourteen.<|im_end|>"]


def folder_with(template: str, path: Path) -> Path:
    path.mkdir()
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("masks")
    return {"plain": folder_with(PLAIN, root / "plain"), "tagged": folder_with(TAGGED, root / "tagged")}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def render(tokenizer: Tokenizer, fields: dict[str, Any], **settings: Any) -> tuple[list[int], list[bool]]:
    config, row = SFTDataConfig(source="rows.jsonl", max_length=4096, **settings), Row(fields, "here")
    (document,), _ = rendering(SFTReader, config, [row], tokenizer)([row])
    return document.ids.tolist(), document.trained.tolist()


def said(tokenizer: Tokenizer, rendered: tuple[list[int], list[bool]]) -> list[str]:
    """Trained spans, as text."""
    grouped = groupby(zip(*rendered, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in group]) for trained, group in grouped if trained]


@pytest.mark.parametrize("spelling", ["plain", "tagged"])
@pytest.mark.parametrize(
    "messages",
    [TURNS, TURNS[1:], TURNS[:3], TURNS[:2] + TURNS[4:], [TURNS[1], TURNS[4]], TURNS[:6], [*TURNS, *TURNS[1:]]],
    ids=["all", "no system", "ends with a call", "no tools", "one turn", "ends with the user", "long"],
)
def test_masks_are_those_of_transformers(messages, spelling: str, ours, folders):
    theirs = AutoTokenizer.from_pretrained(folders["tagged"])
    expected = theirs.apply_chat_template(messages, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    for fields in (
        {"messages": messages, "tools": TOOLS},
        {"conversations": messages, "tools": json.dumps(TOOLS)},
        {"messages": json.dumps(messages), "tools": TOOLS},
    ):
        ids, mask = render(ours[spelling], fields)
        assert ids == expected["input_ids"]
        assert mask == [bool(trained) for trained in expected["assistant_masks"]]


@pytest.mark.parametrize("spelling", ["plain", "tagged"])
def test_each_value_of_train_on(spelling: str, ours):
    tokenizer = ours[spelling]
    row = {"prompt": TURNS[:4], "completion": TURNS[4:]}
    chat = {"messages": TURNS}
    assert said(tokenizer, render(tokenizer, chat, train_on="assistant")) == SAID
    assert said(tokenizer, render(tokenizer, chat, train_on="completion")) == SAID
    assert said(tokenizer, render(tokenizer, chat, train_on="last")) == SAID[2:]
    assert all(render(tokenizer, chat, train_on="all")[1])
    assert said(tokenizer, render(tokenizer, row, train_on="completion")) == SAID[1:]
    assert said(tokenizer, render(tokenizer, row, train_on="assistant")) == SAID
    assert said(tokenizer, render(tokenizer, row, train_on="last")) == SAID[2:]
    assert all(render(tokenizer, row, train_on="all")[1])


@pytest.mark.parametrize("spelling", ["plain", "tagged"])
@pytest.mark.parametrize("left_out", [{2}, {4}, {6}, {2, 4}, {4, 6}])
def test_messages_with_train_false(spelling: str, left_out: set[int], ours):
    tokenizer = ours[spelling]
    messages = [{**m, "train": False} if i in left_out else m for i, m in enumerate(TURNS)]
    whole = render(tokenizer, {"messages": TURNS})
    ids, mask = render(tokenizer, {"messages": messages})
    assert ids == whole[0]
    kept = [text for text, i in zip(SAID, (2, 4, 6), strict=True) if i not in left_out]
    assert said(tokenizer, (ids, mask)) == kept
    ids, mask = render(tokenizer, {"messages": messages}, train_on="all")
    untrained = np.array(whole[1]) & ~np.array(render(tokenizer, {"messages": messages})[1])
    assert mask == (~untrained).tolist()


def test_marks_that_leave_nothing_or_are_not_the_assistants(ours):
    messages = [*TURNS[:6], {**TURNS[6], "weight": 0}]
    config, row = SFTDataConfig(source="x", train_on="last"), Row({"messages": messages}, "here")
    _, report = rendering(SFTReader, config, [row], ours["plain"])([row])
    assert report.dropped == {"nothing to train on": 1}
    with pytest.raises(ValueError, match="message 1 has the role user, but `train` or `weight` excludes it"):
        render(ours["plain"], {"messages": [{**TURNS[1], "train": False}, TURNS[4]]}, train_on="all")


@pytest.mark.parametrize("spelling", ["plain", "tagged"])
def test_arguments_in_a_string_are_written_as_json_once(spelling: str, ours):
    call = {**CALL, "function": {"name": "size", "arguments": '{"of":"1 & 2"}'}}
    messages = [*TURNS[:2], {**TURNS[2], "tool_calls": [call]}, *TURNS[3:]]
    assert render(ours[spelling], {"messages": messages}) == render(ours[spelling], {"messages": TURNS})


def test_answers_that_the_template_ends_otherwise_are_counted(tmp_path: Path):
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer = load_tokenizer(folder_with(template, tmp_path / "t"))
    chats = TURNS[5:], [TURNS[1], *TURNS[4:]], [TURNS[0], *TURNS[5:]]
    rows = [Row({"messages": messages}, "here") for messages in chats]
    config = SFTDataConfig(source="rows.jsonl", max_length=4096)
    documents, report = rendering(SFTReader, config, rows, tokenizer)(rows)
    answers = [tokenizer.decode(one.ids[one.trained].tolist()) for one in documents]
    assert answers == ["Fourteen.<|endoftext|>", "Seven 🦙.Fourteen.<|endoftext|>", "Fourteen.<|endoftext|>"]
    assert "; 1 earlier answer trained without an end token" in str(report)
    report.add(report)
    assert report.rewritten_answers == 2
