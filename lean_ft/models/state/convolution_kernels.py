"""Triton kernels of a short causal convolution: one for the output, one for the gradient of the input, and one for
those of weight and bias.

Sums are float32. No sum uses atomics, so equal inputs give equal bits. Imported only with Triton and a GPU.

Shapes: B rows, T tokens of a row, C channels, W taps of a channel.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_TOKENS, _CHANNELS = 64, 64  # of a program
_FEW_CHANNELS = 32  # of a program that adds over all tokens


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, activation: str | None
) -> Tensor:
    """The result of `causal_convolution`; documents (1, T) are the numbers of each token's document."""
    x, out = _readable(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    launch: Any = _convolve
    launch[_grid(x)](x, weight, bias, documents, out, *_sizes(x, weight), activation == "silu", _TOKENS, _CHANNELS)
    return out


def convolve_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias (empty without a bias) from that of the output."""
    x, grad = _readable(x), grad.contiguous()
    grad_x, grad_weight = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, weight))
    grad_bias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    inputs, sizes, is_silu = (grad, x, weight, bias, documents), _sizes(x, weight), activation == "silu"
    launch: Any = _input_backward
    launch[_grid(x)](*inputs, grad_x, *sizes, is_silu, _TOKENS, _CHANNELS)
    launch = _weight_backward
    grid = (triton.cdiv(x.shape[2], _FEW_CHANNELS),)
    launch[grid](*inputs, grad_weight, grad_bias, len(x), *sizes, is_silu, _TOKENS, _FEW_CHANNELS)
    return grad_x, grad_weight, grad_bias


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _grid(x: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[1], _TOKENS), triton.cdiv(x.shape[2], _CHANNELS), len(x)


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    return *x.stride()[:2], *weight.stride(), x.shape[1], x.shape[2], weight.shape[1]


# fmt: off
@triton.jit
def _is_same(documents, token, other, num_tokens):
    """Whether two tokens are in the row and in the same document."""
    inside = (token >= 0) & (token < num_tokens) & (other >= 0) & (other < num_tokens)
    if documents is not None:
        last = num_tokens - 1
        first, second = tl.minimum(tl.maximum(token, 0), last), tl.minimum(tl.maximum(other, 0), last)
        inside = inside & (tl.load(documents + first) == tl.load(documents + second))
    return inside


@triton.jit
def _inputs(x, documents, token, back, row, channel, row_stride, token_stride, num_tokens, num_channels):
    """The inputs of the tokens `back` before these, zero beyond a document's start."""
    earlier = token - back
    places = row * row_stride + earlier.to(tl.int64)[:, None] * token_stride + channel[None, :]
    mask = _is_same(documents, token, earlier, num_tokens)[:, None] & (channel < num_channels)[None, :]
    return tl.load(x + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, channel, back, channel_stride, tap_stride, num_channels, TAPS: tl.constexpr):
    places = weight + channel * channel_stride + (TAPS - 1 - back) * tap_stride
    return tl.load(places, mask=channel < num_channels, other=0.0).to(tl.float32)


@triton.jit
def _summed(
    x, weight, bias, documents, token, row, channel, row_stride, token_stride, channel_stride, tap_stride, num_tokens, num_channels,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """The convolution at these tokens."""
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < num_channels, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(TAPS):
        seen = _inputs(x, documents, token, back, row, channel, row_stride, token_stride, num_tokens, num_channels)
        total += seen * _taps(weight, channel, back, channel_stride, tap_stride, num_channels, TAPS)[None, :]
    return total


@triton.jit
def _gradient(
    grad, x, weight, bias, documents, token, row, channel, row_stride, token_stride, channel_stride, tap_stride, num_tokens, num_channels,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """The gradient of the convolution at these tokens, zero beyond the row's end."""
    places = (row * num_tokens + token).to(tl.int64)[:, None] * num_channels + channel[None, :]
    mask = (token < num_tokens)[:, None] & (channel < num_channels)[None, :]
    of_out = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
    if IS_SILU:
        total = _summed(
            x, weight, bias, documents, token, row, channel, row_stride, token_stride, channel_stride, tap_stride, num_tokens, num_channels,
            TAPS, TOKENS, CHANNELS,
        )
        share = tl.sigmoid(total)
        of_out *= share * (1.0 + total * (1.0 - share))
    return of_out


@triton.jit
def _convolve(
    x, weight, bias, documents, out, row_stride, token_stride, channel_stride, tap_stride, num_tokens, num_channels,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    token, channel = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(2).to(tl.int64)
    total = _summed(
        x, weight, bias, documents, token, row, channel, row_stride, token_stride, channel_stride, tap_stride, num_tokens, num_channels,
        TAPS, TOKENS, CHANNELS,
    )
    if IS_SILU:
        total *= tl.sigmoid(total)
    places = (row * num_tokens + token)[:, None] * num_channels + channel[None, :]
    mask = (token < num_tokens)[:, None] & (channel < num_channels)[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _input_backward(
    grad, x, weight, bias, documents, grad_x, row_stride, token_stride, channel_stride, tap_stride, num_tokens, num_channels,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    token, channel = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(2).to(tl.int64)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for ahead in tl.static_range(TAPS):
        of_sum = _gradient(
            grad, x, weight, bias, documents, token + ahead, row, channel, row_stride, token_stride, channel_stride, tap_stride,
            num_tokens, num_channels, TAPS, IS_SILU, TOKENS, CHANNELS,
        )
        of_sum = tl.where(_is_same(documents, token + ahead, token, num_tokens)[:, None], of_sum, 0.0)
        total += of_sum * _taps(weight, channel, ahead, channel_stride, tap_stride, num_channels, TAPS)[None, :]
    places = (row * num_tokens + token)[:, None] * num_channels + channel[None, :]
    mask = (token < num_tokens)[:, None] & (channel < num_channels)[None, :]
    tl.store(grad_x + places, total.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def _weight_backward(
    grad, x, weight, bias, documents, grad_weight, grad_bias, num_rows, row_stride, token_stride, channel_stride, tap_stride,
    num_tokens, num_channels, TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Add over all tokens. Taps are the columns of a tile, whose width is a power of two."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    tap = tl.arange(0, 8)
    of_taps, of_bias = tl.zeros((CHANNELS, 8), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    for row in range(num_rows):
        for start in range(0, num_tokens, TOKENS):
            token = start + tl.arange(0, TOKENS)
            of_sum = _gradient(
                grad, x, weight, bias, documents, token, row, channel, row_stride, token_stride, channel_stride, tap_stride,
                num_tokens, num_channels, TAPS, IS_SILU, TOKENS, CHANNELS,
            )
            of_bias += tl.sum(of_sum, 0)
            for back in tl.static_range(TAPS):
                seen = _inputs(x, documents, token, back, row, channel, row_stride, token_stride, num_tokens, num_channels)
                of_taps += tl.where((tap == TAPS - 1 - back)[None, :], tl.sum(of_sum * seen, 0)[:, None], 0.0)
    is_channel = channel < num_channels
    places = channel[:, None] * TAPS + tap[None, :]
    tl.store(grad_weight + places, of_taps.to(grad_weight.dtype.element_ty), mask=is_channel[:, None] & (tap < TAPS)[None, :])
    if bias is not None:
        tl.store(grad_bias + channel, of_bias.to(grad_bias.dtype.element_ty), mask=is_channel)
# fmt: on
