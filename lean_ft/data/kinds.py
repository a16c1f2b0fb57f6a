"""Kinds of columns: what the columns of a capability do beyond standing beside their tokens.

A column of tokens needs no kind: truncation, packing and batches move its values with the tokens. A kind is for columns
whose values depend on what stands before them, or that become other arguments of the forward pass, as those of images
do (`lean_ft.data.images`). Documents and `Columns` carry their kinds, and the code that handles them asks each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns, Document
    from lean_ft.data.report import DataReport
    from lean_ft.images.rules import ImageRules
    from lean_ft.models import Decoder
    from lean_ft.tokenizers import Tokenizer
    from lean_ft.tokenizers.passages import Passage


class OfBatch:
    """What a kind adds to one batch."""

    counts: dict[str, int]
    """Numbers for metrics, which need no input to be built. A batch without such values has zeros."""

    def inputs(self) -> dict[str, Any]:
        """Build the arguments of the forward pass. May take long: the next batch is built during a step."""
        raise NotImplementedError


class Insert(NamedTuple):
    """Something other than text that tokens of a document represent, such as an image. For previews."""

    first: int  # token
    end: int
    text: str
    picture: Callable[[], str] | None = None  # makes the data URL of a small picture


class Kind:
    """Behavior of some columns. Kinds are equal if they behave alike, and can be pickled."""

    replaced: ClassVar[tuple[str, ...]] = ()
    """Columns of tokens that the model gets only as `OfBatch.inputs`."""
    unit: ClassVar[str] = ""
    """What this kind adds to documents, for reports."""
    reader: ClassVar[str] = ""
    """The part of a model that reads it, for errors."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics in `OfBatch.counts`."""

    @property
    def never_trained(self) -> frozenset[int]:
        """Ids that a policy may sample and that are never trained."""
        return frozenset()

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


class PromptMedium:
    """How prompts show something besides text, before it becomes columns of a kind."""

    def check_text(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError if the fields of a prompt that is no chat show something."""

    def split(self, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return the messages for a chat template, and what they and the other fields of the row show, in order.

        Raises ValueError if the fields do not fit the messages.
        """
        raise NotImplementedError

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError if the model of this tokenizer does not read the medium."""
        raise NotImplementedError

    def written(self, passage: Passage, values: Sequence[Any], tokenizer: Tokenizer, folder: Path) -> Passage:
        """Write what `split` returned into a rendered chat; paths are relative to `folder`. Raises ValueError for a
        file that cannot be read."""
        raise NotImplementedError

    def with_columns(self, document: Document, passage: Passage | None, tokenizer: Tokenizer) -> Document:
        """Add the columns of the kind, if the model reads it; passage: what the document was, None for a text."""
        raise NotImplementedError


def prompt_media() -> tuple[PromptMedium, ...]:
    """All media."""
    from lean_ft.data.images import ImageMedium

    return (ImageMedium(),)


def kinds_in(document: Document) -> list[Kind]:
    """The kinds of which a document has anything: none if it is a text, with or without the columns of kinds."""
    return [kind for kind in document.kinds if kind.is_in(document)]


def next_cut(document: Document, place: int) -> int:
    """Return the first place from `place` on where all kinds of the document allow a cut."""
    while (later := max((kind.next_cut(document, place) for kind in document.kinds), default=place)) > place:
        place = later
    return place


def unit_that_is_cut(document: Document, kept: slice) -> str:
    """The unit, such as "image", of which one would be cut if only the tokens `kept` of a document stayed; empty if
    none would."""
    cuts = (kept.start, kept.stop)
    return next((kind.unit for kind in document.kinds if any(kind.next_cut(document, i) != i for i in cuts)), "")


def names_of_counts() -> tuple[str, ...]:
    """Names of the metrics that any kind counts in batches."""
    from lean_ft.data.images import ImageKind

    return ImageKind.counts


def kinds_of(rules: ImageRules | None) -> tuple[Kind, ...]:
    """The kinds of columns of documents whose images follow `rules`; None: without images."""
    from lean_ft.data.images import ImageKind

    return () if rules is None else (ImageKind(rules),)
