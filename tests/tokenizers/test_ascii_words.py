"""Words from the dictionary have the library's ids and places, and what the library does otherwise is left to it."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lean_ft.tokenizers.ascii_words import GPT2_PATTERN, AsciiWords

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
ADDED = ["<|im_start|>", "<|im_end|>", "<think>"]
TEXT = "It's said the others'll have said that THEY'VE 1234 others, said 'so;\n\n  the end.\tthe_end(the);\n" * 3


def train(pattern: str | None = None, *, ignore_merges: bool = False, **added: Any) -> Tokenizer:
    """A small byte-level BPE that splits by `pattern`, or as GPT-2's pre-tokenizer does by itself."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_of_it = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_it])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, **added) for token in ADDED])
    return tokenizer


def words_of(tokenizer: Tokenizer) -> AsciiWords | None:
    return AsciiWords.of(tokenizer, json.loads(tokenizer.to_str()))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, tuple[Tokenizer, AsciiWords]]:
    with_nfc = train(QWEN2)
    with_nfc.normalizer = normalizers.NFC()
    made = {"qwen2": with_nfc, "llama3": train(LLAMA3, ignore_merges=True), "gpt2": train(), "own": train(GPT2_PATTERN)}
    pairs = {}
    for name, tokenizer in made.items():
        words = words_of(tokenizer)
        assert words is not None
        pairs[name] = tokenizer, words
    return pairs


PIECES = st.one_of(
    st.sampled_from(
        [*ADDED, "the", " said", "'ll", "'VE", "'S", "\n", "\r\n", "  ", "\t", "12", "<|im_", "|>", "others"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6),
    st.text(st.characters(max_codepoint=127), max_size=2),
    st.text(st.sampled_from(" \n\r\t'a1."), max_size=8),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_ids_and_places_are_the_librarys(tokenizers: dict[str, tuple[Tokenizer, AsciiWords]], text: str):
    for tokenizer, words in tokenizers.values():
        expected, got = tokenizer.encode(text, add_special_tokens=False), words.encode(text)
        if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
            assert got is None  # control characters are the library's
            continue
        assert got is not None
        assert got.ids.tolist() == expected.ids
        assert list(zip(got.starts.tolist(), got.ends.tolist(), strict=True)) == expected.offsets


@pytest.mark.parametrize("text", ["naïve", "it’s", "a\u00a0b", "\x1c", "\x00", "a\x0bb", "日本"])
def test_other_characters_go_to_the_library(tokenizers: dict[str, tuple[Tokenizer, AsciiWords]], text: str):
    assert all(words.encode(f"the {text} said") is None for _, words in tokenizers.values())


def test_words_are_forgotten_when_there_are_too_many(tokenizers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lean_ft.tokenizers.ascii_words.MOST_WORDS", 3)
    tokenizer, words = tokenizers["qwen2"]
    for text in (TEXT, TEXT[::-1], TEXT):
        encoding = words.encode(text)
        assert encoding is not None
        assert encoding.ids.tolist() == tokenizer.encode(text).ids
        assert len(words._ids_of) <= 3


def test_long_words_are_not_remembered(tokenizers):
    tokenizer, words = tokenizers["qwen2"]
    text = "said " + "others" * 1000
    encoding = words.encode(text)
    assert encoding is not None
    assert encoding.ids.tolist() == tokenizer.encode(text).ids
    assert max(map(len, words._ids_of)) <= 64


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_text_with_a_token_that_takes_more_than_itself_goes_to_the_library(flag: str):
    words = words_of(train(QWEN2, **{flag: True}))
    assert words is not None
    assert words.encode("a <think> b") is None
    assert words.encode("a think b") is not None


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w+",
        r"\p{Lu}+|\p{L}",
        r"\b",
        r".+",
        r"(a)",
        r"[[:alpha:]]",
        r"[a&&b]",
        r"(?<=a)b",
        r"^a",
        r"a$",
        r"a{1,2}+",
        r"\d",
    ],
)
def test_a_pattern_that_may_mean_something_else_is_not_taken_over(pattern: str):
    tokenizer = train(QWEN2)
    spec = json.loads(tokenizer.to_str())
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    assert AsciiWords.of(tokenizer, spec) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.type", "WordPiece"),
        ("model.dropout", 0.1),
        ("model.continuing_subword_prefix", "##"),
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", None),
        ("pre_tokenizer.pretokenizers.1.add_prefix_space", True),
        ("pre_tokenizer.pretokenizers.1.use_regex", True),
        ("pre_tokenizer.pretokenizers.0.behavior", "Removed"),
        ("pre_tokenizer.pretokenizers.0.pattern", {"String": " "}),
    ],
)
def test_a_tokenizer_that_does_something_else_is_left_to_the_library(path: str, value: Any):
    tokenizer = train(QWEN2)
    part = spec = json.loads(tokenizer.to_str())
    *names, last = [int(name) if re.fullmatch(r"\d", name) else name for name in path.split(".")]
    for name in names:
        part = part[name]
    part[last] = value
    assert AsciiWords.of(tokenizer, spec) is None


def test_real_questions(shared_data, tokenizers: dict[str, tuple[Tokenizer, AsciiWords]]):
    lines = (shared_data / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:600]
    texts = [f"<|im_start|>{row['question']}<|im_end|>\n{row['answer']}" for row in map(json.loads, lines)]
    for tokenizer, words in tokenizers.values():
        encodings = [words.encode(text) for text in texts]
        assert sum(encoding is not None for encoding in encodings) > 0.85 * len(texts)
        for text, encoding in zip(texts, encodings, strict=True):
            if encoding is not None:
                assert encoding.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
