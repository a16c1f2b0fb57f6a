"""The interface that the three kinds of tokenizer file share: text to ids, and the characters that each id covers.

A *control token*, such as `<|im_end|>` or `</s>`, is written by a chat template and must not come from a message. If a
message contains its characters, they are passed as a `literal` span and encoded as ordinary text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Span = tuple[int, int]  # index of the first character, and one past the last


@dataclass(frozen=True)
class Encoding:
    """The ids of a text; id i covers `text[starts[i]:ends[i]]`.

    If several ids make up one character (an emoji's bytes), each covers it, or the first ones cover nothing before it.
    """

    ids: np.ndarray  # (N,) int32
    starts: np.ndarray  # (N,) int32
    ends: np.ndarray  # (N,) int32

    @classmethod
    def of(cls, ids: Sequence[int], spans: Sequence[Span]) -> "Encoding":
        starts_ends = np.asarray(spans, dtype=np.int32).reshape(-1, 2)
        return cls(np.asarray(ids, dtype=np.int32), starts_ends[:, 0], starts_ends[:, 1])

    def touches(self, spans: Iterable[Span]) -> np.ndarray:
        """Return a (N,) bool mask of the ids that cover a character of `spans`, or part of one. An id that covers no
        characters belongs to the next character."""
        hit = np.zeros(len(self.ids), dtype=bool)
        for start, end in spans:
            inside = (self.starts < end) & (self.ends > start)
            hit |= inside | ((self.starts == self.ends) & (self.starts >= start) & (self.starts < end))
        return hit


class Vocabulary(Protocol):
    """The tokenizer that one file describes."""

    size: int
    """One more than the largest id."""
    added: dict[str, int]
    """Tokens that are matched before the text is split: control tokens, and plain ones such as `<think>`."""
    control: frozenset[str]
    """The control tokens among `added`."""
    adds_bos: bool
    adds_eos: bool

    def encode(self, texts: list[str], literals: list[list[Span]]) -> list[Encoding]:
        """Encode without bos and eos; control tokens inside a text's `literals` are ordinary text."""
        ...

    def encode_ids(self, text: str) -> list[int]:
        """Return the ids that `encode` gives a text without literals."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def id_token(self, token_id: int) -> str | None: ...


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the leftmost of `tokens`, and the longest of those that begin there."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def split_at_tokens(text: str, pattern: re.Pattern[str], literal: Sequence[Span]) -> list[tuple[int, int, bool]]:
    """Cut `text` into pieces (start, end, is_token) at the matches of `pattern` outside the `literal` spans."""
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
    """Matches added tokens first; a subclass encodes the pieces of text between them."""

    added: dict[str, int]
    _any_added: re.Pattern[str]

    def encode(self, texts: list[str], literals: list[list[Span]]) -> list[Encoding]:
        return [self._encode(text, literal) for text, literal in zip(texts, literals, strict=True)]

    def encode_ids(self, text: str) -> list[int]:
        return self._encode(text, []).ids.tolist()

    def _encode(self, text: str, literal: list[Span]) -> Encoding:
        parts = [Encoding.of([], [])]
        for start, end, is_token in split_at_tokens(text, self._any_added, literal):
            piece = text[start:end]
            if is_token:
                token_id = self.added[piece if piece in self.added else piece.strip()]  # the match includes spaces
                parts.append(Encoding.of([token_id], [(start, end)]))
            else:
                parts.append(self._encode_piece(piece, start))
        arrays = ([getattr(part, name) for part in parts] for name in ("ids", "starts", "ends"))
        return Encoding(*map(np.concatenate, arrays))

    @abstractmethod
    def _encode_piece(self, piece: str, start: int) -> Encoding:
        """Encode the piece that begins at character `start` of the text, with positions in the text."""
