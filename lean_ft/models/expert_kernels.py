"""Triton kernels of mixtures of experts, in float32: the activation and its gradient in one pass over each row, and the
sum of the rows of each token.

The formula of the activation is that of `mix.activation`. Imported only with Triton and a GPU.
"""

from collections.abc import Sequence
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.system.triton_compiler import launch

_COLUMNS = 1024  # at a time


def activate(results: Sequence[Tensor], *arguments: Any) -> None:
    """Fill the results that are not empty; the arguments are those of `mix.grouped_activation`."""
    factors, row_weights, bias, experts, grad_inner, _, activation, gated, interleaved, *formula = arguments
    num_rows, num_columns = factors.shape
    width = num_columns // 2 if gated else num_columns
    # Where a row has the next gate, and a gate's up. Without gates, both are the same number.
    steps = (2, 1) if interleaved else (1, width if gated else 0)
    read = factors.contiguous(), row_weights, bias, experts, None if grad_inner is None else grad_inner.contiguous()
    written = [tensor if tensor.numel() else None for tensor in results]
    kind, block = activation if gated else "relu2", min(_COLUMNS, triton.next_power_of_2(width))
    if num_rows:
        launch(
            *(_activate, (num_rows,)),
            *read,
            *written,
            width,
            num_columns,
            steps[1],
            *formula,
            STEP=steps[0],
            KIND=kind,
            BLOCK=block,
        )


def sum_rows(rows: Tensor, places: Tensor, out: Tensor) -> None:
    """Fill out (N, D) with the sums of rows (M, D) at places (N, K)."""
    (num_sums, num_columns), block = out.shape, min(_COLUMNS, triton.next_power_of_2(out.shape[1]))
    if num_sums:
        grid = num_sums, triton.cdiv(num_columns, block)
        launch(_sum, grid, rows.contiguous(), places, out, num_columns, COUNT=places.shape[1], BLOCK=block)


# fmt: off
@triton.jit
def _sum(rows, places, out, num_columns, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(COUNT):
        place = tl.load(places + i * COUNT + choice)
        total += tl.load(rows + place * num_columns + column, mask=column < num_columns, other=0.0).to(tl.float32)
    tl.store(out + i * num_columns + column, total.to(out.dtype.element_ty), mask=column < num_columns)


@triton.jit
def _activation(gate, up, gate_scale, up_offset, limit, KIND: tl.constexpr):
    """The activation, and its derivatives by gate and up."""
    if KIND == "relu2":
        of_gate = 2.0 * tl.maximum(gate, 0.0)
        value, of_up = 0.25 * of_gate * of_gate, of_gate
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
    factors, row_weights, bias, experts, grad_inner, inner, grad_factors, grad_weights,
    width, num_columns, up_step, gate_scale, up_offset, limit, SCALES_INPUT: tl.constexpr,
    STEP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(row_weights + row).to(tl.float32)
    of_input, of_output = (weight, 1.0) if SCALES_INPUT else (1.0, weight)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = column < width
        pair = column[:, None] * STEP + tl.arange(0, 2)[None, :] * up_step  # places of gate and up
        both = tl.load(factors + row * num_columns + pair, mask=is_column[:, None], other=0.0).to(tl.float32)
        if bias is not None:
            own = bias + tl.load(experts + row) * num_columns
            both += tl.load(own + pair, mask=is_column[:, None], other=0.0).to(tl.float32)
        gate, up = tl.split(both)
        value, of_gate, of_up = _activation(gate * of_input, up * of_input, gate_scale, up_offset, limit, KIND)
        if grad_inner is not None:
            grad = tl.load(grad_inner + row * width + column, mask=is_column, other=0.0).to(tl.float32)
            if not SCALES_INPUT:
                total += value * grad
            elif KIND == "relu2":
                total += gate * of_gate * grad
            else:
                total += (gate * of_gate + up * of_up) * grad
            grads = tl.join(of_gate, of_up) * (grad * weight)[:, None]
            own = grad_factors + row * num_columns
            tl.store(own + pair, grads.to(grad_factors.dtype.element_ty), mask=is_column[:, None])
        if inner is not None:
            value *= of_output
            tl.store(inner + row * width + column, value.to(inner.dtype.element_ty), mask=is_column)
    if grad_inner is not None:
        tl.store(grad_weights + row, tl.sum(total, 0).to(grad_weights.dtype.element_ty))
# fmt: on
