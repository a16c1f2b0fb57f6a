"""The cache of generation: of attention keys and values of all positions so far, in memory taken once, of other mixers their
state and the last inputs of their convolution.

Rows of a batch may have different lengths. Position p of a row lies at index p of its cache, so a row's padding is
overwritten by the tokens that follow it, and a query at position p sees exactly the indices up to p. A row can be filled
once and spread to several that go on from it, and rows that have ended leave.

Shapes: B batch, T new tokens, C capacity, K key-value heads, D features of a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lean_ft.models.config import DecoderConfig, MixerConfig


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values; of latents both are the same."""

    keys: Tensor  # (B, C, K, D)
    values: Tensor
    owner: "KVCache"

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value (B, T, K, D) at their positions; returns all that is filled, (B, filled, K, D) each."""
        filled, rows = self.owner.filled, len(key)
        if self.owner.is_even:
            new = slice(filled - key.shape[1], filled)
            self.keys[:rows, new], self.values[:rows, new] = key, value
        else:
            places = self.owner.rows, self.owner.positions
            self.keys[places], self.values[places] = key, value
        return self.filled(rows)

    def filled(self, rows: int) -> tuple[Tensor, Tensor]:
        """All that is filled of the first rows, (B, filled, K, D) each."""
        return self.keys[:rows, : self.owner.filled], self.values[:rows, : self.owner.filled]


@dataclass(frozen=True)
class StateCache:
    """What a layer that is no attention keeps of each row; rows beyond those of a pass are let go of."""

    inputs: Tensor  # (B, taps - 1, channels): the convolution's last ones
    state: Tensor | None  # (B, heads, key features, value features) in float32
    owner: "KVCache"

    def behind_inputs(self, x: Tensor) -> Tensor:
        """Returns the last inputs and x (B, T, channels) behind them, and keeps the last of these that are no padding."""
        x = torch.cat((self.inputs[: len(x)], x), 1)
        num_kept, lengths = self.inputs.shape[1], self.owner.new_lengths
        if lengths is None:
            last = x[:, x.shape[1] - num_kept :]
        else:
            last = x[self.owner.rows, lengths[:, None] + torch.arange(num_kept, device=x.device)]
        self.inputs[: len(x)] = last
        return x

    def is_padding(self, num_tokens: int) -> Tensor | None:
        """Which of the new tokens are padding, (B, T); None where none is."""
        lengths = self.owner.new_lengths
        return None if lengths is None else torch.arange(num_tokens, device=lengths.device) >= lengths[:, None]


class KVCache:
    """The layers' caches and how far each row is filled.

    Takes 2 * B * C * K * D elements a layer of attention with keys of its own, and what the other mixers keep. `begin` and
    `advance` frame each forward pass; Decoder calls both.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        num_head_parts: int = 1,
    ) -> None:
        """num_head_parts: into which heads are cut over ranks; one of them is kept here."""
        self._sources = [i if layer.keys_of is None else layer.keys_of for i, layer in enumerate(config.layers)]
        # Zeros, not whatever memory holds: a masked NaN would still poison the product with its zero weight.
        keys: dict[int, tuple[Tensor, ...]] = {
            i: tuple(
                torch.zeros(batch_size, capacity, heads // num_head_parts, features, dtype=dtype, device=device)
                for heads, features in shapes
            )
            for i in range(config.num_layers)
            if (shapes := config.cached_shapes(i))
        }
        states = {
            i: _state(layer.mixer, batch_size, dtype, device) for i, layer in enumerate(config.layers) if layer.mixer
        }
        self._take(keys, states, capacity, batch_size, device)

    def _take(
        self,
        keys: dict[int, tuple[Tensor, ...]],
        states: dict[int, tuple[Tensor, Tensor | None]],
        capacity: int,
        num_rows: int,
        device: torch.device,
    ) -> None:
        self.keys = keys  # of each layer of attention with keys of its own: keys and values, (rows, C, K, D)
        self.states = states  # of the other mixers: the last inputs, and the state
        self.capacity, self.num_rows = capacity, num_rows
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)  # (B,)
        self.filled = 0  # at least every row's length, and `shortest` at most; known without asking the device
        self.shortest = 0
        # Whether all rows have come as far; decided once, as compiled code takes both for unknown numbers.
        self.is_even = True
        self.starts_empty = True
        self.next_lengths = self.lengths  # (B,) with the tokens that `begin` made room for
        self.new_lengths: Tensor | None = None  # (B,) how many of those are no padding, where some are
        self.positions = self.rows = torch.empty(0, device=device)  # (B, T) and (B, 1) of what is stored
        self._visible: dict[tuple[int | None, int | None], Tensor | None] = {}

    def layer(self, i: int) -> tuple[LayerCache | None, StateCache | None]:
        """Layer i's. Made for each pass: kept here it would keep this cache too, and its memory until a collection of
        garbage."""
        state = StateCache(*self.states[i], self) if i in self.states else None
        kept = self.keys.get(self._sources[i])
        return None if kept is None else LayerCache(kept[0], kept[-1], self), state

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
        """Which of the filled indices each new token sees, (B, T, filled): those up to its own, `window` of them, or those in
        its own `chunk`.

        None where each row has one new token, and that sees all.
        """
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
        """Counts as filled what `begin` made room for."""
        self.lengths = self.next_lengths

    def part(self, start: int, end: int) -> "KVCache":
        """An empty cache in the memory of some of the rows of this one, to be filled for them."""
        part = KVCache.__new__(KVCache)
        part._sources = self._sources
        keys = {i: tuple(x[start:end] for x in kept) for i, kept in self.keys.items()}
        states = {i: (x[start:end], None if y is None else y[start:end]) for i, (x, y) in self.states.items()}
        part._take(keys, states, self.capacity, min(end, self.num_rows) - start, self.lengths.device)
        return part

    def spread(self, parts: Sequence["KVCache"], counts: Sequence[int]) -> None:
        """Row i of those that `parts` filled, which lie at the beginning, becomes `counts[i]` rows one behind the other, and
        the cache has as many rows as that."""
        assert sum(counts) <= self.num_rows, "more rows than there are"
        self.filled, self.shortest = max(p.filled for p in parts), min(p.shortest for p in parts)
        ends = list(accumulate(counts))
        for row in reversed(range(len(counts))):  # from behind, so that no row is written before it was read
            if (start := ends[row] - counts[row]) != row or counts[row] > 1:
                for tensor in self._key_tensors():
                    tensor[start : ends[row], : self.filled] = tensor[row : row + 1, : self.filled].clone()
                for tensor in self._state_tensors():
                    tensor[start : ends[row]] = tensor[row : row + 1].clone()
        repeats = torch.tensor(counts, device=self.lengths.device)
        lengths = torch.cat([part.lengths for part in parts])
        self.lengths = self.next_lengths = lengths.repeat_interleave(repeats, output_size=sum(counts))

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Lets go of all rows but these; returns which row each of those that are left was. Moves no more rows than it
        lets go of."""
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


def cache_bytes(config: DecoderConfig, batch_size: int, capacity: int, itemsize: int, num_head_parts: int = 1) -> int:
    """What a cache takes."""
    total = 0
    for i, layer in enumerate(config.layers):
        shapes = config.cached_shapes(i)
        total += capacity * itemsize * sum(heads // num_head_parts * features for heads, features in shapes)
        if layer.mixer is not None:
            total += (layer.mixer.num_taps - 1) * layer.mixer.num_channels * itemsize
            total += 4 * math.prod(layer.mixer.state_shape or (0,))
    return batch_size * total
