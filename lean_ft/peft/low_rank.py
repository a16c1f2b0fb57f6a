"""A frozen linear layer plus the product of two thin matrices, in one autograd function that keeps little.

    y = x W^T + b + scaling * dropout(x) A^T B^T

Written out of PyTorch's own operations this keeps the input twice (once more where it is scaled or dropped), two
results the size of y, and adds two gradients the size of x. Here the thin product is added in place, forward and
backward; x is kept once, and beside it only what has the width of the rank. W gets no gradient, so nothing is kept or
computed for one. A quantised W is made whole for the product and let go, in forward and again in backward.

The product and what is added to it are one custom op, `sum_of_products`: the compiler, which knows no operation in
place, would copy the whole of y to add to it, and checkpointing that keeps products keeps the sum and not its parts.

Dropout keeps its mask, a byte an element, and none at all where it is 0: PyTorch then draws it, so that checkpointing
and the compiler restore it as they restore everything random.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.quantize.nf4 import Frozen, whole


def low_rank_linear(
    x: Tensor,
    frozen: Frozen,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    dropout: float,
    stays_whole: bool = False,
) -> Tensor:
    """Returns x W^T + bias + scaling * dropout(x) A^T B^T, shape (..., O), in the dtype of x (..., I).

    `frozen` holds W (O, I), as it is or quantised, `stays_whole` as `NF4Linear` has it; `bias` (O,) is frozen too. `a` (R, I)
    and `b` (O, R) may be wider than x: they are rounded to its dtype for the products, and get gradients in their own.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    # Outside of the function: inside of one that is checkpointed the compiler cannot follow what is random.
    dropped, mask = torch.native_dropout(x.detach(), dropout, True) if dropout else (None, None)
    return _LowRankLinear.apply(x, bias, a, b, dropped, mask, scaling, dropout, stays_whole, *frozen)


@torch.library.custom_op("lean_ft::sum_of_products", mutates_args=())
def sum_of_products(
    left: Tensor, right: Tensor, bias: Tensor | None, thin_left: Tensor, thin_right: Tensor, scaling: float
) -> Tensor:
    """Returns left (N, I) @ right (I, O) + bias (O,) + scaling * thin_left (N, R) @ thin_right (R, O), (N, O)."""
    total = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    return total.addmm_(thin_left, thin_right, alpha=scaling)


@sum_of_products.register_fake
def _(left: Tensor, right: Tensor, *args: Any) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


@register_flop_formula(torch.ops.lean_ft.sum_of_products)
def _num_flops(left: Any, right: Any, bias: Any, thin_left: Any, *args: Any, **kwargs: Any) -> int:
    """Of the shapes, a multiplication and an addition each."""
    return 2 * left[0] * right[1] * (left[1] + thin_left[1])


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., I)
        bias: Tensor | None,  # (O,)
        a: Tensor,  # (R, I)
        b: Tensor,  # (O, R)
        dropped: Tensor | None,  # x after dropout, where there is any
        mask: Tensor | None,  # True where it was kept
        scaling: float,
        dropout: float,
        stays_whole: bool,
        *frozen: Tensor,
    ) -> Tensor:
        rows = x.flatten(0, -2)  # (N, I)
        inner = (rows if dropped is None else dropped.flatten(0, -2)) @ a.to(x.dtype).T  # (N, R)
        weight = whole(frozen, b.shape[0], x)
        y = sum_of_products(rows, weight.T, bias, inner, b.to(x.dtype).T, scaling)  # (N, O)
        ctx.save_for_backward(x, a, b, inner, mask, *frozen)
        ctx.scaling, ctx.dropout, ctx.stays_whole = scaling, dropout, stays_whole
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, inner, mask, *frozen = ctx.saved_tensors
        grad_y = grad.flatten(0, -2)  # (N, O)
        grad_inner = (grad_y @ b.to(x.dtype)).mul_(ctx.scaling)  # (N, R)
        grad_a = grad_b = grad_x = None
        if ctx.needs_input_grad[3]:
            # As its transpose: a CPU takes half the time when the long dimension is summed over contiguous rows.
            grad_b = (inner.T @ grad_y).T.to(b.dtype).mul_(ctx.scaling)
        if ctx.needs_input_grad[2]:
            dropped = x if mask is None else _drop(x * mask, ctx.dropout)
            grad_a = (grad_inner.T @ dropped.flatten(0, -2)).to(a.dtype)
        if ctx.needs_input_grad[0]:
            weight, thin = whole(frozen, b.shape[0], x, again=not ctx.stays_whole), a.to(x.dtype)
            if mask is None:
                grad_x = sum_of_products(grad_y, weight, None, grad_inner, thin, 1.0)  # (N, I)
            else:
                dropped = _drop((grad_inner @ thin).mul_(mask.flatten(0, -2)), ctx.dropout)
                grad_x = torch.mm(grad_y, weight).add_(dropped)
            grad_x = grad_x.view(x.shape)
        return grad_x, None, grad_a, grad_b, None, None, None, None, None, *(None for _ in frozen)


def _drop(masked: Tensor, dropout: float) -> Tensor:
    return masked.mul_(1.0 / (1.0 - dropout))
