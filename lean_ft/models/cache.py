"""The key-value cache of generation: keys and values of all positions so far, in memory taken once.

Rows of a batch may have different lengths. Position p of a row lies at index p of its cache, so a row's padding is
overwritten by the tokens that follow it, and a query at position p sees exactly the indices up to p.

Shapes: B batch, T new tokens, C capacity, K key-value heads, D features of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lean_ft.models.config import DecoderConfig


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values."""

    keys: Tensor  # (B, C, K, D)
    values: Tensor
    owner: "KVCache"

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value (B, T, K, D) at their positions; returns all that is filled, (B, filled, K, D) each."""
        positions = self.owner.positions
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[rows, positions] = key
        self.values[rows, positions] = value
        return self.keys[:, : self.owner.filled], self.values[:, : self.owner.filled]


class KVCache:
    """The layers' caches and how far each row is filled.

    Takes 2 * layers * B * C * K * D elements. `begin` and `advance` frame each forward pass; Decoder calls both.
    """

    def __init__(
        self, config: DecoderConfig, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, batch_size, capacity, config.num_kv_heads, config.head_dim)
        # Zeros, not whatever memory holds: a masked NaN would still poison the product with its zero weight.
        keys = torch.zeros(shape, dtype=dtype, device=device)
        values = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [LayerCache(keys[i], values[i], self) for i in range(config.num_layers)]
        self.capacity = capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)  # (B,)
        self.filled = 0  # at least every row's length; known without asking the device
        self.starts_empty = True
        self.next_lengths = self.lengths  # (B,) with the tokens that `begin` made room for
        self.positions = torch.empty(0, device=device)

    def begin(self, num_tokens: int, lengths: Tensor | None = None) -> Tensor:
        """Makes room for `num_tokens` more in every row and returns their positions (B, T).

        lengths (B,): how many of them are no padding; where left out all. Padding is overwritten by what comes next.
        Raises ValueError where they do not fit.
        """
        self.starts_empty = self.filled == 0
        if self.filled + num_tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions; {self.filled} are taken and {num_tokens} more were given. "
                "Build it with a larger capacity."
            )
        self.filled += num_tokens
        new = torch.arange(num_tokens, device=self.lengths.device)
        self.positions = self.lengths[:, None] + new
        self.next_lengths = self.lengths + (num_tokens if lengths is None else lengths)
        return self.positions

    def visible(self, window: int | None) -> Tensor:
        """Which of the filled indices each new token sees, (B, T, filled): those up to its own, or `window` of them."""
        indices = torch.arange(self.filled, device=self.lengths.device)
        positions = self.positions[..., None]
        seen = indices <= positions
        return seen if window is None else seen & (indices > positions - window)

    def advance(self) -> None:
        """Counts as filled what `begin` made room for."""
        self.lengths = self.next_lengths
