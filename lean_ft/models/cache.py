"""The cache for generation: keys and values of attention layers, and the states and last inputs of other mixers.

Memory is allocated once. Rows of a batch may have different lengths. Position p of a row is at index p of its cache, so later
tokens overwrite a row's padding, and a query at position p sees the indices up to p. A row can be copied to several rows that
continue it, and rows that have ended are dropped.

Shapes: B batch, T new tokens, C capacity, K key-value heads, D features of a head.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lean_ft.models.config import DecoderConfig, MixerConfig


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values; both are the same tensor for latents."""

    keys: Tensor  # (B, C, K, D)
    values: Tensor
    owner: "KVCache"

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value (B, T, K, D); return all keys and values so far, (B, filled, K, D) each."""
        filled, rows = self.owner.filled, len(key)
        if self.owner.is_even:
            new = slice(filled - key.shape[1], filled)
            self.keys[:rows, new], self.values[:rows, new] = key, value
        else:
            places = self.owner.rows, self.owner.positions
            self.keys[places], self.values[places] = key, value
        return self.filled(rows)

    def filled(self, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows so far, (B, filled, K, D) each."""
        return self.keys[:rows, : self.owner.filled], self.values[:rows, : self.owner.filled]


@dataclass(frozen=True)
class StateCache:
    """One recurrent or convolution layer's state per row."""

    inputs: Tensor  # (B, taps - 1, channels): the last inputs of the convolution
    state: Tensor | None  # (B, heads, key features, value features) in float32
    owner: "KVCache"

    def behind_inputs(self, x: Tensor) -> Tensor:
        """Return x (B, T, channels) after the last inputs, and store its last inputs that are not padding."""
        x = torch.cat((self.inputs[: len(x)], x), 1)
        num_kept, lengths = self.inputs.shape[1], self.owner.new_lengths
        if lengths is None:
            last = x[:, x.shape[1] - num_kept :]
        else:
            last = x[self.owner.rows, lengths[:, None] + torch.arange(num_kept, device=x.device)]
        self.inputs[: len(x)] = last
        return x

    def is_padding(self, num_tokens: int) -> Tensor | None:
        """Which of the new tokens are padding, (B, T); None if there is no padding."""
        lengths = self.owner.new_lengths
        return None if lengths is None else torch.arange(num_tokens, device=lengths.device) >= lengths[:, None]


class KVCache:
    """The caches of all layers, and each row's length. Decoder calls `begin` and `advance` around each forward pass."""

    def __init__(
        self,
        config: DecoderConfig,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        num_head_parts: int = 1,
    ) -> None:
        """num_head_parts: the number of ranks over which heads are sharded."""
        self._sources = [
            i if layer.kv_from_layer is None else layer.kv_from_layer for i, layer in enumerate(config.layers)
        ]
        # Per attention layer with its own keys: keys and values, (rows, C, K, D). Zeros rather than uninitialized memory: a
        # masked NaN times a zero weight is NaN.
        self.keys: dict[int, tuple[Tensor, ...]] = {
            i: tuple(
                torch.zeros(batch_size, capacity, heads // num_head_parts, features, dtype=dtype, device=device)
                for heads, features in shapes
            )
            for i in range(config.num_layers)
            if (shapes := config.cached_shapes(i))
        }
        # Per recurrent layer: the last inputs and the state.
        self.states = {
            i: _state(layer.mixer, batch_size, dtype, device) for i, layer in enumerate(config.layers) if layer.mixer
        }
        self.capacity = capacity
        self._empty(batch_size, device)

    def _empty(self, num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)  # (B,)
        # Upper and lower bounds of the rows' lengths, on the host.
        self.filled = self.shortest = 0
        # Whether all rows have the same length. Stored, because compiled code treats the bounds as unknown numbers.
        self.is_even = True
        self.starts_empty = True
        self.next_lengths = self.lengths  # (B,), including the tokens of the current pass
        self.new_lengths: Tensor | None = None  # (B,) new tokens that are not padding; None if there is no padding
        self.positions = self.rows = torch.empty(0, device=device)  # (B, T) and (B, 1), where new tokens are stored
        self._visible: dict[tuple[int | None, int | None], Tensor | None] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._key_tensors(), *self._state_tensors()))

    def layer(self, i: int) -> tuple[LayerCache | None, StateCache | None]:
        """Layer i's caches. They are made anew for each pass; stored, they would form a reference cycle that keeps the memory
        until a garbage collection."""
        state = StateCache(*self.states[i], self) if i in self.states else None
        kept = self.keys.get(self._sources[i])
        return None if kept is None else LayerCache(kept[0], kept[-1], self), state

    def begin(self, num_tokens: int, lengths: Tensor | None = None) -> Tensor:
        """Make room for `num_tokens` more tokens in every row, and return their positions (B, T).

        lengths (B,): how many of them are not padding. Raises ValueError if they do not fit.
        """
        self.starts_empty = self.filled == 0
        if self.filled + num_tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions; {self.filled} are used and {num_tokens} more do not fit. Create "
                "it with a larger capacity."
            )
        self.filled += num_tokens
        self.shortest += num_tokens if lengths is None else 0
        self.is_even = self.shortest == self.filled
        new = torch.arange(num_tokens, device=self.lengths.device)
        self.positions = self.lengths[:, None] + new
        self.rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        self.new_lengths = lengths
        self.next_lengths = self.lengths + (num_tokens if lengths is None else lengths)
        self._visible.clear()
        return self.positions

    def visible(self, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Which indices each new token sees, (B, T, filled), given a window or chunk; None if one new token per row sees all."""
        if (window, chunk) not in self._visible:
            self._visible[window, chunk] = self._mask(window, chunk)
        return self._visible[window, chunk]

    def _mask(self, window: int | None, chunk: int | None) -> Tensor | None:
        sees_all = all(most is None or self.filled <= most for most in (window, chunk))
        if self.is_even and self.positions.shape[1] == 1 and sees_all:
            return None
        indices = torch.arange(self.filled, device=self.lengths.device)
        positions = self.positions[..., None]
        seen = indices <= positions
        if chunk is not None:
            seen &= indices >= positions - positions % chunk
        return seen if window is None else seen & (indices > positions - window)

    def advance(self) -> None:
        """Add the tokens of the current pass to the rows' lengths."""
        self.lengths = self.next_lengths

    def part(self, start: int, end: int) -> "KVCache":
        """An empty cache for rows `start` to `end`, which shares this cache's memory."""
        part = copy(self)
        part.keys = {i: tuple(x[start:end] for x in kept) for i, kept in self.keys.items()}
        part.states = {i: (x[start:end], None if y is None else y[start:end]) for i, (x, y) in self.states.items()}
        part._empty(min(end, self.num_rows) - start, self.lengths.device)
        return part

    def spread(self, parts: Sequence["KVCache"], counts: Sequence[int]) -> None:
        """Copy row i of the first rows, which `parts` filled, to `counts[i]` consecutive rows, and keep sum(counts) rows."""
        assert sum(counts) <= self.num_rows, "too many rows"
        self.filled, self.shortest = max(p.filled for p in parts), min(p.shortest for p in parts)
        ends = list(accumulate(counts))
        for row in reversed(range(len(counts))):  # so that no row is overwritten before it is read
            if (start := ends[row] - counts[row]) != row or counts[row] > 1:
                for tensor in self._key_tensors():
                    tensor[start : ends[row], : self.filled] = tensor[row : row + 1, : self.filled].clone()
                for tensor in self._state_tensors():
                    tensor[start : ends[row]] = tensor[row : row + 1].clone()
        repeats = torch.tensor(counts, device=self.lengths.device)
        lengths = torch.cat([part.lengths for part in parts])
        self.lengths = self.next_lengths = lengths.repeat_interleave(repeats, output_size=sum(counts))

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drop all rows but these, and return the former index of each remaining row. Moves at most as many rows as it drops."""
        kept = set(rows)
        from_behind = iter([row for row in rows if row >= len(rows)])
        order = [row if row in kept else next(from_behind) for row in range(len(rows))]
        moved = [row for row in range(len(rows)) if order[row] != row]
        if moved:
            sources = [order[row] for row in moved]
            for tensor in self._key_tensors():
                tensor[moved, : self.filled] = tensor[sources, : self.filled]
            for tensor in self._state_tensors():
                tensor[moved] = tensor[sources]
        self.lengths = self.next_lengths = self.lengths[order]
        return order

    def _key_tensors(self) -> list[Tensor]:
        return [tensor for kept in self.keys.values() for tensor in kept]

    def _state_tensors(self) -> list[Tensor]:
        return [tensor for kept in self.states.values() for tensor in kept if tensor is not None]


def _state(mixer: MixerConfig, num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    inputs = torch.zeros(num_rows, mixer.num_taps - 1, mixer.num_channels, dtype=dtype, device=device)
    if mixer.state_shape is None:
        return inputs, None
    return inputs, torch.zeros(num_rows, *mixer.state_shape, dtype=torch.float32, device=device)
