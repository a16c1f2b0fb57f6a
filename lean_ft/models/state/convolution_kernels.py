"""Triton kernels of a short causal convolution: one for the output, one for the gradient of the input, and one for
those of weight and bias.

Sums are float32. No sum uses atomics, so equal inputs give equal bits. Imported only with Triton and a GPU.

Shapes: B rows, T tokens of a row, C channels, W taps of a channel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.system.triton_compiler import launch

_TOKENS, _CHANNELS = 32, 64  # of a program
_FEW_CHANNELS = 32  # of a program that adds over all tokens


class _Inputs(NamedTuple):
    """The arguments of `causal_convolution`, as the kernels read them; documents (T,)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    documents: Tensor | None
    x_strides: tuple[int, ...]  # of rows and tokens
    weight_strides: tuple[int, ...]
    num_tokens: int
    num_channels: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> "_Inputs":
        x = x if x.stride(-1) == 1 else x.contiguous()
        numbers = None if documents is None else documents[0]
        return cls(x, weight, bias, numbers, x.stride()[:2], weight.stride(), *x.shape[1:])

    def launch(self, kernel: Callable[..., None], target: Tensor, activation: str | None, *before: Tensor) -> None:
        """Launch programs for blocks of tokens and of channels, and each row."""
        grid = triton.cdiv(self.num_tokens, _TOKENS), triton.cdiv(self.num_channels, _CHANNELS), len(self.x)
        launch(kernel, grid, self, *before, target, self.weight.shape[1], activation == "silu", _TOKENS, _CHANNELS)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, activation: str | None
) -> Tensor:
    """The result of `causal_convolution`; documents (1, T) are the numbers of each token's document."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _Inputs.of(x, weight, bias, documents).launch(_convolve, out, activation)
    return out


def convolve_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias (empty without a bias) from that of the output."""
    inputs, grad = _Inputs.of(x, weight, bias, documents), grad.contiguous()
    grad_x, grad_weight = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, weight))
    grad_bias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    inputs.launch(_input_backward, grad_x, activation, grad)
    grid = (triton.cdiv(inputs.num_channels, _FEW_CHANNELS),)
    constants = weight.shape[1], activation == "silu", _TOKENS, _FEW_CHANNELS
    launch(_weight_backward, grid, inputs, grad, grad_weight, grad_bias, len(x), *constants)
    return grad_x, grad_weight, grad_bias


# fmt: off
@triton.jit
def _is_same(x, token, other):
    """Whether two tokens are in the row and in the same document."""
    inside = (token >= 0) & (token < x.num_tokens) & (other >= 0) & (other < x.num_tokens)
    if x.documents is not None:
        last = x.num_tokens - 1
        first, second = tl.minimum(tl.maximum(token, 0), last), tl.minimum(tl.maximum(other, 0), last)
        inside = inside & (tl.load(x.documents + first) == tl.load(x.documents + second))
    return inside


@triton.jit
def _seen(x, token, back, row, channel):
    """The inputs of the tokens `back` before these, zero before a document's start."""
    earlier = token - back
    places = row * x.x_strides[0] + earlier.to(tl.int64)[:, None] * x.x_strides[1] + channel[None, :]
    mask = _is_same(x, token, earlier)[:, None] & (channel < x.num_channels)[None, :]
    return tl.load(x.x + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tap(x, channel, back, TAPS: tl.constexpr):
    """The channels' weights of the input `back` tokens before."""
    places = x.weight + channel * x.weight_strides[0] + (TAPS - 1 - back) * x.weight_strides[1]
    return tl.load(places, mask=channel < x.num_channels, other=0.0).to(tl.float32)


@triton.jit
def _summed(x, token, row, channel, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The convolution at these tokens."""
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if x.bias is not None:
        total += tl.load(x.bias + channel, mask=channel < x.num_channels, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(TAPS):
        total += _seen(x, token, back, row, channel) * _tap(x, channel, back, TAPS)[None, :]
    return total


@triton.jit
def _places(x, token, row, channel):
    """Where these tokens and channels are in (B, T, C), and whether they are inside."""
    places = (row * x.num_tokens + token).to(tl.int64)[:, None] * x.num_channels + channel[None, :]
    return places, (token < x.num_tokens)[:, None] & (channel < x.num_channels)[None, :]


@triton.jit
def _sum_gradient(
    x, grad, token, row, channel,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """The gradient of the convolution at these tokens, zero beyond the row's end."""
    places, mask = _places(x, token, row, channel)
    of_sum = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
    if IS_SILU:
        total = _summed(x, token, row, channel, TAPS, TOKENS, CHANNELS)
        share = tl.sigmoid(total)
        of_sum *= share * (1.0 + total * (1.0 - share))
    return of_sum


@triton.jit
def _block(TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The tokens, channels and row of a program."""
    token, channel = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * CHANNELS
    return token, channel + tl.arange(0, CHANNELS), tl.program_id(2).to(tl.int64)


@triton.jit
def _convolve(x, out, TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    token, channel, row = _block(TOKENS, CHANNELS)
    total = _summed(x, token, row, channel, TAPS, TOKENS, CHANNELS)
    if IS_SILU:
        total *= tl.sigmoid(total)
    places, mask = _places(x, token, row, channel)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _input_backward(
    x, grad, grad_x, TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    token, channel, row = _block(TOKENS, CHANNELS)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for ahead in tl.static_range(TAPS):
        of_sum = _sum_gradient(x, grad, token + ahead, row, channel, TAPS, IS_SILU, TOKENS, CHANNELS)
        of_sum = tl.where(_is_same(x, token + ahead, token)[:, None], of_sum, 0.0)
        total += of_sum * _tap(x, channel, ahead, TAPS)[None, :]
    places, mask = _places(x, token, row, channel)
    tl.store(grad_x + places, total.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def _weight_backward(
    x, grad, grad_weight, grad_bias, num_rows,
    TAPS: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Add over all tokens. Taps are the columns of a tile, whose width is a power of two."""
    channel, tap = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, 8)
    of_taps, of_bias = tl.zeros((CHANNELS, 8), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    for row in range(num_rows):
        for start in range(0, x.num_tokens, TOKENS):
            token = start + tl.arange(0, TOKENS)
            of_sum = _sum_gradient(x, grad, token, row, channel, TAPS, IS_SILU, TOKENS, CHANNELS)
            of_bias += tl.sum(of_sum, 0)
            for back in tl.static_range(TAPS):
                of_tap = tl.sum(of_sum * _seen(x, token, back, row, channel), 0)
                of_taps += tl.where((tap == TAPS - 1 - back)[None, :], of_tap[:, None], 0.0)
    is_channel = channel < x.num_channels
    mask = is_channel[:, None] & (tap < TAPS)[None, :]
    places = grad_weight + channel[:, None] * TAPS + tap[None, :]
    tl.store(places, of_taps.to(grad_weight.dtype.element_ty), mask=mask)
    if x.bias is not None:
        tl.store(grad_bias + channel, of_bias.to(grad_bias.dtype.element_ty), mask=is_channel)
# fmt: on
