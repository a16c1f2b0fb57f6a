"""The activation of experts and its gradient as one Triton kernel: one pass over each row, in float32.

The formula is that of `mix.activation`. Imported only with Triton and a GPU.

Shapes: M rows, I intermediate features, F columns of the factors: 2 * I if there are gates, else I; E experts.
"""

from collections.abc import Sequence
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_COLUMNS = 1024  # at a time


def activate(
    results: Sequence[Tensor],
    factors: Tensor,
    row_weights: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    grad_inner: Tensor | None,
    _: bool,
    activation: str,
    gated: bool,
    *formula: Any,
) -> None:
    """Fill the results that are not empty; see `mix.grouped_activation`."""
    width = factors.shape[1] // 2 if gated else factors.shape[1]
    read = factors.contiguous(), row_weights, bias, experts, None if grad_inner is None else grad_inner.contiguous()
    written = [tensor if tensor.numel() else None for tensor in results]
    kind, block = activation if gated else "relu2", min(_COLUMNS, triton.next_power_of_2(width))
    launch: Any = _activate
    if len(factors):
        launch[(len(factors),)](*read, *written, width, kind, *formula, BLOCK=block)


# fmt: off
@triton.jit
def _load_pair(start, first, width, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Gates and ups of a row from column `first` on, both (BLOCK,); without gates, the ups twice."""
    column = first + tl.arange(0, BLOCK)
    if KIND == "relu2":
        up = tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)
        gate = up
    elif INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(start + column, mask=column < 2 * width, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        gate = tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)
        up = tl.load(start + width + column, mask=column < width, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _store_pair(start, gate, up, first, width, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    if KIND != "relu2" and INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(start + column, tl.interleave(gate, up).to(start.dtype.element_ty), mask=column < 2 * width)
    else:
        tl.store(start + column, gate.to(start.dtype.element_ty), mask=column < width)
        if KIND != "relu2":
            tl.store(start + width + column, up.to(start.dtype.element_ty), mask=column < width)


@triton.jit
def _activation(gate, up, gate_scale, up_offset, limit, KIND: tl.constexpr):
    """The activation, and its derivatives by gate and up."""
    if KIND == "relu2":
        of_up = tl.maximum(gate, 0.0)
        value, of_gate = of_up * of_up, 2.0 * of_up
    else:
        x, factor = gate, up
        if limit is not None:
            x, factor = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        x, factor = x * gate_scale, factor + up_offset
        if KIND == "gelu":  # every kind multiplies x by a share between 0 and 1, whose derivative is the slope
            share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        elif KIND == "gelu_tanh":
            share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
            slope = share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        else:
            tl.static_assert(KIND == "silu")
            share = tl.sigmoid(x)
            slope = share * (1.0 - share)
        of_up = x * share / gate_scale
        value, of_gate = of_up * factor, (share + x * slope) * factor
        if limit is not None:
            of_gate, of_up = tl.where(gate > limit, 0.0, of_gate), tl.where(tl.abs(up) > limit, 0.0, of_up)
    return value, of_gate, of_up


@triton.jit
def _activate(
    factors, row_weights, bias, experts, grad_inner, inner, grad_factors, grad_weights, width,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, gate_scale, up_offset, limit, SCALES_INPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_columns = width if KIND == "relu2" else 2 * width
    weight = tl.load(row_weights + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        gate, up = _load_pair(factors + row * num_columns, first, width, KIND, INTERLEAVED, BLOCK)
        if bias is not None:
            own = bias + tl.load(experts + row) * num_columns
            gate_bias, up_bias = _load_pair(own, first, width, KIND, INTERLEAVED, BLOCK)
            gate, up = gate + gate_bias, up + up_bias
        of_input, of_output = (weight, 1.0) if SCALES_INPUT else (1.0, weight)
        value, of_gate, of_up = _activation(gate * of_input, up * of_input, gate_scale, up_offset, limit, KIND)
        if grad_inner is not None:
            grad = tl.load(grad_inner + row * width + column, mask=column < width, other=0.0).to(tl.float32)
            if not SCALES_INPUT:
                total += value * grad
            elif KIND == "relu2":
                total += gate * of_gate * grad
            else:
                total += (gate * of_gate + up * of_up) * grad
            grad *= weight
            own = grad_factors + row * num_columns
            _store_pair(own, of_gate * grad, of_up * grad, first, width, KIND, INTERLEAVED, BLOCK)
        if inner is not None:
            value *= of_output
            tl.store(inner + row * width + column, value.to(inner.dtype.element_ty), mask=column < width)
    if grad_inner is not None:
        tl.store(grad_weights + row, tl.sum(total, 0).to(grad_weights.dtype.element_ty))
# fmt: on
