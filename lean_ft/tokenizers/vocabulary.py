"""What the three kinds of tokenizer file have in common: text to ids with the characters each id came from.

A *control token* is one that a chat template writes and a person must not be able to type: `<|im_end|>`,
`</s>`. Where somebody did type one inside a message, its characters are passed as `literal` spans and become
ordinary text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Span = tuple[int, int]  # first character, and one past the last


class Encoding(Protocol):
    """The ids of a text, and which of them are where in it."""

    @property
    def ids(self) -> np.ndarray: ...  # (N,) int32

    def touches(self, spans: Iterable[Span]) -> np.ndarray:
        """(N,) bool: the ids that hold at least one character of `spans`, or a part of one. A piece without characters
        of its own belongs to the character it stands before."""
        ...


@dataclass(frozen=True)
class SpanEncoding:
    """The ids of a text and the characters that each covers: `text[starts[i]:ends[i]]`.

    The pieces of one character (bytes of an emoji) may all cover it, or the first ones nothing at its
    beginning.
    """

    ids: np.ndarray  # (N,) int32
    starts: np.ndarray  # (N,) int32
    ends: np.ndarray  # (N,) int32

    @classmethod
    def of(cls, ids: Sequence[int], spans: Sequence[Span]) -> "SpanEncoding":
        starts_ends = np.asarray(spans, dtype=np.int32).reshape(-1, 2)
        return cls(np.asarray(ids, dtype=np.int32), starts_ends[:, 0], starts_ends[:, 1])

    def touches(self, spans: Iterable[Span]) -> np.ndarray:
        hit = np.zeros(len(self.ids), dtype=bool)
        for start, end in spans:
            inside = (self.starts < end) & (self.ends > start)
            hit |= inside | ((self.starts == self.ends) & (self.starts >= start) & (self.starts < end))
        return hit


class Vocabulary(Protocol):
    """One tokenizer file."""

    size: int
    """One more than the largest id."""
    added: dict[str, int]
    """Tokens found in the text before it is split: control tokens, and plain ones such as `<think>`."""
    control: frozenset[str]
    """The control tokens among `added`."""
    adds_bos: bool
    adds_eos: bool

    def encode(self, texts: list[str], literals: list[list[Span]]) -> Sequence[Encoding]:
        """Encodes without adding bos or eos; control tokens inside a text's `literals` are plain text."""
        ...

    def encode_ids(self, text: str) -> list[int]:
        """The ids that `encode` gives a text without literals, for less: no characters are told."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def id_token(self, token_id: int) -> str | None: ...


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost of `tokens`, the longest where several begin there."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def split_at_tokens(text: str, pattern: re.Pattern[str], literal: Sequence[Span]) -> list[tuple[int, int, bool]]:
    """Cuts `text` into (start, end, is_token) where `pattern` matches outside the `literal` spans."""
    pieces: list[tuple[int, int, bool]] = []
    text_start = position = 0
    for literal_start, literal_end in [*literal, (len(text), len(text))]:
        for match in pattern.finditer(text, position, literal_start):
            if match.start() > text_start:
                pieces.append((text_start, match.start(), False))
            pieces.append((match.start(), match.end(), True))
            text_start = match.end()
        position = literal_end
    if text_start < len(text):
        pieces.append((text_start, len(text), False))
    return pieces


class AddedTokensFirst(ABC):
    """Text around added tokens, which are found first: a subclass encodes the stretches between them."""

    added: dict[str, int]
    _any_added: re.Pattern[str]

    def encode(self, texts: list[str], literals: list[list[Span]]) -> list[SpanEncoding]:
        return [self._encode(text, literal) for text, literal in zip(texts, literals, strict=True)]

    def encode_ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for start, end, is_token in split_at_tokens(text, self._any_added, []):
            piece = text[start:end]
            ids.extend([self._added_id(piece)] if is_token else self._piece_ids(piece, start))
        return ids

    def _encode(self, text: str, literal: list[Span]) -> SpanEncoding:
        parts = [SpanEncoding.of([], [])]
        for start, end, is_token in split_at_tokens(text, self._any_added, literal):
            piece = text[start:end]
            token = SpanEncoding.of([self._added_id(piece)], [(start, end)]) if is_token else None
            parts.append(token or self._encode_piece(piece, start))
        arrays = ([getattr(part, name) for part in parts] for name in ("ids", "starts", "ends"))
        return SpanEncoding(*map(np.concatenate, arrays))

    def _added_id(self, token: str) -> int:
        return self.added[token] if token in self.added else self.added[token.strip()]  # one that eats spaces

    @abstractmethod
    def _piece_ids(self, piece: str, start: int) -> list[int]: ...

    @abstractmethod
    def _encode_piece(self, piece: str, start: int) -> SpanEncoding:
        """The piece that stands at `start` of the text, with its characters' places in the text."""
