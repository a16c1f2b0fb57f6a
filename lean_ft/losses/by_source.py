"""Means of an evaluation for each source of the held-out rows.

Each value of a row or of a target token is added to its source's sum, in float64, so the means do not depend on how
rows are divided into batches and processes, beyond the rounding of the values themselves. Losses of tokens are taken
from each chunk of logits while it exists (`WatchedPasses`): there is no further pass, and no tensor for all tokens.
Without several sources, nothing is computed. Nothing waits for the device before `means`.

Shapes: S sources, P rows of a batch, N its target tokens, C tokens of a chunk.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from lean_ft.losses.chunked_softmax import LOSS
from lean_ft.system.shards import Ranks

if TYPE_CHECKING:
    from lean_ft.data import Batch
    from lean_ft.data.by_source import BatchSources
    from lean_ft.losses.linear_cross_entropy import TokenPasses

BatchT = TypeVar("BatchT", bound="Batch")


class SourceMeans:
    """Sums of values and their numbers, by name and source."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums: dict[str, Tensor] = {}  # (2, S) each: sums, and numbers of values
        self._batch: Batch | None = None  # whose values are added now
        self._of_tokens: np.ndarray | None = None  # (N,) source of each target token of the batch
        self._names: tuple[str, ...] = ()

    def following(self, batches: Iterable[BatchT]) -> Iterator[BatchT]:
        """Yield batches, in host memory. Values belong to the batch that was yielded last."""
        for batch in batches:
            self._batch, self._of_tokens = batch, None
            self._names = self._names if batch.sources is None else batch.sources.names
            yield batch
        self._batch = None

    @property
    def sources(self) -> "BatchSources | None":
        """Of the batch whose values are added now, if its rows have several."""
        return None if self._batch is None else self._batch.sources

    @torch.no_grad()
    def add(self, sources: np.ndarray, **values: Tensor) -> None:
        """Add values (P,) by name; sources: (P,), -1 for a value that belongs to none. Without several sources, add
        nothing."""
        if self.sources is None:
            return
        number = len(self.sources.names)
        for name, column in values.items():
            assert len(column) == len(sources), (name, len(column), len(sources))
            wide = torch.float32 if column.device.type == "mps" else torch.float64
            if name not in self._sums:
                self._sums[name] = torch.zeros(2, number, dtype=wide, device=column.device)
            numbers = torch.from_numpy(sources).to(column.device)
            for source in np.unique(sources[sources >= 0]).tolist():  # sums of equal order on every start
                self._sums[name][0, source] += torch.where(numbers == source, column.to(wide), 0.0).sum()
            counts = np.bincount(sources[sources >= 0], minlength=number)
            self._sums[name][1] += torch.from_numpy(counts).to(column.device)

    def add_rows(self, **values: Tensor) -> None:
        """Add values (P,) of the batch's rows."""
        if self.sources is not None:
            self.add(self.sources.of_rows, **values)

    def add_pairs(self, are_compared: Tensor, **values: Tensor) -> None:
        """Add values (P, P) of pairs of the batch's rows that are compared and come from one source."""
        if self.sources is not None:
            rows = self.sources.of_rows
            is_one = are_compared.cpu().numpy() & (rows[:, None] == rows)
            of_pairs = np.where(is_one, rows[:, None], -1).ravel()
            self.add(of_pairs, **{name: matrix.flatten() for name, matrix in values.items()})

    def add_tokens(self, chunk: slice, **values: Tensor) -> None:
        """Add values (C,) of a chunk of the batch's target tokens."""
        if self._of_tokens is None:
            assert self.sources is not None
            positions = self.sources.of_positions
            self._of_tokens = positions[positions >= 0]
        self.add(self._of_tokens[chunk], **values)

    def means(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the mean over each source's values, as `loss/chats`, scalars; `prefix` is put before the names. A
        source without values is left out. Every rank calls it."""
        if not self._sums:
            return {}
        sums = self._ranks.sum(torch.stack([*self._sums.values()]))  # (names, 2, S)
        return {
            f"{prefix}{name}/{source}": totals[0, i] / totals[1, i]
            for name, totals, counts in zip(self._sums, sums, sums[:, 1].tolist(), strict=True)
            for i, source in enumerate(self._names)
            if counts[i]
        }


class WatchedPasses:
    """The passes over chunks of logits, of which each adds its tokens' losses to the means of sources."""

    def __init__(self, passes: "TokenPasses", means: SourceMeans) -> None:
        self._passes, self._means = passes, means
        self.chunks, self.gradient_of_hidden = passes.chunks, passes.gradient_of_hidden

    def work(self, chunk: slice, logits: Tensor, labels: Tensor, rows: Tensor) -> None:
        self._passes.work(chunk, logits, labels, rows)
        self._means.add_tokens(chunk, loss=rows[:, LOSS])
