"""A frozen linear layer plus the product of two thin matrices, in one autograd function that keeps little.

    y = x W^T + b + scaling * dropout(x) A^T B^T

Written out of PyTorch's own operations this keeps the input twice (once more where it is scaled or dropped), two
results the size of y, and adds two gradients the size of x. Here the thin product is added in place, forward and
backward; x is kept once, and beside it only what has the width of the rank. W gets no gradient, so nothing is kept or
computed for one. A quantised W is made whole for the product and let go, in forward and again in backward.

Dropout keeps its mask, a byte an element, and none at all where it is 0: PyTorch then draws it, so that checkpointing
and the compiler restore it as they restore everything random.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.peft.nf4 import Frozen, whole


def low_rank_linear(
    x: Tensor, frozen: Frozen, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropout: float
) -> Tensor:
    """Returns x W^T + bias + scaling * dropout(x) A^T B^T, shape (..., O), in the dtype of x (..., I).

    `frozen` holds W (O, I), as it is or quantised; `bias` (O,) is frozen too. `a` (R, I) and `b` (O, R) may be wider
    than x: they are rounded to its dtype for the products, and get gradients in their own.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    # Outside of the function: inside of one that is checkpointed the compiler cannot follow what is random.
    dropped, mask = torch.native_dropout(x.detach(), dropout, True) if dropout else (None, None)
    result = _LowRankLinear.apply(x, bias, a, b, dropped, mask, scaling, dropout, *frozen)
    assert isinstance(result, Tensor)
    return result


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
        *frozen: Tensor,
    ) -> Tensor:
        y = F.linear(x, whole(frozen, b.shape[0], x), bias)  # (..., O)
        inner = F.linear(x if dropped is None else dropped, a.to(x.dtype)).flatten(0, -2)  # (N, R)
        y.flatten(0, -2).addmm_(inner, b.to(x.dtype).T, alpha=scaling)
        ctx.save_for_backward(x, a, b, inner, mask, *frozen)
        ctx.scaling, ctx.dropout = scaling, dropout
        return y

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
            grad_x = grad_y @ whole(frozen, b.shape[0], x)  # (N, I)
            if mask is None:
                grad_x.addmm_(grad_inner, a.to(x.dtype))
            else:
                grad_x.add_(_drop((grad_inner @ a.to(x.dtype)).mul_(mask.flatten(0, -2)), ctx.dropout))
            grad_x = grad_x.view(x.shape)
        return grad_x, None, grad_a, grad_b, None, None, None, None, *(None for _ in frozen)


def _drop(masked: Tensor, dropout: float) -> Tensor:
    return masked.mul_(1.0 / (1.0 - dropout))
