"""Sums of a step's token metrics, which stay on the device until they are logged."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lean_ft.losses.by_source import BatchT, SourceMeans, WatchedPasses
from lean_ft.system.shards import ALONE, Ranks

if TYPE_CHECKING:
    from lean_ft.losses.linear_cross_entropy import TokenPasses


class TokenStatistics:
    """Adds up sums over the micro-batches of a step; `means` divides them by the targets. Nothing waits for the device.

    With `ranks`, means are over the micro-batches of all ranks; each rank must add the same names.

    In an evaluation, loop over `following(batches)`. If the held-out rows have several sources, `means` then also has
    the means of each, of the losses of tokens and of what `add_rows` and `by_source` get."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._sums: dict[str, list[Tensor]] = {}
        self._of_sources = SourceMeans(ranks)

    def following(self, batches: Iterable[BatchT]) -> Iterator[BatchT]:
        """Yield the held-out batches of an evaluation, in host memory."""
        return self._of_sources.following(batches)

    def add(self, **sums: Tensor) -> None:
        """Add scalars by name, each a sum over target tokens, such as `loss` or `entropy` in nats."""
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value.detach())

    def add_rows(self, **values: Tensor) -> None:
        """Add values of a held-out batch's rows, (P,) each: their sums, and the means of their sources."""
        self.add(**{name: column.sum() for name, column in values.items()})
        self.by_source(**values)

    def by_source(self, **values: Tensor) -> None:
        """Add values of a held-out batch's rows, (P,) each, only to the means of their sources."""
        self._of_sources.add_rows(**values)

    def watched(self, passes: "TokenPasses") -> "TokenPasses":
        """Return passes that add the losses of a held-out batch's tokens to the means of their sources; in training
        and with one source, the passes themselves."""
        return passes if self._of_sources.sources is None else WatchedPasses(passes, self._of_sources)

    def means(self, num_targets: int, prefix: str = "") -> dict[str, Tensor]:
        """Each sum divided by the step's targets, a scalar; `prefix` is put before the names."""
        return self._whole_means(num_targets, prefix) | self.source_means(prefix)

    def source_means(self, prefix: str = "") -> dict[str, Tensor]:
        """The means of single sources, as `loss/chats`, scalars; empty without several sources."""
        return self._of_sources.means(prefix)

    def _whole_means(self, num_targets: int, prefix: str = "") -> dict[str, Tensor]:
        if not self._sums:
            return {}
        sums = self._ranks.sum(torch.stack([torch.stack(terms).sum() for terms in self._sums.values()]))
        return {prefix + name: total / num_targets for name, total in zip(self._sums, sums, strict=True)}
