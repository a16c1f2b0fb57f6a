"""A short causal convolution of each channel within each document, and the mixer made of one.

A token's result is the weighted sum of its own input and a few inputs before it; inputs before its document count as
zero. The custom op computes in float32, keeps its input, and recomputes the sum in backward: on a GPU by Triton kernels
(`convolution_kernels`), elsewhere in blocks of tokens.

Source: Amini et al. 2025, LFM2 technical report (arXiv:2511.23404) for the mixer; the convolution is Mamba's.

Shapes: B rows, T tokens of a row, C channels, W taps of a channel.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.cache import StateCache
from lean_ft.models.config import DecoderConfig, ShortConvolutionConfig
from lean_ft.models.layers import ACTIVATIONS, wide_dtype
from lean_ft.models.state.chunks import chunks, document_numbers
from lean_ft.models.state.decoding import convolution_step, decodes
from lean_ft.models.state.forms import has_convolution, slow, why_no_convolution
from lean_ft.models.state.state_mixer import StateMixer
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import Cost, Launched, SlowPath, register_cost

_BLOCK = 128  # tokens of a row at a time on a CPU, whose cache holds them
_GPU_BLOCK = 2048  # on a GPU without the kernels, so that few operations are launched


@torch.library.custom_op("lean_ft::causal_convolution", mutates_args=())
def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> Tensor:
    """activation(convolution of x (B, T, C) with weight (C, W) + bias (C,)); the last tap is the token's own.

    cu_seqlens (documents + 1,): boundaries of documents in a single row; None if each row is a document.
    """
    documents = document_numbers(cu_seqlens, x.shape[1])
    if has_convolution(x, weight.shape[1], activation):
        from lean_ft.models.state import convolution_kernels

        return convolution_kernels.convolve(x, weight, bias, documents, activation)
    return _in_blocks(x, weight, bias, documents, activation, block=_GPU_BLOCK if x.is_cuda else _BLOCK)


def _in_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, activation: str | None, *, block: int
) -> Tensor:
    """The result of `causal_convolution`, this many tokens at a time."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for tokens in chunks(0, x.shape[1], block):
        total = _summed(x, weight, bias, documents, tokens)
        out[:, tokens] = total if activation is None else ACTIVATIONS[activation].value(total)
    return out


@causal_convolution.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_flop_formula(torch.ops.lean_ft.causal_convolution)
def _num_flops(x_shape: Sequence[int], weight_shape: Sequence[int], *_: object, **__: object) -> int:
    return 2 * math.prod(x_shape) * weight_shape[1]


@torch.library.custom_op("lean_ft::causal_convolution_backward", mutates_args=())
def causal_convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias (empty without a bias)."""
    documents = document_numbers(cu_seqlens, x.shape[1])
    if has_convolution(x, weight.shape[1], activation):
        from lean_ft.models.state import convolution_kernels

        return convolution_kernels.convolve_backward(grad, x, weight, bias, documents, activation)
    block = _GPU_BLOCK if x.is_cuda else _BLOCK
    return _in_blocks_backward(grad, x, weight, bias, documents, activation, block=block)


def _in_blocks_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    activation: str | None,
    *,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of `causal_convolution_backward`, this many tokens at a time."""
    grad_x, wide = torch.empty_like(x, memory_format=torch.contiguous_format), wide_dtype(x)
    grad_weight, grad_bias = (x.new_zeros(shape, dtype=wide) for shape in (weight.shape, weight.shape[:1]))
    num_taps = weight.shape[1]
    for tokens in chunks(0, x.shape[1], block):
        # A token also counts in the sums of the next tokens.
        reach = slice(tokens.start, min(tokens.stop + num_taps - 1, x.shape[1]))
        grad_sum = grad[:, reach].to(wide)
        if activation is not None:
            grad_sum = ACTIVATIONS[activation].backward(grad_sum, _summed(x, weight, bias, documents, reach))
        num_own = tokens.stop - tokens.start
        of_x = grad_sum.new_zeros(len(x), num_own, x.shape[2])
        for back in range(num_taps):
            last = min(tokens.stop + back, reach.stop)
            behind = slice(tokens.start, max(last - back, tokens.start))
            seen = _within(grad_sum[:, back : last - reach.start], documents, behind, back)
            of_x[:, : seen.shape[1]].addcmul_(seen, weight[:, num_taps - 1 - back].to(wide))
            # This tap's inputs for the block's tokens
            earlier = slice(max(tokens.start - back, 0), max(tokens.stop - back, 0))
            grads_of_tap = _within(grad_sum[:, earlier.start + back - tokens.start : num_own], documents, earlier, back)
            grad_weight[:, num_taps - 1 - back] += (grads_of_tap * x[:, earlier]).sum((0, 1))
        grad_x[:, tokens] = of_x
        grad_bias += grad_sum[:, :num_own].sum((0, 1))
    return grad_x, grad_weight.to(weight.dtype), x.new_empty(0) if bias is None else grad_bias.to(bias.dtype)


@causal_convolution_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    grad_bias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    grads = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, weight))
    return *grads, grad_bias


@register_flop_formula(torch.ops.lean_ft.causal_convolution_backward)
def _num_flops_backward(
    grad_shape: Sequence[int], x_shape: Sequence[int], weight_shape: Sequence[int], *_: object, **__: object
) -> int:
    """The forward pass again, and as much for the gradients of inputs and of weights."""
    return 6 * math.prod(x_shape) * weight_shape[1]


_NUMBERING = 2  # launches that find each token's document


_Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, str | None]  # of `causal_convolution`


def _launched(capability: tuple[int, int], *inputs: *_Inputs) -> Launched | SlowPath:
    x, weight, bias, cu, activation = inputs
    if why := why_no_convolution(x, weight.shape[1], activation, compiles=True):
        documents = document_numbers(cu, x.shape[1])
        return SlowPath(partial(_in_blocks, x, weight, bias, documents, activation, block=_GPU_BLOCK), slow(why))
    return Launched(1 + _NUMBERING * (cu is not None))


def _launched_backward(capability: tuple[int, int], grad: Tensor, *inputs: *_Inputs) -> Launched | SlowPath:
    x, weight, bias, cu, activation = inputs
    if why := why_no_convolution(x, weight.shape[1], activation, compiles=True):
        arguments = grad, x, weight, bias, document_numbers(cu, x.shape[1]), activation
        return SlowPath(partial(_in_blocks_backward, *arguments, block=_GPU_BLOCK), slow(why))
    return Launched(2 + _NUMBERING * (cu is not None), repeated_bytes=x.nbytes + grad.nbytes)  # both kernels read them


register_cost(torch.ops.lean_ft.causal_convolution, Cost(_launched))
register_cost(torch.ops.lean_ft.causal_convolution_backward, Cost(_launched_backward))


class _ConvolutionContext(AutogradContext[Tensor, Tensor, Tensor | None, Tensor | None]):  # x, weight, bias, cu_seqlens
    activation: str | None
    has_bias: bool


def _save_for_backward(ctx: _ConvolutionContext, inputs: _Inputs, output: Tensor) -> None:
    x, weight, bias, cu_seqlens, ctx.activation = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, bias, cu_seqlens)


def _backward(ctx: _ConvolutionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
    *grads, grad_bias = causal_convolution_backward(grad, *ctx.saved_tensors, ctx.activation)
    return *grads, grad_bias if ctx.has_bias else None, None, None


causal_convolution.register_autograd(_backward, setup_context=_save_for_backward)


def _summed(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, tokens: slice) -> Tensor:
    """The convolution at these tokens, in float32 or wider."""
    wide, num_taps = wide_dtype(x), weight.shape[1]
    total = x[:, tokens].to(wide) * weight[:, -1].to(wide)
    if bias is not None:
        total += bias
    for back in range(1, num_taps):
        earlier = slice(max(tokens.start - back, 0), max(tokens.stop - back, 0))
        seen = _within(x[:, earlier].to(wide), documents, earlier, back)
        total[:, earlier.start + back - tokens.start :].addcmul_(seen, weight[:, num_taps - 1 - back].to(wide))
    return total


def _within(values: Tensor, documents: Tensor | None, tokens: slice, distance: int) -> Tensor:
    """The values (B, n, C) of `tokens`, zero where the token `distance` later is in another document."""
    if documents is None or distance == 0:
        return values
    is_same = documents[:, tokens] == documents[:, tokens.start + distance : tokens.stop + distance]
    return values.masked_fill(~is_same[..., None], 0.0)


class Convolution(nn.Module):
    """A causal convolution of each channel, with the parameters of `nn.Conv1d`."""

    def __init__(self, num_channels: int, num_taps: int, bias: bool = False, activation: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, num_taps))
        self.bias = nn.Parameter(torch.empty(num_channels)) if bias else None
        self.activation = activation

    def forward(self, x: Tensor, cu_seqlens: Tensor | None, cache: StateCache | None) -> Tensor:
        """Convolve x (B, T, C), or (1, N, C) with documents `cu_seqlens`; returns the same shape."""
        num_new = x.shape[1]
        if cache is not None and self.activation in (None, "silu") and decodes(x, cache):
            inputs = cache.inputs[: len(x)]
            return convolution_step(x, inputs, self.weight[:, 0], self.bias, self.activation)
        if cache is not None:
            x = cache.behind_inputs(x)
        return causal_convolution(x, self.weight[:, 0], self.bias, cu_seqlens, self.activation)[:, -num_new:]


class ShortConvolution(StateMixer):
    """A convolution between two gates: out(c * convolution(b * x)), where b, c and x are projections of the input."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        mixer, size = config.layers[layer_index].mixer, config.hidden_size
        assert isinstance(mixer, ShortConvolutionConfig)
        self.in_proj = nn.Linear(size, 3 * size, bias=mixer.bias)
        self.conv = Convolution(size, mixer.num_taps, mixer.bias)
        self.out_proj = nn.Linear(size, size, bias=mixer.bias)

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, cache: StateCache | None) -> Tensor:
        b, c, x = self.in_proj(x).chunk(3, -1)
        return self.out_proj(c * self.conv(b * x, cu_seqlens, cache))
