"""The cache for generation: keys and values of attention layers, and the states and last inputs of other mixers.

Memory is allocated once. Rows of a batch may have different lengths. Position p of a row is at index p of its cache, so
later tokens overwrite a row's padding, and a query at position p sees the indices up to p. A row can be copied to
several rows that continue it, and rows that have ended are dropped.

Shapes: B batch, T new tokens, C capacity, K key-value heads, D features of a head.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lean_ft.models.config import DecoderConfig, MixerConfig

_EXPERTS = -1  # the place of the recorded experts among the layers' keys


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

    def state_of(self, x: Tensor) -> Tensor:
        """The states of the rows of x (B, ...)."""
        assert self.state is not None
        return self.state[: len(x)]

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
        records_experts: bool = False,
    ) -> None:
        """num_head_parts: the number of ranks over which heads are sharded. records_experts: keep the experts of each
        token."""
        self._sources = [
            i if layer.kv_from_layer is None else layer.kv_from_layer for i, layer in enumerate(config.layers)
        ]
        # Per attention layer with its own keys: keys and values, (rows, C, K, D). Zeros rather than uninitialized
        # memory: a masked NaN times a zero weight is NaN.
        self.keys: dict[int, tuple[Tensor, ...]] = {
            i: tuple(
                torch.zeros(batch_size, capacity, heads // num_head_parts, features, dtype=dtype, device=device)
                for heads, features in shapes
            )
            for i in range(config.num_layers)
            if (shapes := config.cached_shapes(i))
        }
        if records_experts and config.mixture is not None:  # moves with the rows, as the keys do
            shape = batch_size, capacity, sum(config.choices_of_mixtures)
            self.keys[_EXPERTS] = (torch.zeros(shape, dtype=torch.int16, device=device),)
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
        # (B,): what the rotary position of a row's next token adds to its index, behind images; None: nothing.
        self.shifts: Tensor | None = None
        self.next_lengths = self.lengths  # (B,), including the tokens of the current pass
        self.new_lengths: Tensor | None = None  # (B,) new tokens that are not padding; None if there is no padding
        self.positions = self.rows = torch.empty(0, device=device)  # (B, T) and (B, 1), where new tokens are stored
        # On CUDA, of one new token in rows of different lengths: the rows' starts among all tokens (B + 1,) and among
        # all positions of the cache (B + 1,), and their lengths (B,), int32.
        self.of_kernel: tuple[Tensor, Tensor, Tensor] | None = None
        self._visible: dict[tuple[int | None, int | None, bool], Tensor | None] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._key_tensors(), *self._state_tensors()))

    @property
    def experts(self) -> Tensor | None:
        """The experts that each token chose, counted from 1, (B, C, choices of all layers); None if they are not
        recorded."""
        return self.keys[_EXPERTS][0] if _EXPERTS in self.keys else None

    def layer(self, i: int) -> tuple[LayerCache | None, StateCache | None]:
        """Layer i's caches. They are made anew for each pass; stored, they would form a reference cycle that keeps the
        memory until a garbage collection."""
        state = StateCache(*self.states[i], self) if i in self.states else None
        kept = self.keys.get(self._sources[i])
        return None if kept is None else LayerCache(kept[0], kept[-1], self), state

    def begin(self, num_tokens: int, lengths: Tensor | None = None, shifts: Tensor | None = None) -> Tensor:
        """Make room for `num_tokens` more tokens in every row, and return their rotary positions (B, T).

        lengths (B,): how many of them are not padding. shifts (B, T): what each token's rotary position adds to its
        index; later tokens continue with the last token's. Raises ValueError if they do not fit.
        """
        self.starts_empty = self.filled == 0
        if self.filled + num_tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions; {self.filled} are used and {num_tokens} more do not fit. "
                "Create it with a larger capacity."
            )
        self.filled += num_tokens
        self.shortest += num_tokens if lengths is None else 0
        self.is_even = self.shortest == self.filled
        new = torch.arange(num_tokens, device=self.lengths.device)
        self.positions = self.lengths[:, None] + new
        self.rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        self.new_lengths = lengths
        self.next_lengths = self.lengths + (num_tokens if lengths is None else lengths)
        self.of_kernel = None
        if num_tokens == 1 and not self.is_even and self.lengths.is_cuda:
            starts = torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=self.lengths.device)
            self.of_kernel = starts, starts * self.capacity, self.next_lengths.int()
        self._visible.clear()
        if shifts is not None:
            last = self.next_lengths - self.lengths - 1
            self.shifts = shifts.gather(1, last.clamp(min=0)[:, None])[:, 0]
        elif self.shifts is not None:
            shifts = self.shifts[:, None]
        return self.positions if shifts is None else self.positions + shifts

    def visible(self, window: int | None, chunk: int | None = None, ends: Tensor | None = None) -> Tensor | None:
        """Which indices each new token sees, (B, T, filled), given a window or chunk; None if one new token per row
        sees all.

        ends: (B * T,), the new token before which each one's keys end, if some see later tokens.
        """
        key = window, chunk, ends is not None
        if key not in self._visible:
            self._visible[key] = self._mask(window, chunk, ends)
        return self._visible[key]

    def _mask(self, window: int | None, chunk: int | None, ends: Tensor | None) -> Tensor | None:
        sees_all = all(most is None or self.filled <= most for most in (window, chunk))
        if self.is_even and self.positions.shape[1] == 1 and sees_all:
            return None
        indices = torch.arange(self.filled, device=self.lengths.device)
        positions = self.positions[..., None]
        last = positions
        if ends is not None:
            last = positions + (ends - torch.arange(1, len(ends) + 1, device=ends.device)).view(positions.shape)
        seen = indices <= last
        if chunk is not None:
            seen &= indices >= positions - positions % chunk
        return seen if window is None else seen & (indices > positions - window)

    def advance(self, chosen: Sequence[Tensor] = ()) -> None:
        """Add the tokens of the current pass to the rows' lengths. chosen: their experts in each mixture, (B * T, K)
        each, if they are recorded."""
        if chosen and self.experts is not None:
            choices = (torch.cat(list(chosen), -1) + 1).short().view(*self.positions.shape, -1)
            LayerCache(self.experts, self.experts, self).store(choices, choices)
        self.lengths = self.next_lengths

    def part(self, start: int, end: int) -> "KVCache":
        """Return an empty cache for rows `start` to `end` in this cache's memory. The rows' old contents are lost."""
        part = copy(self)
        part.keys = {i: tuple(x[start:end] for x in kept) for i, kept in self.keys.items()}
        part.states = {i: (x[start:end], None if y is None else y[start:end]) for i, (x, y) in self.states.items()}
        part._empty(min(end, self.num_rows) - start, self.lengths.device)
        for tensor in part._state_tensors():
            tensor.zero_()
        return part

    def copy_of(self, row: int, length: int) -> "KVCache":
        """Return a copy of a row with its first `length` tokens. A recurrent state must be that after these tokens."""
        kept = copy(self)
        kept.keys = {i: tuple(x[row : row + 1, :length].clone() for x in own) for i, own in self.keys.items()}
        kept.states = {
            i: (x[row : row + 1].clone(), None if y is None else y[row : row + 1].clone())
            for i, (x, y) in self.states.items()
        }
        kept._empty(1, self.lengths.device)
        kept._fill([length], None if self.shifts is None else self.shifts[row : row + 1].clone())
        return kept

    def put(self, copies: Sequence["KVCache"]) -> None:
        """Fill this empty cache with copies of rows."""
        for row, kept in enumerate(copies):
            for to, source in zip(self._key_tensors(), kept._key_tensors(), strict=True):
                to[row, : kept.filled] = source[0]
            for to, source in zip(self._state_tensors(), kept._state_tensors(), strict=True):
                to[row] = source[0]
        self._fill([kept.filled for kept in copies], _shifts(copies, slice(None)))

    def _fill(self, lengths: Sequence[int], shifts: Tensor | None) -> None:
        self.filled, self.shortest, self.shifts = max(lengths), min(lengths), shifts
        self.lengths = self.next_lengths = on_device(lengths, self.lengths.device)

    def spread(self, parts: Sequence["KVCache"], counts: Sequence[int]) -> Tensor:
        """Copy row i of the first rows, which `parts` filled, to `counts[i]` consecutive rows, and keep sum(counts)
        rows. Return each row's source, (sum(counts),)."""
        num_rows = sum(counts)
        assert num_rows <= self.num_rows, "too many rows"
        self.filled, self.shortest = max(p.filled for p in parts), min(p.shortest for p in parts)
        sources = on_device([row for row, count in enumerate(counts) for _ in range(count)], self.lengths.device)
        if num_rows > len(counts):
            for tensor in self._key_tensors():
                tensor[:num_rows, : self.filled] = tensor[sources, : self.filled]
            for tensor in self._state_tensors():
                tensor[:num_rows] = tensor[sources]
        self.lengths = self.next_lengths = torch.cat([part.lengths for part in parts])[sources]
        self.shifts = _shifts(parts, sources)
        return sources

    def join(self, part: "KVCache") -> None:
        """Add the rows of a part that begins after this cache's last row."""
        self.shortest = min(self.shortest, part.shortest) if self.filled else part.shortest
        self.filled = max(self.filled, part.filled)
        self.shifts = _shifts((self, part), slice(None))
        self.lengths = self.next_lengths = torch.cat((self.lengths, part.lengths))

    def keep(self, rows: Sequence[int]) -> tuple[list[int], Tensor]:
        """Drop all rows but these, and return the former index of each remaining row, as a list and as a tensor. Moves
        at most as many rows as it drops."""
        kept = set(rows)
        from_behind = iter([row for row in rows if row >= len(rows)])
        order = [row if row in kept else next(from_behind) for row in range(len(rows))]
        moved = [row for row in range(len(rows)) if order[row] != row]
        sources = [order[row] for row in moved]
        places = on_device([*order, *moved, *sources], self.lengths.device)
        remaining, to, source = places.split((len(order), len(moved), len(moved)))
        if moved:
            for tensor in self._key_tensors():
                tensor[to, : self.filled] = tensor[source, : self.filled]
            for tensor in self._state_tensors():
                tensor[to] = tensor[source]
        self.lengths = self.next_lengths = self.lengths[remaining]
        self.shifts = None if self.shifts is None else self.shifts[remaining]
        return order, remaining

    def _key_tensors(self) -> list[Tensor]:
        return [tensor for kept in self.keys.values() for tensor in kept]

    def _state_tensors(self) -> list[Tensor]:
        return [tensor for kept in self.states.values() for tensor in kept if tensor is not None]


def _shifts(parts: Sequence[KVCache], rows: Tensor | slice) -> Tensor | None:
    """The shifts of some rows of several caches."""
    if all(part.shifts is None for part in parts):
        return None
    return torch.cat([torch.zeros_like(part.lengths) if part.shifts is None else part.shifts for part in parts])[rows]


def in_pinned_memory(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A CPU tensor of numbers that a GPU can copy without making the host wait."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of numbers, without waiting for a GPU."""
    return in_pinned_memory(values, device, dtype).to(device, non_blocking=device.type == "cuda")


def _state(mixer: MixerConfig, num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    inputs = torch.zeros(num_rows, mixer.num_taps - 1, mixer.num_channels, dtype=dtype, device=device)
    if mixer.state_shape is None:
        return inputs, None
    return inputs, torch.zeros(num_rows, *mixer.state_shape, dtype=torch.float32, device=device)
