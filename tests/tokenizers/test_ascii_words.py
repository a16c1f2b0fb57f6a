"""Word-by-word encoding of ASCII gives the library's ids and positions, and declines everything that it may do
differently."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lean_ft.gguf.splitting import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from lean_ft.tokenizers import ascii_words
from lean_ft.tokenizers.ascii_words import AsciiWords

ADDED = ["<|im_start|>", "<|im_end|>", "<think>"]
TEXT = "It's said the others'll have said that THEY'VE 1234 others, said 'so;\n\n  the end.\tthe_end(the);\n" * 3


def train(pattern: str | None = None, *, ignore_merges: bool = False, **added: Any) -> Tokenizer:
    """A small byte-level BPE that splits by `pattern`, or as GPT-2's pre-tokenizer does by itself."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, **added) for token in ADDED])
    return tokenizer


def words_of(tokenizer: Tokenizer) -> AsciiWords | None:
    return AsciiWords.of(tokenizer, json.loads(tokenizer.to_str()))


@pytest.fixture(scope="module")
def tokenizers() -> list[tuple[Tokenizer, AsciiWords]]:
    with_nfc = train(QWEN2_PATTERN)
    with_nfc.normalizer = normalizers.NFC()
    pairs = []
    for tokenizer in (with_nfc, train(LLAMA3_PATTERN, ignore_merges=True), train(), train(GPT2_PATTERN)):
        words = words_of(tokenizer)
        assert words is not None
        pairs.append((tokenizer, words))
    return pairs


PIECES = st.one_of(
    st.sampled_from([*ADDED, "the", " said", "'ll", "'VE", "'S", "\n", "\r\n", "  ", "\t", "12", "<|im_", "others"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6),
    st.text(st.characters(max_codepoint=127), max_size=2),
    st.text(st.sampled_from(" \n\r\t'a1."), max_size=8),
)


@pytest.mark.parametrize("number", [80, pytest.param(250, marks=pytest.mark.long)])
def test_ids_and_positions_are_the_librarys(tokenizers: list[tuple[Tokenizer, AsciiWords]], number: int):
    @settings(max_examples=number, deadline=None)
    @given(st.lists(PIECES, max_size=12).map("".join))
    def check(text: str):
        for tokenizer, words in tokenizers:
            expected, got = tokenizer.encode(text, add_special_tokens=False), words.encode(text)
            if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
                assert got is None  # the library encodes control characters
                continue
            assert got is not None
            assert got.ids.tolist() == expected.ids
            assert list(zip(got.starts.tolist(), got.ends.tolist(), strict=True)) == expected.offsets

    check()


@pytest.mark.parametrize("text", ["naïve", "it’s", "a\u00a0b", "\x1c", "\x00", "a\x0bb", "日本"])
def test_other_characters_go_to_the_library(tokenizers: list[tuple[Tokenizer, AsciiWords]], text: str):
    assert all(words.encode(f"the {text} said") is None for _, words in tokenizers)


def test_the_dictionary_is_bounded(tokenizers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ascii_words, "MAX_WORDS", 3)
    tokenizer, words = tokenizers[0]
    for text in (TEXT, "said " + "others" * 1000, TEXT):
        assert words.encode(text).ids.tolist() == tokenizer.encode(text).ids
        assert len(words._word_ids) <= 3 and max(map(len, words._word_ids)) <= 64


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_text_with_a_token_that_takes_its_surroundings_goes_to_the_library(flag: str):
    words = words_of(train(QWEN2_PATTERN, **{flag: True}))
    assert words is not None
    assert words.encode("a <think> b") is None
    assert words.encode("a think b") is not None


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
        ("pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\p{Lu}+|\p{L}"}),
    ],
)
def test_a_tokenizer_that_works_differently_is_left_to_the_library(path: str, value: Any):
    tokenizer = train(QWEN2_PATTERN)
    part = spec = json.loads(tokenizer.to_str())
    *names, last = [int(name) if re.fullmatch(r"\d", name) else name for name in path.split(".")]
    for name in names:
        part = part[name]
    part[last] = value
    assert AsciiWords.of(tokenizer, spec) is None
