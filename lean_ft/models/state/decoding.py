"""The next token of each row, in three launches of a recurrent layer beside its products (`decoding_kernels`).

Shapes: B rows, C channels, W taps, G heads of queries and keys, H heads of values, K and V features of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lean_ft.models.cache import StateCache
from lean_ft.models.layers import runs_triton
from lean_ft.models.state.forms import MOST_TAPS, is_a_size
from lean_ft.system.costs import register_cost


class Token(NamedTuple):
    """One token of each row: query and key (B, 1, G, K), value (B, 1, H, V), and the numbers (B, 1, H) from which its
    decay and, with corrections, the share that it writes are computed."""

    query: Tensor
    key: Tensor
    value: Tensor
    step: Tensor
    share: Tensor


class Rates(NamedTuple):
    """A layer's parameters (H,): the logarithm of the decays' rates, the bias of steps, and what of its value is added
    to a token's output, or None; and the limits of steps."""

    log: Tensor
    bias: Tensor
    skip: Tensor | None = None
    lowest: float = 0.0
    highest: float = float("inf")


def decodes(x: Tensor, cache: StateCache | None) -> bool:
    """Whether x (B, T, C) is one token of each row on a card that runs the kernels, and no gradient is needed."""
    if cache is None or x.shape[1] != 1 or cache.owner.new_lengths is not None or torch.is_grad_enabled():
        return False
    is_supported = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and cache.inputs.shape[1] < MOST_TAPS
    return is_supported and runs_triton(x) and (cache.state is None or is_a_size(cache.state.shape[2]))


@torch.library.custom_op("lean_ft::convolution_step", mutates_args=("inputs",))
def convolution_step(x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The result of `causal_convolution` for x (B, 1, C) behind the last inputs (B, W - 1, C), which it joins."""
    from lean_ft.models.state import decoding_kernels

    return decoding_kernels.convolve(x, inputs, weight, bias, activation)


def recurrent_step(token: Token, rates: Rates, state: Tensor, *, corrects: bool) -> Tensor:
    """The output (B, 1, H, V) of `linear_attention` for one token of each row; its state (B, H, K, V) becomes the
    next."""
    return _recurrent_step(*token, *rates, state, corrects)


@torch.library.custom_op("lean_ft::recurrent_step", mutates_args=("state",))
def _recurrent_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    share: Tensor,
    rate_log: Tensor,
    bias: Tensor,
    skip: Tensor | None,
    lowest: float,
    highest: float,
    state: Tensor,
    corrects: bool,
) -> Tensor:
    from lean_ft.models.state import decoding_kernels

    token, rates = Token(query, key, value, step, share), Rates(rate_log, bias, skip, lowest, highest)
    return decoding_kernels.step(token, rates, state, corrects)


@torch.library.custom_op("lean_ft::gated_norm", mutates_args=())
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int, gates_first: bool
) -> Tensor:
    """x (B, 1, D) times silu of the gate (B, 1, D), normed in groups of features after the gate or before it, with a
    weight (D,), or one that all groups share; None: not normed."""
    from lean_ft.models.state import decoding_kernels

    return decoding_kernels.gated_norm(x, gate, weight, eps, num_groups, gates_first)


@convolution_step.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_recurrent_step.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@gated_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _operator in (torch.ops.lean_ft.convolution_step, torch.ops.lean_ft.recurrent_step, torch.ops.lean_ft.gated_norm):
    register_cost(_operator)
