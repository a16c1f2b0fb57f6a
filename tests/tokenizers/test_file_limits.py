"""A tokenizer.json that needs unbounded time or memory, or makes the library panic, gives one error message."""

import json

import pytest

from lean_ft.hub.paths import resolve_model_path
from lean_ft.tokenizers import file_limits, load_tokenizer, tokenizer_json
from lean_ft.tokenizers.file_limits import may_backtrack

TINY = resolve_model_path("tiny") / "tokenizer.json"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
TOKEN = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
CASES = {
    "lacks the continuing_subword_prefix": {"model": {"continuing_subword_prefix": "x" * 10}},
    "000,000,000,000 times the length": {"normalizer": {"type": "Sequence", "normalizers": [TEN] * 12}},
    "times the length of a text": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}},
    "20,001 values": {"post_processor": {"type": "Sequence", "processors": [BYTES] * 30_000}},
    "makes no token of the vocabulary": {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}},
    "repeats a group": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}},
    "70,000 added tokens": {"added_tokens": [{"id": i + 300, "content": f"<{i}>", **TOKEN} for i in range(70_000)]},
    "characters in a token": {"model": {"vocab": {"a" * 100_000: 0}, "merges": []}},
    "5,001 tokens": {"model": {"vocab": {str(i): i for i in range(5001)}, "merges": []}},
    "as the largest id": {"model": {"vocab": {"a": 10**12}, "merges": []}},
}


def changed(spec, change):
    return {**spec, **{key: {**spec[key], **new} if key == "model" else new for key, new in change.items()}}


@pytest.mark.parametrize("reason", CASES)
def test_unbounded_time_or_memory_is_rejected(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(file_limits, "MAX_TOKENS", 5000)
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(json.loads(TINY.read_text()), CASES[reason])))
    with pytest.raises(ValueError, match=reason) as raised:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(raised.value)


def test_a_panic_of_the_library_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "check_limits", lambda spec: None)
    change = CASES["lacks the continuing_subword_prefix"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(json.loads(TINY.read_text()), change)))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the `tokenizers` library failed:"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "expression",
    [
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?| ?[^\s\p{L}\p{N}]+[\r\n/]*",
        *(r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+| ?[\p{P}\p{S}]+[\r\n]*", r" ?[^(\s|[.,!?…。，、।۔،])]+"),
        *(r" {2,}", r"(?:ab)+", r"\d{1,3}(?=(?:\d{3})*\b)"),
    ],
)
def test_expressions_of_published_tokenizers_pass(expression):
    assert not may_backtrack(expression)


@pytest.mark.parametrize(
    "expression", ["(a+)+$", "(a|a)*b", "((ab)*)*", "(?:x{1,9}){3}", "(?:[a-z]+|b){5,}", "(a?){40}"]
)
def test_expressions_that_may_take_exponential_time_are_found(expression):
    assert may_backtrack(expression)
