"""Triton kernels that decode one token of each row: a step of a convolution, a step of the state, and a gated norm.

Each reads and writes its part of the cache in place. Imported only with Triton and a GPU.

Shapes: B rows, C channels, W taps, G heads of queries and keys, H heads of values, K and V features of a head.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.models.state.decoding import Rates, Token
from lean_ft.system.triton_compiler import launch

_CHANNELS = 256  # of a program
_COLUMNS = 16  # of a state, of a program
_EPS = tl.constexpr(1e-6)


def convolve(x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The result of `convolution_step`."""
    out, num_channels = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[2]
    launch(
        _convolve,
        (len(x), triton.cdiv(num_channels, _CHANNELS)),
        *(x, inputs, weight, bias, out, x.stride(0), *inputs.stride()[:2], *weight.stride(), num_channels),
        *(weight.shape[1], activation == "silu", _CHANNELS),
    )
    return out


def step(token: Token, rates: Rates, state: Tensor, corrects: bool) -> Tensor:
    """The result of `recurrent_step`."""
    query, key, value, steps, share = token
    _, _, num_heads, value_dim = value.shape
    out, columns = torch.empty_like(value, memory_format=torch.contiguous_format), min(value_dim & -value_dim, _COLUMNS)
    strides = *query.stride()[::2], *key.stride()[::2], *value.stride()[::2], *steps.stride()[::2], *share.stride()[::2]
    launch(
        _step,
        (len(value) * num_heads, value_dim // columns),
        *(query, key, value, steps, share, *rates, state, out, *strides, num_heads, num_heads // key.shape[2]),
        *(key.shape[-1], value_dim, columns, corrects),
    )
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int, gates_first: bool
) -> Tensor:
    """The result of the operator of this name."""
    size = x.shape[-1] // num_groups
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(
        _gated_norm,
        (len(x), num_groups),
        *(x, gate, weight, out, x.stride(0), gate.stride(0), 0 if weight is None else weight.numel(), eps),
        *(size, triton.next_power_of_2(size), gates_first),
    )
    return out


# fmt: off
@triton.jit
def _convolve(
    x, inputs, weight, bias, out, x_stride, row_stride, tap_stride, channel_stride, weight_stride, num_channels,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, CHANNELS: tl.constexpr,
):
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < num_channels
    weights, last = weight + channel * channel_stride, inputs + row * row_stride + channel
    new = tl.load(x + row * x_stride + channel, mask=mask, other=0.0)
    total = new.to(tl.float32) * tl.load(weights + (TAPS - 1) * weight_stride, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        seen = tl.load(last + tap * tap_stride, mask=mask, other=0.0)
        total += seen.to(tl.float32) * tl.load(weights + tap * weight_stride, mask=mask, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(last + (tap - 1) * tap_stride, seen, mask=mask)
    if TAPS > 1:
        tl.store(last + (TAPS - 2) * tap_stride, new, mask=mask)
    if IS_SILU:
        total *= tl.sigmoid(total)
    tl.store(out + row * num_channels + channel, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    query, key, value, steps, shares, rate_log, bias, skip, lowest, highest, state, out,
    q_row, q_head, k_row, k_head, v_row, v_head, step_row, step_head, share_row, share_head, num_heads, group,
    KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr, CORRECTS: tl.constexpr,
):
    program, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, head = program // num_heads, program % num_heads
    k = tl.arange(0, KEY)
    q = tl.load(query + row * q_row + head // group * q_head + k).to(tl.float32)
    keys = tl.load(key + row * k_row + head // group * k_head + k).to(tl.float32)
    values = tl.load(value + row * v_row + head * v_head + column).to(tl.float32)
    step = tl.load(steps + row * step_row + head * step_head).to(tl.float32) + tl.load(bias + head).to(tl.float32)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))  # PyTorch's softplus
    if CORRECTS:
        q *= tl.rsqrt(tl.sum(q * q, 0) + _EPS) / tl.sqrt(KEY * 1.0)
        keys *= tl.rsqrt(tl.sum(keys * keys, 0) + _EPS)
        share = tl.sigmoid(tl.load(shares + row * share_row + head * share_head).to(tl.float32))
        share = share.to(shares.dtype.element_ty).to(tl.float32)
    else:
        step = tl.minimum(tl.maximum(step, lowest), highest)
        share = step
    decay = tl.exp(-tl.exp(tl.load(rate_log + head).to(tl.float32)) * step)
    places = state + program * KEY * VALUE + k[:, None] * VALUE + column[None, :]
    s = tl.load(places) * decay
    written = values
    if CORRECTS:
        written -= tl.sum(keys[:, None] * s, 0)
    s += keys[:, None] * (share * written)[None, :]
    tl.store(places, s)
    read = tl.sum(q[:, None] * s, 0).to(out.dtype.element_ty)
    if skip is not None:
        added = read.to(tl.float32) + values * tl.load(skip + head).to(tl.float32)
        read = added.to(out.dtype.element_ty)
    tl.store(out + program * VALUE + column, read)


@triton.jit
def _gated_norm(
    x, gate, weight, out, x_row, gate_row, num_weights, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GATES_FIRST: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = tl.arange(0, WIDTH)
    mask, place = feature < SIZE, group * SIZE + feature
    values = tl.load(x + row * x_row + place, mask=mask, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_row + place, mask=mask, other=0.0).to(tl.float32)
    opening *= tl.sigmoid(opening)
    if GATES_FIRST:
        values *= opening
    if weight is not None:
        scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        weights = tl.load(weight + place % num_weights, mask=mask, other=0.0).to(tl.float32)
        values = (values * scale * weights).to(out.dtype.element_ty).to(tl.float32)
    if not GATES_FIRST:
        values *= opening
    tl.store(out + (row * tl.num_programs(1) + group) * SIZE + feature, values.to(out.dtype.element_ty), mask=mask)
# fmt: on
