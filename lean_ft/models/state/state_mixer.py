"""Base of recurrent and convolution mixers: the call of attention, documents as one row, and the cached state.

Shapes: B rows, T tokens of a row, G heads of queries and keys, H heads of values, K and V features of a head.
"""

from typing import NamedTuple

from torch import Tensor, nn

from lean_ft.models.cache import StateCache
from lean_ft.models.layers import wide_dtype
from lean_ft.models.state.linear_attention import linear_attention


class StateMixer(nn.Module):
    """A mixer whose tokens see earlier tokens through a state or a convolution."""

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: StateCache | None = None,
        sight: None = None,
    ) -> Tensor:
        """Mix hidden states (B, T, D); returns the same shape. cos and sin are ignored."""
        assert sight is None
        x = hidden if cu_seqlens is None else hidden.flatten(0, 1)[None]  # all documents in one row
        return self.mix(x, cu_seqlens, cache).view(hidden.shape)

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, cache: StateCache | None) -> Tensor:
        """Mix x (B, T, D), or (1, N, D) with documents `cu_seqlens`; returns the same shape."""
        raise NotImplementedError


class Recurrence(NamedTuple):
    """Inputs of `linear_attention`, which describes their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor


def read_state(inputs: Recurrence, cu_seqlens: Tensor | None, cache: StateCache | None, *, corrects: bool) -> Tensor:
    """The output (B, T, H, V) of `linear_attention`, which continues and updates the cached state."""
    query, key, value, log_decay, beta = inputs
    if cache is None:
        return linear_attention(query, key, value, log_decay, beta, cu_seqlens, None, corrects)[0]
    state, is_padding = cache.state_of(value), cache.is_padding(value.shape[1])
    if is_padding is not None:  # padding neither decays the state nor writes to it
        log_decay, beta = (part.masked_fill(is_padding[..., None], 0.0) for part in (log_decay, beta))
    read, states = linear_attention(query, key, value, log_decay, beta, cu_seqlens, state, corrects)
    state.copy_(states[-1])
    return read


def log_decay_of(rate_log: Tensor, step: Tensor) -> Tensor:
    """-exp(rate_log) * step, in float32 at least: step (B, T, H), rate_log (H,)."""
    return -rate_log.to(wide_dtype(step)).exp() * step
