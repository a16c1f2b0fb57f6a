"""Chat templates of published models, each beside a version of it with generation tags, both as TRL ships them.

The tagged version, read by transformers, says what the assistant wrote; the original, read by us, must agree
without tags. TRL tags a few more tokens (a line break behind the end, a header before the turn), which
prompts and padding make irrelevant; what the assistant said and the token that ends it have to be the same.
"""

import importlib.util
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

from lean_ft.tokenizers import load_tokenizer

NAMES = [
    "cohere",
    "deepseek_r1_distill",
    "deepseekv3",
    "gemma",
    "gemma3",
    "lfm2",
    "llama3",
    "nemotron_3_nano",
    "phi3",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_instruct_2507",
]
TOKENS = re.compile(r"<[|｜][^<>\s'\"+]{1,40}[|｜]>|<(?:start|end)_of_turn>|</?think>|</?tool_call>")
CHAT = [
    {"role": "user", "content": "What is   1 + 1?\n"},
    {"role": "assistant", "content": "It is two."},
    {"role": "user", "content": "Und 你好?"},
    {"role": "assistant", "content": "Guten Tag,\n\n世界"},
]


@pytest.fixture(scope="module")
def published() -> Path:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "chat_templates").is_dir():
        pytest.skip("needs TRL, which ships published chat templates with and without generation tags")
    return Path(spec.origin).parent / "chat_templates"


@pytest.mark.parametrize("name", NAMES)
def test_turns(name: str, published: Path, byte_level, make_folder: Callable[..., Path]):
    files = [published / f"{name}.jinja", published / f"{name}_training.jinja"]
    if not all(file.is_file() for file in files):
        pytest.skip(f"this version of TRL has no {name}.jinja and {name}_training.jinja")
    original, with_tags = (file.read_text(encoding="utf-8") for file in files)
    tokenizer = HFTokenizer.from_str(byte_level.to_str())
    named = sorted({*TOKENS.findall(original), *TOKENS.findall(with_tags), "<bos>", "<eos>"})
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special="think" not in token and "tool" not in token) for token in named]
    )

    def folder(template: str) -> Path:
        return make_folder(tokenizer, chat_template=template, bos_token="<bos>", eos_token="<eos>")

    ours = load_tokenizer(folder(original))
    theirs = AutoTokenizer.from_pretrained(folder(with_tags))
    ids, mask = ours.render(CHAT)
    assert ids == AutoTokenizer.from_pretrained(folder(original)).apply_chat_template(CHAT, return_dict=False)

    def turns(ids: list[int], mask: list[Any]) -> list[str]:
        grouped = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
        return [ours.decode([token_id for token_id, _ in group]).strip() for trained, group in grouped if trained]

    expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    expected_turns = turns(expected["input_ids"], expected["assistant_masks"])
    answers = [message["content"] for message in CHAT if message["role"] == "assistant"]
    for turn, expected_turn, answer in zip(turns(ids, mask), expected_turns, answers, strict=True):
        assert answer in turn
        assert turn.partition(answer)[2]  # something ends the turn
        assert expected_turn.endswith(turn)
