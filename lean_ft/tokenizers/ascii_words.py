"""Byte-level BPE of ASCII text a word at a time, several times as fast as the `tokenizers` library and with its ids.

BPE merges inside the words that a pattern splits a text into, never across them, so the ids of a text are the ids of its
words; and texts are made of the same words over and over. The library itself is asked for the ids of each word, once;
then they are in a dictionary. What is left of a text is to split it, and that is the pattern's own regular expression in
Python's engine. In ASCII the two engines agree: there `\\p{L}` is A-Z and a-z, `\\p{N}` is 0-9, and neither folding,
normalisation nor a version of Unicode plays a part. Any other text, pattern or kind of tokenizer goes to the library.
"""

import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HFTokenizer

from lean_ft.tokenizers.vocabulary import SpanEncoding, any_of

MOST_WORDS = 2**17  # remembered; they are forgotten together when there are more
LONGEST_WORD = 64  # characters; longer ones hardly come again, and would fill the memory
NOT_PLAIN = re.compile(r"[^\t\n\r -~]")
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")  # which leave ASCII as it is
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The constructs that mean the same to both engines; a pattern with anything else is not taken over.
UNDERSTOOD = re.compile(
    r"(?:\\[snrtS/'\-]|\\p\{[LN]\}|\(\?i:|\(\?:|\(\?!|\(\?=|\)|\||\[\^?|\]|\{\d+(?:,\d*)?\}(?!\+)|[?*+]"
    r"|[\w\s'/,<>=:;\"#%&~`@_!-])*"
)
# How the byte-level alphabet writes the characters that it does not leave as they are.
WRITTEN = str.maketrans({" ": "\u0120", "\n": "\u010a", "\t": "\u0109", "\r": "\u010d"})


class AsciiWords:
    """Encodes ASCII texts as `tokenizer` does."""

    def __init__(self, tokenizer: HFTokenizer, pattern: re.Pattern[str]):
        self._tokenizer = tokenizer
        self._pattern = pattern
        self._ids_of: dict[str, tuple[int, ...]] = {}
        added = tokenizer.get_added_tokens_decoder()
        plain = {
            token.content: token_id
            for token_id, token in added.items()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }
        self._added = {content: (token_id,) for content, token_id in plain.items()}
        self._at_added = re.compile(f"({any_of(plain).pattern})")
        odd = [token.content for token in added.values() if token.content not in plain]
        self._odd = any_of(odd) if odd else None
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)  # characters of a token, were it ASCII
        self._lengths[list(vocabulary.values())] = [len(token) for token in vocabulary]

    @classmethod
    def of(cls, tokenizer: HFTokenizer, spec: dict[str, Any]) -> "AsciiWords | None":
        """For a `tokenizer` with the tokenizer.json `spec`; None where this way of encoding may not be its own."""
        model, normalizer = spec["model"], spec.get("normalizer")
        whole_words = not (model.get("dropout") or model.get("continuing_subword_prefix"))
        whole_words = whole_words and not (model.get("end_of_word_suffix") or model.get("unk_token"))
        if model.get("type") != "BPE" or not whole_words:
            return None
        if normalizer is not None and normalizer["type"] not in NORMALIZERS:
            return None
        pattern = _words_pattern(spec.get("pre_tokenizer") or {})
        return None if pattern is None else cls(tokenizer, pattern)

    def encode(self, text: str) -> SpanEncoding | None:
        """The library's encoding of `text`, without special tokens around it; None for what is not ASCII."""
        if NOT_PLAIN.search(text) or (self._odd is not None and self._odd.search(text)):
            return None
        ids: list[int] = []
        remembered = self._ids_of
        for i, section in enumerate(self._at_added.split(text)):
            if i % 2:
                ids += self._added[section]
                continue
            for word in self._pattern.findall(section):
                try:
                    ids += remembered[word]
                except KeyError:
                    ids += self._ask(word)
        array = np.array(ids, dtype=np.int32)
        lengths = self._lengths[array]
        ends = np.cumsum(lengths, dtype=np.int32)
        if (ends[-1] if ids else 0) != len(text):
            return None  # the pattern leaves out some of the text, or a token stands for more than its bytes
        return SpanEncoding(array, ends - lengths, ends)

    def _ask(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._tokenizer.model.tokenize(word.translate(WRITTEN)))
        if len(word) <= LONGEST_WORD:
            if len(self._ids_of) >= MOST_WORDS:
                self._ids_of.clear()
            self._ids_of[word] = ids
        return ids


def _words_pattern(pre_tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """The expression by which a pre-tokenizer splits ASCII text into words; None where it does something else too."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return _in_ascii(GPT2_PATTERN)
    if len(steps) == 2 and steps[0].get("type") == "Split" and not steps[1].get("use_regex", True):
        split = steps[0]
        matches_are_words = (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        if matches_are_words and "Regex" in split["pattern"]:
            return _in_ascii(split["pattern"]["Regex"])
    return None


def _in_ascii(pattern: str) -> re.Pattern[str] | None:
    """A pattern of the library's engine as one of Python's that finds the same in ASCII; None for one it may not."""
    if not UNDERSTOOD.fullmatch(pattern) or "[:" in pattern or "&&" in pattern or "--" in pattern:
        return None
    parts: list[str] = []
    in_class = False
    for part in re.findall(r"\\p\{[LN]\}|\\.|.", pattern, re.DOTALL):
        if part.startswith(r"\p"):
            letters = "A-Za-z" if part == r"\p{L}" else "0-9"
            part = letters if in_class else f"[{letters}]"
        elif part in "[]":
            if (part == "[") == in_class:
                return None  # a class in a class
            in_class = part == "["
        parts.append(part)
    try:
        return re.compile("".join(parts), re.ASCII)
    except re.error:
        return None
