"""The source of each held-out row, for means per source.

Stored documents are in the order of their sources, so the bounds of the sources say where each document and each token
comes from: a column that takes no memory and changes no key of the cache. It knows stored documents by their number,
so that any selection of them, and any packing, keeps its sources. Training batches do not have it.

Legend: S sources, N documents, B rows of a batch, T positions of a row, P rows of data in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from lean_ft.settings import Sources
from lean_ft.settings.source_names import source_names

if TYPE_CHECKING:
    from lean_ft.data.batch import Batch
    from lean_ft.data.batches import ArrangedDocuments
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns

NO_LABEL = -1


def means_by_source(name: str, sources: Sequence[str | None], values: Sequence[float | None]) -> dict[str, float]:
    """Return the mean of the values of each source that has any, as `name/chats`; sources: of the values, or None
    where there are not several."""
    by_source = dict[str, list[float]]()
    for source, value in zip(sources, values, strict=True):
        if source is not None and value is not None:
            by_source.setdefault(source, []).append(value)
    return {f"{name}/{source}": sum(some) / len(some) for source, some in by_source.items()}


@dataclass(frozen=True)
class BatchSources:
    """Where the rows and labels of a held-out batch come from, in host memory: numbers of `names`."""

    names: tuple[str, ...]
    of_rows: np.ndarray  # (P,): of what the loss counts, such as pairs, or labeled tokens
    of_positions: np.ndarray  # (B, T): of the labels; -1 without one

    def part_of_positions(self, own: Callable[[np.ndarray], np.ndarray]) -> Self:
        """Return a part of the positions of each row; own: takes it."""
        return replace(self, of_positions=own(self.of_positions))

    def without_targets(self) -> Self:
        nothing = np.full_like(self.of_positions, NO_LABEL)
        return replace(self, of_rows=self.of_rows[:0], of_positions=nothing)


@dataclass(frozen=True)
class SourceColumn:
    """The sources of stored documents. Sources with equal names are one."""

    names: tuple[str, ...]
    numbers: np.ndarray  # (S,) number of each source's name
    ends: np.ndarray  # (S,) stored documents up to the end of each source

    @classmethod
    def of(cls, sources: Sources, kept_by_source: Sequence[int], sides: int) -> Self | None:
        """Return the column of documents that were read from `sources`; None if they have one name.

        kept_by_source: rows of each source; it may end before sources without rows. sides: documents of a row.
        """
        given = source_names(sources)
        names = tuple(dict.fromkeys(given))
        if len(names) < 2:
            return None
        kept = np.zeros(len(given), dtype=np.int64)
        kept[: len(kept_by_source)] = kept_by_source
        numbers = np.array([names.index(name) for name in given], dtype=np.int32)
        return cls(names, numbers, np.cumsum(kept) * sides)

    def of_documents(self, columns: Columns, documents: np.ndarray | None = None) -> np.ndarray:
        """(N,) source of the documents of columns, or of some of them."""
        rows = columns.rows if documents is None else columns.rows[documents]
        return self.numbers[np.searchsorted(self.ends, rows, side="right")]

    def of_tokens(self, columns: Columns, index: np.ndarray) -> np.ndarray:
        """The source of tokens, by their index in the per-token columns."""
        return self.numbers[np.searchsorted(columns.offsets["ids"][self.ends], index, side="right")]

    def num_rows(self, columns: Columns, sides: int) -> dict[str, int]:
        """Return the number of rows of each source, by name; sides: documents of a row."""
        counts = np.bincount(self.of_documents(columns), minlength=len(self.names)) // sides
        return dict(zip(self.names, counts.tolist(), strict=True))


def with_sources(batch: Batch, layout: ArrangedDocuments, placed: Placed) -> Batch:
    """Return the batch with the source of each row and label, if its documents have several sources."""
    columns = layout.columns
    if columns.sources is None:
        return batch
    is_own = placed.is_own[placed.is_target]  # the last position of a shared prompt has the label of one text
    of_labels = columns.sources.of_tokens(columns, placed.label_index)[is_own]
    of_positions = placed.filled(placed.index[is_own], of_labels, NO_LABEL, np.int32)
    counted = layout.objective.counted_documents(placed)
    of_rows = columns.sources.of_documents(columns, counted)
    return replace(batch, sources=BatchSources(columns.sources.names, of_rows, of_positions))
