"""Words of texts and of rows, as numbers: what near-duplicates and overlaps with evaluation tasks are compared by.

A word is a run of letters and digits after Unicode normalization (NFKC) and case folding; punctuation, white space and
invisible characters do not count. A character of a script without spaces, such as Chinese or Thai, is a word of its
own. A text without letters and digits, such as emoji, has a word per visible character.

The text of a row is that of all fields that its format reads, without `NOT_COMPARED`, system messages and the names of
roles: many rows share a system prompt, and it would make all of them similar. Rows that show other media are different
rows, however similar their texts are. Nothing is rendered or tokenized, so the chat template and the tokenizer do not
matter, and nothing is cut.

Legend: W words of a text or a row.
"""

import hashlib
import re
import sys
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

import numpy as np

from lean_ft.data.chats import parse_if_json
from lean_ft.data.formats import SYSTEM_ROLES, RowReader, reading
from lean_ft.data.parts import PART_FIELDS, type_of
from lean_ft.data.rows import Row

# Scripts without spaces: Thai, Lao, Myanmar, Khmer, kana, Han.
_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Marks that belong to a word, which `\w` leaves out: accents, Hebrew and Arabic vowels, signs of Indic scripts.
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0dff"
_WORD = re.compile(f"[{_ALONE}]|(?:[^\\W_{_ALONE}]|[{_MARKS}])+")
_VISIBLE = re.compile(r"\S")
_MOST_KNOWN = 1 << 20  # words whose numbers are remembered
_KEYS = frozenset(("role", "from", "type", "id", "tool_call_id"))  # of messages and parts: no text


class WordsOfRow(NamedTuple):
    """What is compared of a row."""

    words: np.ndarray  # (W,) uint32
    media: int
    """Hash of the contents or paths of images, 64 bits; 0 if the row shows none."""


def words_of(text: str) -> list[str]:
    """The words of a text, in order."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(_invisible()))
    text = text.casefold()
    return _WORD.findall(text) or _VISIBLE.findall(text)


def numbers_of(words: list[str]) -> np.ndarray:
    """A number per word, (W,) uint32: equal words have equal numbers, in every process."""
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    return np.array([_known[word] for word in words], dtype=np.uint32)


def words_of_row(row: Row, reader: RowReader) -> WordsOfRow:
    """What is compared of a row; no words for a row that cannot be read, which is refused or skipped elsewhere."""
    found, ids = _Contents(), np.empty(0, dtype=np.uint32)
    try:
        with reading(row):
            fields, form = reader.contents(row), reader.formats[row.source].fields
            if form.ids:
                ids = np.array(parse_if_json(fields.pop(form.ids), form.ids)).astype(np.uint32)
            for name, value in fields.items():
                if name in PART_FIELDS:
                    found.add_media(value)
                else:
                    found.add(_parsed(value, name))
    except (ValueError, TypeError, OverflowError):
        return WordsOfRow(ids[:0], 0)
    return WordsOfRow(
        np.append(ids, numbers_of([word for text in found.texts for word in words_of(text)])), found.media
    )


class _Numbers(dict[str, int]):
    def __missing__(self, word: str) -> int:
        number = self[word] = crc32(word.encode("utf-8", "surrogatepass"))
        return number


_known = _Numbers()
_INVISIBLE: dict[int, None] = {}


def _invisible() -> dict[int, None]:
    """A table for `str.translate` that removes characters which only format, such as a soft hyphen."""
    if not _INVISIBLE:
        _INVISIBLE.update((i, None) for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i)) == "Cf")
    return _INVISIBLE


def _parsed(value: object, name: str) -> object:
    """A field with messages that are JSON, as in CSV files, as a list; others unchanged."""
    with suppress(ValueError):
        found = parse_if_json(value, name)
        if isinstance(found, list) and all(isinstance(item, dict | list) for item in found):
            return found
    return value


class _Contents:
    """Texts and media in the fields of a row."""

    def __init__(self) -> None:
        self.texts = list[str]()
        self._media: list[bytes] = []

    @property
    def media(self) -> int:
        """Hash of the media, or 0 without media."""
        whole = hashlib.blake2b(digest_size=8)
        for part in self._media:
            whole.update(len(part).to_bytes(8) + part)
        return int.from_bytes(whole.digest()) if self._media else 0

    def add(self, value: object) -> None:
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
