"""What a step's predictions were like, as sums that stay on the device until a line is written."""

import torch
from torch import Tensor


class TokenStatistics:
    """Adds up over the micro-batches of a step; `means` divides by the targets, and nothing here waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, **sums: Tensor) -> None:
        """Adds scalars by name, each a sum over target tokens: `loss`, the entropies in nats and the like."""
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value.detach())

    def means(self, num_targets: int, prefix: str = "") -> dict[str, Tensor]:
        """Each sum over the step's targets, a scalar; `prefix` goes before names. What was never added is not there."""
        return {prefix + name: torch.stack(terms).sum() / num_targets for name, terms in self._sums.items()}
