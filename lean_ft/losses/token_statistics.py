"""What a step's predictions were like, as sums that stay on the device until a line is written."""

import torch
from torch import Tensor


class TokenStatistics:
    """Adds up over the micro-batches of a step; `means` divides by the targets, and nothing here waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.num_right = torch.zeros((), device=device)
        self.entropy = torch.zeros((), device=device)

    def add(self, *, num_right: Tensor, entropy: Tensor) -> None:
        """Adds sums over target tokens: how many had the label's logit highest, and the entropies in nats."""
        self.num_right += num_right
        self.entropy += entropy

    def means(self, num_targets: int, prefix: str = "") -> dict[str, Tensor]:
        """`token_accuracy` and `entropy`, each a float32 scalar: means over the targets; `prefix` goes before names."""
        sums = {"token_accuracy": self.num_right, "entropy": self.entropy}
        return {prefix + name: total / num_targets for name, total in sums.items()}
