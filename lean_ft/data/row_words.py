"""Words of texts and of rows, as numbers: what near-duplicates and overlaps with evaluation tasks are compared by.

A word is a run of letters and digits after Unicode normalization (NFKC) and case folding. Punctuation, white space and
invisible characters do not count. A character of a script without spaces, such as Chinese or Thai, is a word of its
own. With `symbols`, so are signs that change the meaning of a formula or of code, such as `+`, `(` and emoji; a hyphen
between letters is none of them. In a text without words, each visible character is one.

The text of a row is that of all fields that its format reads, without `NOT_COMPARED`, system messages and the names of
roles: many rows share a system prompt, and it would make all of them similar. Rows that show other media are different
rows, however similar their texts are. Nothing is rendered or tokenized, so the chat template and the tokenizer do not
matter, and nothing is cut.

Legend: N rows, C characters, W words, R runs of words.
"""

import hashlib
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from lean_ft.data.chats import parse_if_json
from lean_ft.data.formats import SYSTEM_ROLES, RowReader, reading
from lean_ft.data.parts import PART_FIELDS, type_of
from lean_ft.data.rows import Row

TO_NEXT = np.uint64(0x9E3779B97F4A7C15)  # odd; a word counts by its place in a run
_FACTOR = 0x2545F4914F6CDD1D  # odd; a character counts by its place in a word
_KEYS = frozenset(("role", "from", "type", "id", "tool_call_id"))  # of messages and parts: no text
_WORD, _ALONE, _VISIBLE = 2, 3, 1  # kinds of characters; 0: white space
_SYMBOLS = frozenset("#%&*/@\\-()[]{}")  # besides the symbols of Unicode, such as + and =
# First and last character of scripts without spaces: Thai and Lao, Myanmar, Khmer, kana, Han.
_WITHOUT_SPACES = ((0xE00, 0xEFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF))
_WITHOUT_SPACES += ((0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_ROWS_AT_A_TIME, _CHARACTERS_AT_A_TIME = 256, 1 << 18


# Words of texts -------------------------------------------------------------------------------------------------------


class RowWords(NamedTuple):
    """The words of some rows."""

    words: np.ndarray  # (W,) uint32: equal words have equal numbers, in every process
    num_words: np.ndarray  # (N,) int64

    @property
    def offsets(self) -> np.ndarray:
        """(N + 1,) first word of each row, and W."""
        return np.append(0, np.cumsum(self.num_words))


def words_of(text: str, *, symbols: bool) -> list[str]:
    """The words of a text, in order."""
    text = _normalized(text)
    spans = _spans(_kinds(_characters(text), symbols))
    return [text[start:end] for start, end in zip(*(ends.tolist() for ends in spans), strict=True)]


def numbers_of(texts: Sequence[str], *, symbols: bool) -> RowWords:
    """The words of texts as numbers."""
    normalized = [f"{_normalized(text)}\n" for text in texts]
    characters = _characters("".join(normalized))
    lengths = np.array([len(text) for text in normalized], dtype=np.int64)
    kinds, lasts = _kinds(characters, symbols), np.cumsum(lengths)
    has_words = np.add.reduceat((kinds >= _WORD).astype(np.int64), lasts - lengths) > 0 if texts else lasts > 0
    if not has_words.all():
        kinds = np.where(np.repeat(has_words, lengths) | (kinds == 0), kinds, _ALONE)
    starts, ends = _spans(kinds)
    powers, inverse = _powers(1 << len(characters).bit_length())
    sums = np.append(np.uint64(0), np.cumsum((characters + np.uint64(1)) * powers[: len(characters)], dtype=np.uint64))
    words = mixed((sums[ends] - sums[starts]) * inverse[starts]) >> np.uint64(32)
    num_words = np.bincount(np.searchsorted(lasts, starts, side="right"), minlength=len(texts))
    return RowWords(words.astype(np.uint32), num_words.astype(np.int64))


def runs_of(words: np.ndarray, offsets: np.ndarray, length: int, *, of_short: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of each run of `length` words, (R,) uint64, and the first run of each row and R, (N + 1,).

    words: (all words of N rows,) uint32; offsets: (N + 1,) first word of each row. A row of fewer words has one run
    with `of_short`, and none without.
    """
    num_words = np.diff(offsets)
    counts = np.maximum(num_words - length + 1, (num_words > 0) if of_short else 0)
    firsts = np.append(0, np.cumsum(counts))
    gap = np.arange(len(counts)) * (length - 1)  # of zeros, at the end of each row
    padded = np.zeros(len(words) + len(counts) * (length - 1), dtype=np.uint64)
    padded[np.arange(len(words)) + np.repeat(gap, num_words)] = mixed(words.astype(np.uint64))
    places = np.arange(firsts[-1]) + np.repeat(offsets[:-1] + gap - firsts[:-1], counts)
    hashes = padded[places]
    for i in range(1, length):
        hashes = hashes * TO_NEXT + padded[places + i]
    return mixed(hashes), firsts


def mixed(values: np.ndarray) -> np.ndarray:
    """Hash 64-bit numbers, as splitmix64 does."""
    values = values + TO_NEXT
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _normalized(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(_invisible()))
    return text.casefold()


@cache
def _invisible() -> dict[int, None]:
    """A table for `str.translate` that removes characters which only format, such as a soft hyphen."""
    formatting = {i: None for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i)) == "Cf"}
    return formatting | dict.fromkeys(range(0xFE00, 0xFE10))  # how an emoji looks


def _characters(text: str) -> np.ndarray:
    """(C,) uint64"""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)


def _kinds(characters: np.ndarray, symbols: bool) -> np.ndarray:
    """The kind of each character, (C,) uint8."""
    is_ascii = not len(characters) or characters.max() < 128
    kinds = _table(128 if is_ascii else sys.maxunicode + 1, symbols)[characters]
    hyphens = np.flatnonzero(characters[1:-1] == ord("-")) + 1
    if symbols and len(hyphens):
        is_letter = (kinds == _WORD) & ((characters < ord("0")) | (characters > ord("9")))
        kinds[hyphens[is_letter[hyphens - 1] & is_letter[hyphens + 1]]] = _VISIBLE
    return kinds


@cache
def _table(size: int, symbols: bool) -> np.ndarray:
    """The kind of each character below `size`. Marks, such as vowels of Indic scripts, belong to words."""
    table = np.full(size, _VISIBLE, dtype=np.uint8)
    for i in range(size):
        category = unicodedata.category(chr(i))
        if category[0] in "LNM":
            table[i] = _WORD
        elif chr(i).isspace():
            table[i] = 0
        elif symbols and (category[0] == "S" or chr(i) in _SYMBOLS):
            table[i] = _ALONE
    table[ord("`")] = _VISIBLE
    for first, last in _WITHOUT_SPACES:
        table[first : last + 1] = np.where(table[first : last + 1] == _WORD, _ALONE, table[first : last + 1])
    return table


def _spans(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first characters of words, (W,), and the ends of the words."""
    if not (kinds >= _WORD).any():
        kinds = np.where(kinds == _VISIBLE, _ALONE, kinds)
    before, after = np.append(0, kinds[:-1]), np.append(kinds[1:], 0)
    is_word, is_alone = kinds >= _WORD, kinds == _ALONE
    starts = is_word & ((before < _WORD) | is_alone | (before == _ALONE))
    ends = is_word & ((after < _WORD) | is_alone | (after == _ALONE))
    return np.flatnonzero(starts), np.flatnonzero(ends) + 1


@cache
def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The powers of `_FACTOR` and of its inverse modulo 2^64, (size,) uint64 each."""
    both = []
    for factor in (_FACTOR, pow(_FACTOR, -1, 1 << 64)):
        powers = np.full(size, factor, dtype=np.uint64)
        powers[0] = 1
        both.append(np.multiply.accumulate(powers))
    return both[0], both[1]


# Contents of rows -----------------------------------------------------------------------------------------------------


@dataclass
class RowContents:
    """What is compared of a row."""

    texts: list[str] = field(default_factory=list)
    ids: np.ndarray | None = None
    """Ids of tokens, which are its words."""
    _media: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, row: Row, reader: RowReader) -> "RowContents":
        """Empty for a row that cannot be read, which is refused or skipped elsewhere."""
        found = cls()
        try:
            with reading(row):
                fields, form = reader.contents(row), reader.formats[row.source].fields
                if form.ids:
                    found.ids = np.array(parse_if_json(fields.pop(form.ids), form.ids)).astype(np.uint32)
                for name, value in fields.items():
                    if name in PART_FIELDS:
                        found.add_media(value)
                    else:
                        found.add(_parsed(value, name))
        except (ValueError, TypeError, OverflowError):
            return cls()
        return found

    @property
    def media(self) -> int:
        """Hash of the contents or paths of images, 64 bits; 0 without images."""
        whole = hashlib.blake2b(digest_size=8)
        for part in self._media:
            whole.update(len(part).to_bytes(8) + part)
        return int.from_bytes(whole.digest()) if self._media else 0

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def add(self, value: object) -> None:
        """Add the texts and the media in a value."""
        if isinstance(value, str):
            self.texts.append(value)
        elif type_of(value) is not None:
            self.add_media(value)
        elif isinstance(value, Mapping):
            if value.get("role", value.get("from")) not in SYSTEM_ROLES:
                for key, item in value.items():
                    if key not in _KEYS:
                        self.add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add(item)
        elif value is not None and not isinstance(value, bool | int | float):
            self.add_media(value)

    def add_media(self, value: object) -> None:
        """Add media by their contents or paths."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                if key != "type":
                    self.add_media(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add_media(item)
        elif isinstance(value, bytes | bytearray | memoryview):
            self._media.append(bytes(value))
        elif (contents := getattr(value, "tobytes", None)) is not None:  # a picture of Pillow
            self._media.append(contents())
        elif value not in (None, ""):
            self._media.append(str(value).encode("utf-8", "surrogatepass"))


def words_of_rows(rows: Sequence[RowContents], *, symbols: bool) -> RowWords:
    """The words of rows. Ids of tokens come before texts."""
    found = numbers_of([row.text for row in rows], symbols=symbols)
    if all(row.ids is None for row in rows):
        return found
    nothing, offsets = np.empty(0, dtype=np.uint32), found.offsets
    parts = [
        np.append(nothing if row.ids is None else row.ids, found.words[offsets[i] : offsets[i + 1]])
        for i, row in enumerate(rows)
    ]
    return RowWords(np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64))


def batched(rows: Iterable[RowContents]) -> Iterator[list[RowContents]]:
    """Rows in lists, which bound the memory of `words_of_rows`."""
    some, size = list[RowContents](), 0
    for row in rows:
        some.append(row)
        size += sum(map(len, row.texts))
        if len(some) == _ROWS_AT_A_TIME or size >= _CHARACTERS_AT_A_TIME:
            yield some
            some, size = [], 0
    if some:
        yield some


def _parsed(value: object, name: str) -> object:
    """A field with messages that are JSON, as in CSV files, as a list; others unchanged."""
    with suppress(ValueError):
        found = parse_if_json(value, name)
        if isinstance(found, list) and all(isinstance(item, dict | list) for item in found):
            return found
    return value
