"""Layers with adapters that read the same input, such as the projections of attention, in few products.

    y_i = x W_i^T + b_i + scaling * x A_i^T B_i^T

One product multiplies x by all A, one gives the gradients of all A, and the gradients of x are added within products
rather than afterwards. NF4 weights are expanded by one kernel, one below the other, and multiplied at once; the factors
B are then blocks on a diagonal. On a GPU, where thin products take a launch each and little else, this halves the
launches of a layer. Values are those of `low_rank_linear` but for the order of sums.

Shapes: N tokens, I inputs, O outputs, R rank; sums of them are over the layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.frozen_weight import TENSORS, Form, Frozen, expands_together, product_dtype, side_by_side
from lean_ft.peft.low_rank import product_in, sum_of_products
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import Cost, Launched, register_cost

# Blocks on a diagonal multiply zeros too: arithmetic that grows with the square of the sum of the ranks.
_LARGEST_DIAGONAL = 128


def joint_low_rank_linears(
    x: Tensor,
    frozen: Sequence[Frozen],
    biases: Sequence[Tensor | None],
    factors: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
) -> tuple[Tensor, ...]:
    """`low_rank_linear` of every layer without dropout, from x (..., I) and the layers' (A, B): (..., O) each, or with
    NF4 weights all side by side in one tensor (..., sum of O).

    The weights are all plain or all NF4, and the factors have one dtype.
    """
    x = x.to(product_dtype(x))
    a, b = zip(*factors, strict=True)
    stored = [tensor for weight in frozen for tensor in weight.tensors]
    forms = tuple(weight.form for weight in frozen)
    return _JointLowRankLinears.apply(x, forms, scaling, *a, *b, *biases, *stored)


@torch.library.custom_op("lean_ft::thin_products", mutates_args=())
def thin_products(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """left (N, O) @ right (O, R) of each pair, side by side: (N, sum of R)."""
    out = _empty_beside(lefts, rights)
    for left, right, part in zip(lefts, rights, out.split([right.shape[1] for right in rights], 1), strict=True):
        torch.mm(left, right, out=part)
    return out


@thin_products.register_fake
def _empty_beside(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    return lefts[0].new_empty(len(lefts[0]), sum(right.shape[1] for right in rights))


@torch.library.custom_op("lean_ft::sum_of_many_products", mutates_args=())
def sum_of_many_products(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """The sum of left (N, O) @ right (O, I) over the pairs, (N, I); O may differ."""
    total = torch.mm(lefts[0], rights[0])
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(left, right)
    return total


@sum_of_many_products.register_fake
def _(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    return lefts[0].new_empty(len(lefts[0]), rights[0].shape[1])


@register_flop_formula([torch.ops.lean_ft.thin_products, torch.ops.lean_ft.sum_of_many_products])
def _num_flops(lefts: Any, rights: Any, *_: object, **__: object) -> int:
    return sum(2 * left[0] * right[0] * right[1] for left, right in zip(lefts, rights, strict=True))


def _launch_for_each(capability: tuple[int, int], lefts: Sequence[Tensor], *_: object) -> Launched:
    return Launched(len(lefts))


def _launch_for_each_term(capability: tuple[int, int], lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Launched:
    """Each further product reads and writes the total."""
    total_bytes = len(lefts[0]) * rights[0].shape[1] * lefts[0].element_size()
    return Launched(len(lefts), repeated_bytes=2 * (len(lefts) - 1) * total_bytes)


register_cost(torch.ops.lean_ft.thin_products, Cost(_launch_for_each))
register_cost(torch.ops.lean_ft.sum_of_many_products, Cost(_launch_for_each_term))


class _JointContext(AutogradContext[*tuple[Tensor, ...]]):  # x, inner, every A, every B, and the weights as stored
    forms: tuple[Form, ...]
    scaling: float


class _JointLowRankLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _JointContext,
        x: Tensor,  # (..., I)
        forms: tuple[Form, ...],
        scaling: float,
        *tensors: Any,  # every A, every B, every bias or None, and the weights as they are stored
    ) -> tuple[Tensor, ...]:
        number, rows = len(forms), x.flatten(0, -2)  # (N, I)
        a, b, biases = (tensors[i * number : (i + 1) * number] for i in range(3))
        frozen, heights = _frozen(forms, tensors[3 * number :]), [form.shape[0] for form in forms]
        scaled, narrow = _factors([factor * scaling for factor in a], b, x.dtype, _on_diagonal(frozen, a))
        inner = rows @ scaled.T  # (N, sum of R)
        if len(narrow) < number:
            dense, bias = side_by_side(frozen, x.dtype), _joint_bias(biases, heights, rows)
            results = [sum_of_products(rows, dense.T, bias, inner, narrow[0].T)]
        else:
            each = zip(_weights(frozen, x.dtype), biases, inner.split(_ranks(a), 1), narrow, strict=True)
            results = [sum_of_products(rows, weight.T, bias, part, factor.T) for weight, bias, part, factor in each]
        ctx.save_for_backward(x, inner, *a, *b, *tensors[3 * number :])
        ctx.forms, ctx.scaling = forms, scaling
        return tuple(result.unflatten(0, x.shape[:-1]) for result in results)

    @staticmethod
    def backward(ctx: _JointContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, *tensors = ctx.saved_tensors
        number, rows = len(ctx.forms), x.flatten(0, -2)
        a, b, stored = tensors[:number], tensors[number : 2 * number], tensors[2 * number :]
        frozen, lefts = _frozen(ctx.forms, stored), [grad.flatten(0, -2) for grad in grads]  # (N, O) each
        thin, scaled = _factors(a, [factor * ctx.scaling for factor in b], x.dtype, _on_diagonal(frozen, a))
        grad_inner = thin_products(lefts, scaled)  # (N, sum of R)
        grads_y = lefts if len(lefts) == number else lefts[0].split([form.shape[0] for form in ctx.forms], 1)
        each = zip(grads_y, inner.split(_ranks(a), 1), b, strict=True)
        grads_b = [product_in(grad_y.T, part, factor.dtype) for grad_y, part, factor in each]
        grads_a = product_in(grad_inner.T, rows, a[0].dtype).split(_ranks(a))
        grad_x = None
        if ctx.needs_input_grad[0]:
            joins = len(lefts) < number
            weights = [side_by_side(frozen, x.dtype, again=True)] if joins else _weights(frozen, x.dtype, again=True)
            grad_x = sum_of_many_products([*lefts, grad_inner], [*weights, thin]).view(x.shape)
        return grad_x, None, None, *grads_a, *grads_b, *(None for _ in range(number + len(stored)))


def _frozen(forms: Sequence[Form], stored: Sequence[Tensor]) -> list[Frozen]:
    tensors = iter(stored)
    return [Frozen(form, tuple(next(tensors) for _ in TENSORS[form.kind])) for form in forms]


def _ranks(a: Sequence[Tensor]) -> list[int]:
    return [len(factor) for factor in a]


def _on_diagonal(frozen: Sequence[Frozen], a: Sequence[Tensor]) -> bool:
    """Whether the layers have one product, with their B as blocks on a diagonal."""
    return sum(_ranks(a)) <= _LARGEST_DIAGONAL and expands_together(frozen)


def _weights(frozen: Sequence[Frozen], dtype: torch.dtype, *, again: bool = False) -> Sequence[Tensor]:
    """The dense weight (O, I) of each layer."""
    if expands_together(frozen):
        return side_by_side(frozen, dtype, again=again).split([weight.form.shape[0] for weight in frozen])
    return [weight.whole(dtype, again=again) for weight in frozen]


def _factors(
    a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype, on_diagonal: bool
) -> tuple[Tensor, list[Tensor]]:
    """Every A, one below the other (sum of R, I), and every B (O, R), or all on a diagonal (sum of O, sum of R), in
    `dtype`. On a GPU, compiled, one kernel makes them."""
    ranks, num_inputs = _ranks(a), a[0].shape[1]
    if on_diagonal:
        before = [sum(ranks[:i]) for i in range(len(ranks))]
        after = [sum(ranks[i + 1 :]) for i in range(len(ranks))]
        b = [pad(factor, sides) for factor, *sides in zip(b, before, after, strict=True)]
    flat = torch.cat([factor.to(dtype).flatten() for factor in (*a, *b)])
    size = sum(ranks) * num_inputs
    thin = flat[:size].view(-1, num_inputs)
    if on_diagonal:
        return thin, [flat[size:].view(-1, sum(ranks))]
    parts = flat[size:].split([factor.numel() for factor in b])
    return thin, [part.view(factor.shape) for part, factor in zip(parts, b, strict=True)]


def _joint_bias(biases: Sequence[Tensor | None], heights: Sequence[int], like: Tensor) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    each = zip(biases, heights, strict=True)
    return torch.cat([like.new_zeros(height) if bias is None else bias.to(like.dtype) for bias, height in each])
