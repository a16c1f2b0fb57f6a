"""Kinds of columns: what the columns of a capability do beyond standing beside their tokens.

A column of tokens needs no kind: truncation, packing and batches move its values with the tokens. A kind is for columns
whose values depend on what stands before them, or that become other arguments of the forward pass.
Documents and `Columns` carry their kinds, and the code that handles them asks each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns, Document
    from lean_ft.data.report import DataReport
    from lean_ft.models import Decoder
    from lean_ft.tokenizers import Passage, Tokenizer


class OfBatch:
    """What a kind adds to one batch."""

    counts: dict[str, int]
    """Numbers for metrics, which need no input to be built. A batch without such values has zeros."""

    def inputs(self) -> dict[str, Any]:
        """Build the arguments of the forward pass. May take long: the next batch is built during a step."""
        raise NotImplementedError


class Insert(NamedTuple):
    """Something other than text that tokens of a document represent. For previews."""

    first: int  # token
    end: int
    text: str
    picture: Callable[[], str] | None = None  # makes the data URL of a small picture


class EnginePrompt(NamedTuple):
    """A document as a request to an inference engine has it: the engine expands placeholders to the document's ids."""

    ids: list[int]
    parts: list[dict[str, str]]
    """Content parts, as in OpenAI's chats, in the order of the placeholders."""


class Kind:
    """Behavior of some columns. Kinds are equal if they behave alike, and can be pickled."""

    replaced: ClassVar[tuple[str, ...]] = ()
    """Columns of tokens that the model gets only as `OfBatch.inputs`."""
    unit: ClassVar[str] = ""
    """What this kind adds to documents, for reports. A content part of this type has it as its `unit`."""
    reader: ClassVar[str] = ""
    """The part of a model that reads it, for errors."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics in `OfBatch.counts`."""

    @property
    def never_trained(self) -> frozenset[int]:
        """Ids that a policy may sample and that are never trained."""
        return frozenset()

    def measured(self, passage: Passage, folder: Path) -> Passage:
        """Read the sizes of the passage's parts of this unit, and write their texts for the placeholders. Paths are
        relative to `folder`.

        Raises UnreadablePartError for a part that cannot be read, and ValueError if the placeholders do not fit.
        """
        raise NotImplementedError

    def with_columns(self, document: Document, parts: Sequence[Any], tokenizer: Tokenizer) -> Document:
        """Add this kind's columns for the measured `parts` to a document. Raises ValueError if its tokens do not fit
        the parts."""
        raise NotImplementedError

    def unseen(self, fields: Mapping[str, Any]) -> list[str]:
        """The names of unread fields that look like contents of parts, of a row that shows no part of this unit."""
        return []

    def check(self, report: DataReport) -> None:
        """Raise ValueError if no row shows a part of this unit and the report of all rows names likely places of
        some."""

    def behind(self, before: Document, document: Document) -> Document:
        """Return `document` as it is behind the tokens of `before`."""
        return document

    def is_in(self, document: Document) -> bool:
        """Whether the document has anything of this kind. All documents of a run have its columns."""
        raise NotImplementedError

    def is_read_by(self, model: Decoder) -> bool:
        """Whether the model has its reader."""
        raise NotImplementedError

    def next_cut(self, document: Document, place: int) -> int:
        """Return the first place from `place` on where the document may be cut."""
        return place

    def of_batch(self, columns: Columns, placed: Placed) -> OfBatch:
        raise NotImplementedError

    def work(self, columns: Columns) -> np.ndarray:
        """(N,) work that each document needs beside its tokens: the second batch of a run has the most."""
        raise NotImplementedError

    def fill(self, document: Document, number: int) -> Document:
        """Return a document of the same length, full of what this kind adds, for plans. `number` tells documents
        apart."""
        raise NotImplementedError

    def fingerprint(self, columns: Columns) -> str:
        """Hash of what the content of the source's files does not decide."""
        raise NotImplementedError

    def changed(self, columns: Columns) -> str:
        """Hash of files that the columns refer to, as they are now, if one changed; else an empty string."""
        return ""

    def describe(self, columns: Columns, report: DataReport, sides: int) -> None:
        """Add counts to the report; `sides`: documents per row of data."""

    def num_tokens(self, columns: Columns) -> np.ndarray:
        """(I,) number of tokens of each of the `unit` that all stored documents have."""
        return np.empty(0, dtype=np.int64)

    def inserts(self, document: Document) -> list[Insert]:
        """What this kind adds to a document, for previews. Raises ValueError for a file that cannot be read."""
        return []

    def check_engine(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError if an inference engine would read parts of this unit otherwise than the trainer."""
        raise NotImplementedError

    def engine_prompt(self, document: Document, tokenizer: Tokenizer) -> EnginePrompt:
        """A document that has something of this kind, for an inference engine. Raises ValueError for a part that cannot
        be read, or that the engine would read otherwise."""
        raise NotImplementedError


def kinds_in(document: Document) -> list[Kind]:
    """The kinds of which a document has anything: none if it is a text, with or without the columns of kinds."""
    return [kind for kind in document.kinds if kind.is_in(document)]


def engine_prompt(document: Document, tokenizer: Tokenizer) -> EnginePrompt:
    """The document for an inference engine. Raises ValueError as `Kind.engine_prompt`, and for parts of several
    kinds."""
    kinds = kinds_in(document)
    if len(kinds) > 1:
        raise ValueError(f"an engine gets no document with {' and '.join(f'{kind.unit}s' for kind in kinds)}.")
    if kinds:
        return kinds[0].engine_prompt(document, tokenizer)
    return EnginePrompt(document.ids.tolist(), [])


def next_cut(document: Document, place: int) -> int:
    """Return the first place from `place` on where all kinds of the document allow a cut."""
    while (later := max((kind.next_cut(document, place) for kind in document.kinds), default=place)) > place:
        place = later
    return place


def unit_that_is_cut(document: Document, kept: slice) -> str:
    """The unit of which one would be cut if only the tokens `kept` of a document stayed; empty if
    none would."""
    cuts = (kept.start, kept.stop)
    return next((kind.unit for kind in document.kinds if any(kind.next_cut(document, i) != i for i in cuts)), "")
