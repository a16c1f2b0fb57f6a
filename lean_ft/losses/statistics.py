"""Sums of a step's token metrics, which stay on the device until they are logged."""

import torch
from torch import Tensor

from lean_ft.system.shards import ALONE, Ranks


class TokenStatistics:
    """Adds up sums over the micro-batches of a step; `means` divides them by the targets. Nothing waits for the device.

    With `ranks`, means are over the micro-batches of all ranks; each rank must add the same names."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, **sums: Tensor) -> None:
        """Add scalars by name, each a sum over target tokens, such as `loss` or `entropy` in nats."""
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value.detach())

    def means(self, num_targets: int, prefix: str = "") -> dict[str, Tensor]:
        """Each sum divided by the step's targets, a scalar; `prefix` is put before the names."""
        if not self._sums:
            return {}
        sums = self._ranks.sum(torch.stack([torch.stack(terms).sum() for terms in self._sums.values()]))
        return {prefix + name: total / num_targets for name, total in zip(self._sums, sums, strict=True)}
