"""Byte-level BPE of ASCII text, word by word: the ids of the `tokenizers` library in a third of its time.

BPE never merges across the words that a pre-tokenizer splits a text into, and the same words occur again and again. The
library computes the ids of each word once; a dictionary keeps them. The rest is splitting, which Python's `re` does the
same way as the library for the patterns in `PATTERNS`, as long as the text is ASCII. Everything else goes to the
library.
"""

import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HFTokenizer

from lean_ft.gguf.splitting import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from lean_ft.system.foreign_values import JSON
from lean_ft.tokenizers.vocabulary import Encoding, any_of

MAX_WORDS = 2**17  # in the dictionary, which is emptied when it is full
MAX_WORD_CHARACTERS = 64  # longer words rarely occur twice
NOT_PLAIN = re.compile(r"[^\t\n\r -~]")
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")  # these leave ASCII unchanged
PATTERNS = (GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN)  # also of SmolLM3, Qwen3 and many others
# The letters that byte-level BPE writes for these bytes; it leaves the other plain characters as they are.
BYTE_LETTERS = str.maketrans({" ": "\u0120", "\n": "\u010a", "\t": "\u0109", "\r": "\u010d"})


class AsciiWords:
    """Encodes ASCII texts exactly as `tokenizer` does."""

    def __init__(self, tokenizer: HFTokenizer, pattern: re.Pattern[str]):
        self._tokenizer = tokenizer
        self._pattern = pattern
        self._word_ids: dict[str, tuple[int, ...]] = {}
        added = tokenizer.get_added_tokens_decoder()
        plain = {
            token.content: token_id
            for token_id, token in added.items()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }
        self._added = {content: (token_id,) for content, token_id in plain.items()}
        self._split_at_added = re.compile(f"({any_of(plain).pattern})")
        self._needs_library = any_of(token.content for token in added.values() if token.content not in plain)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)  # characters of each token, if ASCII
        self._lengths[list(vocabulary.values())] = [len(token) for token in vocabulary]

    @classmethod
    def of(cls, tokenizer: HFTokenizer, spec: dict[str, Any]) -> "AsciiWords | None":
        """Return None if this method may give other ids than the `tokenizer` that the tokenizer.json `spec`
        describes."""
        model, normalizer = spec["model"], spec.get("normalizer")
        changes_words = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token")
        if model.get("type") != "BPE" or any(model.get(name) for name in changes_words):
            return None
        if normalizer is not None and normalizer["type"] not in NORMALIZERS:
            return None
        pattern = _word_pattern(spec.get("pre_tokenizer"))
        return None if pattern is None else cls(tokenizer, pattern)

    def encode(self, text: str) -> Encoding | None:
        """Return the library's encoding of `text` without special tokens around it, or None if the library has to do
        it."""
        if NOT_PLAIN.search(text) or self._needs_library.search(text):
            return None
        ids: list[int] = []
        word_ids = self._word_ids
        for i, section in enumerate(self._split_at_added.split(text)):
            if i % 2:
                ids += self._added[section]
                continue
            for word in self._pattern.findall(section):
                try:
                    ids += word_ids[word]
                except KeyError:
                    ids += self._compute(word)
        array = np.array(ids, dtype=np.int32)
        lengths = self._lengths[array]
        ends = np.cumsum(lengths, dtype=np.int32)
        if (ends[-1] if ids else 0) != len(text):
            return None  # a token stands for more or less than its characters
        return Encoding(array, ends - lengths, ends)

    def _compute(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._tokenizer.model.tokenize(word.translate(BYTE_LETTERS)))
        if len(word) <= MAX_WORD_CHARACTERS:
            if len(self._word_ids) >= MAX_WORDS:
                self._word_ids.clear()
            self._word_ids[word] = ids
        return ids


def _word_pattern(pre_tokenizer: JSON) -> re.Pattern[str] | None:
    """Return the pattern by which a pre-tokenizer splits ASCII text, or None if it is not one of `PATTERNS`."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            pattern = GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in PATTERNS:
            pass
        case _:
            return None
    in_ascii = pattern.replace(r"\p{L}\p{N}]", "A-Za-z0-9]").replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    return re.compile(in_ascii, re.ASCII)
