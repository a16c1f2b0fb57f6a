"""Products with a frozen weight in float8 (e4m3), with one float32 scale per row of each factor.

    forward   y = x W^T    rows of x (N, I) and of W (O, I) are rounded
    backward  dx = g W     rows of g (N, O) and columns of W are rounded

A weight that is stored in float8 with a scale per row is multiplied as it is stored. Its scales lie along backward's
sum, so there they multiply the gradient before it is rounded. A product adds a low-rank product in the dtype of x. The
weight has no gradient.

Source: torchao's float8 training with scales per row, whose gradients are e4m3 too: within a row they need less range
than e5m2 has, and one mantissa bit more halves their rounding. Formats: Micikevicius et al. 2022, arXiv:2209.05433.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.system.costs import register_cost

if TYPE_CHECKING:
    from lean_ft.models.frozen_weight import Frozen

_SMALLEST = 1e-12  # the largest magnitude of a row of zeros


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round (N, I) to float8: numbers (N, I) in e4m3 and scales (N, 1) in float32, whose product is near the values."""
    largest = values.abs().amax(-1, keepdim=True).float().clamp(min=_SMALLEST)
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    return (values / scales).to(torch.float8_e4m3fn), scales


def float8_forward(
    x: Tensor, weight: "Frozen", bias: Tensor | None, thin_left: Tensor | None = None, thin_right: Tensor | None = None
) -> Tensor:
    """Return x (N, I) W^T + bias (O,) + thin_left (N, R) @ thin_right (R, O), shape (N, O), in the dtype of x."""
    numbers, scales = weight.tensors if _has_row_scales(weight) else rounded(weight.whole(x.dtype))
    return sum_of_float8_products(*rounded(x), numbers, scales, x.dtype, bias, thin_left, thin_right)


def float8_backward(
    grad: Tensor, weight: "Frozen", thin_left: Tensor | None = None, thin_right: Tensor | None = None
) -> Tensor:
    """Return grad (N, O) W + thin_left (N, R) @ thin_right (R, I), shape (N, I), in the dtype of grad."""
    dtype = grad.dtype
    if _has_row_scales(weight):
        stored, of_rows = weight.tensors
        grad, numbers = grad * of_rows.T, stored.T.contiguous()  # kernels read factors row by row
        scales = of_rows.new_ones(len(numbers), 1)
    else:
        numbers, scales = rounded(weight.whole(dtype, again=True).T.contiguous())
    return sum_of_float8_products(*rounded(grad), numbers, scales, dtype, None, thin_left, thin_right)


def _has_row_scales(weight: "Frozen") -> bool:
    return weight.form.kind == "float8" and weight.tensors[1].shape == (weight.form.shape[0], 1)


@torch.library.custom_op("lean_ft::sum_of_float8_products", mutates_args=())
def sum_of_float8_products(
    left: Tensor,  # (N, I)
    left_scales: Tensor,  # (N, 1)
    right: Tensor,  # (O, I)
    right_scales: Tensor,  # (O, 1)
    dtype: torch.dtype,
    bias: Tensor | None,
    thin_left: Tensor | None,
    thin_right: Tensor | None,
) -> Tensor:
    """Return left right^T + bias (O,) + thin_left (N, R) @ thin_right (R, O), shape (N, O), in `dtype`."""
    by_row = F.ScalingType.RowWise
    total = F.scaled_mm(left, right.T, left_scales, by_row, right_scales.T, by_row, output_dtype=torch.bfloat16)
    total = total.to(dtype)  # some cards' kernels write bfloat16 only
    if bias is not None:
        total.add_(bias)
    if thin_left is None or thin_right is None or not thin_left.shape[1]:
        return total
    return total.addmm_(thin_left, thin_right)


@sum_of_float8_products.register_fake
def _(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype, *args: Any) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


@register_flop_formula(torch.ops.lean_ft.sum_of_float8_products)
def _num_flops(left: Any, left_scales: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    thin_left = args[3]
    return 2 * left[0] * right[0] * (left[1] + (thin_left[1] if thin_left else 0))


register_cost(torch.ops.lean_ft.sum_of_float8_products)
