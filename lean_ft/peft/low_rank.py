"""A frozen linear layer plus a low-rank product, in one autograd function that keeps little for backward.

    y = x W^T + b + scaling * dropout(x) A^T B^T

Composed of PyTorch operations, this would keep the input two or three times and two results the size of y, and add two
gradients the size of x. Here the low-rank product is added in place in forward and backward, and backward keeps only x
and a tensor as wide as the rank. W is frozen, so nothing is kept or computed for its gradient. A quantized W is
dequantized for the product and freed, in forward and again in backward.

The product and the sum are one custom op, `sum_of_products`. The compiler has no in-place operations and would copy y,
and checkpointing that keeps products then keeps the sum instead of its parts.

Dropout keeps its mask, one byte per element. PyTorch draws the mask, so checkpointing and the compiler restore it.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.float8_product import float8_backward, float8_forward
from lean_ft.models.frozen_weight import Form, Frozen, product_dtype
from lean_ft.models.layers import is_on_cuda
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import Cost, Launched, register_cost
from lean_ft.system.gpu_products import multiplies_into_float32


def low_rank_linear(
    x: Tensor,
    frozen: Frozen,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Return x W^T + bias + scaling * dropout(x) A^T B^T, shape (..., O), in the dtype of x (..., I).

    `frozen` is W (O, I), and `bias` (O,) is frozen too. `a` (R, I) and `b` (O, R) are rounded to the dtype of x for the
    products, one of them after it is multiplied by `scaling`; their gradients have their own dtype.
    """
    x = x.to(product_dtype(x))
    # Outside of the autograd function, where the compiler supports random operations under checkpointing.
    dropped, mask = torch.native_dropout(x.detach(), dropout, True) if dropout else (None, None)
    return _LowRankLinear.apply(x, bias, a, b, dropped, mask, scaling, dropout, frozen.form, *frozen.tensors)


@torch.library.custom_op("lean_ft::sum_of_products", mutates_args=())
def sum_of_products(left: Tensor, right: Tensor, bias: Tensor | None, thin_left: Tensor, thin_right: Tensor) -> Tensor:
    """Return left (N, I) @ right (I, O) + bias (O,) + thin_left (N, R) @ thin_right (R, O), (N, O)."""
    total = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    # An adapter that is off has rank 0: adding nothing would still read and write all of the total.
    return total.addmm_(thin_left, thin_right) if thin_left.shape[1] else total


@sum_of_products.register_fake
def _(left: Tensor, right: Tensor, *_: Tensor | None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


@register_flop_formula(torch.ops.lean_ft.sum_of_products)
def _num_flops(
    left: Sequence[int],
    right: Sequence[int],
    bias: Sequence[int] | None,
    thin_left: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    return 2 * left[0] * right[1] * (left[1] + thin_left[1])


def _launches(
    capability: tuple[int, int], left: Tensor, right: Tensor, bias: Tensor | None, thin_left: Tensor, *_: object
) -> Launched:
    """Of the product and of the low-rank product, which reads and writes the total again."""
    if not thin_left.shape[1]:
        return Launched()
    return Launched(2, repeated_bytes=2 * left.shape[0] * right.shape[1] * left.element_size())


register_cost(torch.ops.lean_ft.sum_of_products, Cost(_launches, first_factor=0))


class _LowRankContext(
    # x, a, b, inner, mask, and W as it is stored
    AutogradContext[Tensor, Tensor, Tensor, Tensor, Tensor | None, *tuple[Tensor, ...]]
):
    scaling: float
    dropout: float
    form: Form


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LowRankContext,
        x: Tensor,  # (..., I)
        bias: Tensor | None,  # (O,)
        a: Tensor,  # (R, I)
        b: Tensor,  # (O, R)
        dropped: Tensor | None,  # x after dropout
        mask: Tensor | None,  # True for kept elements
        scaling: float,
        dropout: float,
        form: Form,
        *tensors: Tensor,  # W as it is stored
    ) -> Tensor:
        rows = x.flatten(0, -2)  # (N, I)
        scaled, narrow = _in_dtype(a * scaling, b, x.dtype)
        inner = (rows if dropped is None else dropped.flatten(0, -2)) @ scaled.T  # (N, R)
        frozen = Frozen(form, tensors)
        if form.in_float8:
            y = float8_forward(rows, frozen, bias, inner, narrow.T)
        else:
            y = sum_of_products(rows, frozen.whole(x.dtype).T, bias, inner, narrow.T)  # (N, O)
        ctx.save_for_backward(x, a, b, inner, mask, *tensors)
        ctx.scaling, ctx.dropout, ctx.form = scaling, dropout, form
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: _LowRankContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, a, b, inner, mask, *tensors = ctx.saved_tensors
        grad_y = grad.flatten(0, -2)  # (N, O)
        thin, scaled = _in_dtype(a, b * ctx.scaling, x.dtype)
        grad_inner = grad_y @ scaled  # (N, R)
        grad_a = grad_b = grad_x = None
        if ctx.needs_input_grad[3]:
            if is_on_cuda(x):
                grad_b = product_in(grad_y.T, inner, b.dtype)
            else:  # as a transpose: summing the long dimension over contiguous rows takes half the time
                # In float16 without the scaling, which would let the product overflow earlier.
                scale = ctx.scaling if x.dtype == torch.float16 else 1.0
                unscaled = inner if scale == 1.0 else inner / scale
                grad_b = (unscaled.T @ grad_y).T.to(b.dtype).mul_(scale)
        if ctx.needs_input_grad[2]:
            dropped = x if mask is None else _drop(x * mask, ctx.dropout)
            grad_a = product_in(grad_inner.T, dropped.flatten(0, -2), a.dtype)
        if ctx.needs_input_grad[0]:
            frozen = Frozen(ctx.form, tuple(tensors))
            if ctx.form.in_float8:
                grad_x = float8_backward(grad_y, frozen, *((grad_inner, thin) if mask is None else ()))  # (N, I)
            elif mask is None:
                grad_x = sum_of_products(grad_y, frozen.whole(x.dtype, again=True), None, grad_inner, thin)
            else:
                grad_x = torch.mm(grad_y, frozen.whole(x.dtype, again=True))
            if mask is not None:
                grad_x.add_(_drop((grad_inner @ thin).mul_(mask.flatten(0, -2)), ctx.dropout))
            grad_x = grad_x.view(x.shape)
        return grad_x, None, grad_a, grad_b, None, None, None, None, None, *(None for _ in tensors)


def _in_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both factors rounded to `dtype`; on a GPU, compiled, in one kernel."""
    if a.dtype == dtype or not (torch.compiler.is_compiling() and is_on_cuda(a)):
        return a.to(dtype), b.to(dtype)
    both = torch.cat((a.to(dtype).flatten(), b.to(dtype).flatten()))
    return both[: a.numel()].view(a.shape), both[a.numel() :].view(b.shape)


def product_in(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`. On a GPU the product is not rounded to the factors' dtype first."""
    if is_on_cuda(left) and left.itemsize < dtype.itemsize and multiplies_into_float32(left.dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _drop(masked: Tensor, dropout: float) -> Tensor:
    return masked.mul_(1.0 / (1.0 - dropout))
