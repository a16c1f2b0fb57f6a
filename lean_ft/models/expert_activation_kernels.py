"""The activation of experts and its gradient as Triton kernels: one pass over the rows, in float32.

The formulas are those of `expert_activation`. Imported only with Triton and a GPU.

Shapes: M rows, I intermediate features, F columns of the factors: 2 * I if there are gates, else I.
"""

from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_COLUMNS = 1024  # per program or step of a program


def activate(factors: Tensor, row_weights: Tensor, bias: Tensor | None, experts: Tensor | None, *kind: Any) -> Tensor:
    """The weighted activation (M, I); see `expert_activation.grouped_activation`."""
    width, block, kind = _sizes(factors, *kind)
    inner = factors.new_empty(len(factors), width)
    launch: Any = _activate
    grid = (len(factors), triton.cdiv(width, block))
    if inner.numel():
        launch[grid](factors, row_weights, bias, experts, inner, width, *kind, BLOCK=block)
    return inner


def activate_back(
    factors: Tensor,
    grad_inner: Tensor,
    row_weights: Tensor,
    bias: Tensor | None,
    experts: Tensor | None,
    needs_inner: bool,
    *kind: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (M, F) and (M,), and the weighted activation; see `expert_activation.grouped_activation_back`."""
    width, block, kind = _sizes(factors, *kind)
    grad_factors, grad_weights = factors.new_empty(factors.shape), row_weights.new_empty(len(factors))
    inner = factors.new_empty(len(factors) if needs_inner else 0, width)
    launch: Any = _activate_back
    if factors.numel():
        tensors = (factors, grad_inner, row_weights, bias, experts, grad_factors, grad_weights)
        launch[(len(factors),)](*tensors, inner if needs_inner else None, width, *kind, BLOCK=block)
    return grad_factors, grad_weights, inner


def _sizes(factors: Tensor, activation: str, gated: bool, *kind: Any) -> tuple[int, int, tuple[Any, ...]]:
    width = factors.shape[1] // 2 if gated else factors.shape[1]
    return width, min(_COLUMNS, triton.next_power_of_2(width)), (activation if gated else "relu2", *kind)


# fmt: off
@triton.jit
def _load_pair(start, first, width, KIND: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Gates and ups of a row from column `first` on; without gates, the ups twice."""
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
    column, kind = first + tl.arange(0, BLOCK), start.dtype.element_ty
    if INTERLEAVED and KIND != "relu2":
        column = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(start + column, tl.interleave(gate, up).to(kind), mask=column < 2 * width)
    else:
        tl.store(start + column, gate.to(kind), mask=column < width)
        if KIND != "relu2":
            tl.store(start + width + column, up.to(kind), mask=column < width)


@triton.jit
def _factors(
    factors, bias, experts, row, first, width,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):
    num_columns = width if KIND == "relu2" else 2 * width
    gate, up = _load_pair(factors + row * num_columns, first, width, KIND, INTERLEAVED, BLOCK)
    if bias is not None:
        own = bias + tl.load(experts + row) * num_columns
        gate_bias, up_bias = _load_pair(own, first, width, KIND, INTERLEAVED, BLOCK)
        gate, up = gate + gate_bias, up + up_bias
    return gate, up


@triton.jit
def _activation(gate, up, gate_scale, up_offset, limit, KIND: tl.constexpr):
    """The activation, and its derivatives for gate and up."""
    if KIND == "relu2":
        positive = tl.maximum(gate, 0.0)
        value, of_gate, of_up = positive * positive, 2.0 * positive, positive
    else:
        bounded, factor = gate, up
        if limit is not None:
            bounded, factor = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        x, factor = bounded * gate_scale, factor + up_offset
        # The activation is x times a share of 0 to 1. `slope` is the derivative of the share.
        if KIND == "gelu":
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
    factors, row_weights, bias, experts, inner, width,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, gate_scale, up_offset, limit, SCALES_INPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    weight = tl.load(row_weights + row).to(tl.float32)
    gate, up = _factors(factors, bias, experts, row, first, width, KIND, INTERLEAVED, BLOCK)
    if SCALES_INPUT:
        gate, up = gate * weight, up * weight
    value, _, _ = _activation(gate, up, gate_scale, up_offset, limit, KIND)
    if not SCALES_INPUT:
        value *= weight
    column = first + tl.arange(0, BLOCK)
    tl.store(inner + row * width + column, value.to(inner.dtype.element_ty), mask=column < width)


@triton.jit
def _activate_back(
    factors, grad_inner, row_weights, bias, experts, grad_factors, grad_weights, inner, width,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, gate_scale, up_offset, limit, SCALES_INPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(row_weights + row).to(tl.float32)
    num_columns = width if KIND == "relu2" else 2 * width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = column < width
        gate, up = _factors(factors, bias, experts, row, first, width, KIND, INTERLEAVED, BLOCK)
        grad = tl.load(grad_inner + row * width + column, mask=is_column, other=0.0).to(tl.float32)
        if SCALES_INPUT:
            value, of_gate, of_up = _activation(gate * weight, up * weight, gate_scale, up_offset, limit, KIND)
            of_gate, of_up = of_gate * grad, of_up * grad
            total += gate * of_gate
            if KIND != "relu2":
                total += up * of_up
        else:
            value, of_gate, of_up = _activation(gate, up, gate_scale, up_offset, limit, KIND)
            of_gate, of_up = of_gate * grad, of_up * grad
            total += value * grad
            value *= weight
        own = grad_factors + row * num_columns
        _store_pair(own, of_gate * weight, of_up * weight, first, width, KIND, INTERLEAVED, BLOCK)
        if inner is not None:
            tl.store(inner + row * width + column, value.to(inner.dtype.element_ty), mask=is_column)
    tl.store(grad_weights + row, tl.sum(total, 0).to(grad_weights.dtype.element_ty))
# fmt: on
