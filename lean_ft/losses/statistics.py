"""What a step's predictions were like, as sums that stay on the device until a line is written."""

import torch
from torch import Tensor

from lean_ft.system.shards import ALONE, Ranks


class TokenStatistics:
    """Adds up over the micro-batches of a step; `means` divides by the targets, and nothing here waits for the device.

    With `ranks` the means are over the micro-batches of all of them, each of which adds the same names."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, **sums: Tensor) -> None:
        """Adds scalars by name, each a sum over target tokens: `loss`, the entropies in nats and the like."""
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value.detach())

    def means(self, num_targets: int, prefix: str = "") -> dict[str, Tensor]:
        """Each sum over the step's targets, a scalar; `prefix` goes before names. What was never added is not there."""
        if not self._sums:
            return {}
        sums = self._ranks.sum(torch.stack([torch.stack(terms).sum() for terms in self._sums.values()]))
        return {prefix + name: total / num_targets for name, total in zip(self._sums, sums, strict=True)}
