"""The weighted sum of experts' outputs, with a hand-written backward pass.

Tokens are sorted by expert, so that the experts' products run over consecutive rows (`grouped_matmul`). No shape depends on
the number of tokens of an expert, so the host never waits for the device and compiled graphs do not break.

The backward pass keeps the tokens (not their sorted copies) and the activation's gate and up. A token's weight multiplies the
activation instead of the expert's output, which is equivalent because the last projection is linear; so no output is kept for
the weight's gradient. Weights of inputs multiply gate and up in the same way.

Shapes: N tokens, D features, E experts, K experts per token, M = N * K rows sorted by expert, I intermediate features of
an expert, R rank of an adapter.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.models.config import MixtureConfig
from lean_ft.models.frozen_weight import TENSORS, Form, Frozen
from lean_ft.models.grouped_matmul import grouped_matmul, grouped_outer
from lean_ft.models.layers import ACTIVATIONS


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,  # (N, D)
        weights: Tensor,  # (N, K)
        chosen: Tensor,  # (N, K)
        gate_up_bias: Tensor | None,  # (E, 2 * I)
        config: MixtureConfig,
        forms: tuple[Form, Form],  # of gate_up and down
        *tensors: Tensor | None,  # of both `_stacks`
    ) -> Tensor:
        order, ends = _sort(chosen, config.num_experts)
        gate_up, down = _stacks(config, forms, tensors)
        factors = gate_up.product(_rows(tokens, order, config), ends)  # (M, 2 * I)
        if gate_up_bias is not None:
            factors += gate_up_bias.to(factors.dtype).index_select(0, chosen.flatten()[order])
        ctx.save_for_backward(tokens, weights, chosen, order, ends, factors, gate_up_bias, *tensors)
        ctx.config, ctx.forms = config, forms
        row_weights = weights.flatten()[order, None]
        if config.scales_input:
            inner = activation(_weighed(factors, row_weights), config)  # (M, I)
        else:
            inner = activation(factors, config).mul_(row_weights)
        return _sum_of_choices(down.product(inner, ends), order, config)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        tokens, weights, chosen, order, ends, factors, gate_up_bias, *tensors = ctx.saved_tensors
        config, trains = ctx.config, ctx.needs_input_grad
        gate_up, down = _stacks(config, ctx.forms, tensors)
        row_weights = weights.flatten()[order, None]  # (M, 1)
        grad_rows = _rows(grad, order, config)  # (M, D)
        weighed = _weighed(factors, row_weights) if config.scales_input else factors
        inner = activation(weighed, config)  # (M, I)
        grad_inner = down.product_back(grad_rows, ends)  # without the weights of outputs
        grad_weights = None
        if not config.scales_input:
            grad_weights = (inner * grad_inner).sum(-1, dtype=weights.dtype)
            inner.mul_(row_weights)
            grad_inner.mul_(row_weights)
        grads_down = down.gradients(inner, grad_rows, ends, trains=trains[-1])
        del inner, grad_rows
        grad_factors = activation_gradient(weighed, grad_inner, config)  # (M, 2 * I)
        del grad_inner, weighed
        if config.scales_input:
            grad_weights = (factors * grad_factors).sum(-1, dtype=weights.dtype)
            grad_factors.mul_(row_weights)
        assert grad_weights is not None
        grad_weights = torch.empty_like(grad_weights).scatter_(0, order, grad_weights).view_as(weights)
        grads_gate_up: list[Tensor | None] = [None] * (2 + len(gate_up.weight.tensors))
        if trains[8] or gate_up.left is not None:
            grads_gate_up = gate_up.gradients(_rows(tokens, order, config), grad_factors, ends, trains=trains[8])
        grad_bias = grad_tokens = None
        if trains[3]:
            experts = torch.arange(config.num_experts, device=chosen.device)[:, None]
            is_of_expert = (chosen.flatten()[order] == experts).to(grad_factors.dtype)  # (E, M)
            grad_bias = (is_of_expert @ grad_factors).to(gate_up_bias.dtype)
        if trains[0]:
            grad_tokens = _sum_of_choices(gate_up.product_back(grad_factors, ends), order, config)
        return grad_tokens, grad_weights, None, grad_bias, None, None, *grads_gate_up, *grads_down


class _Stack(NamedTuple):
    """One projection of all experts: its weight, and the low-rank matrices of an adapter or None twice."""

    weight: Frozen
    input_first: bool
    left: Tensor | None  # (E, inputs, R)
    right: Tensor | None  # (E, R, outputs)

    def product(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Each row (M, inputs) times its expert's matrix, plus the low-rank product if there is an adapter: (M, outputs)."""
        weight = self.weight.whole(rows.dtype)
        return _product(rows, weight if self.input_first else weight.mT, self.left, self.right, ends)

    def product_back(self, grad: Tensor, ends: Tensor) -> Tensor:
        """The gradient of the rows of `product`."""
        weight = self.weight.whole(grad.dtype, again=True)
        left, right = (None if factor is None else factor.mT for factor in (self.left, self.right))
        return _product(grad, weight.mT if self.input_first else weight, right, left, ends)

    def gradients(self, rows: Tensor, grad: Tensor, ends: Tensor, *, trains: bool) -> list[Tensor | None]:
        """The gradients of the low-rank matrices, and of the stored tensors if the weight trains."""
        found: list[Tensor | None] = [None] * (2 + len(self.weight.tensors))
        if trains:  # in the layout of the weight; autograd converts it to the dtype of the weight
            found[2] = grouped_outer(rows, grad, ends) if self.input_first else grouped_outer(grad, rows, ends)
        if self.left is not None and self.right is not None:
            found[0] = grouped_outer(rows, grouped_matmul(grad, self.right.mT, ends), ends)
            found[1] = grouped_outer(grouped_matmul(rows, self.left, ends), grad, ends)
        return found


def _stacks(config: MixtureConfig, forms: tuple[Form, Form], tensors: Sequence[Any]) -> list[_Stack]:
    """The gate and up projection and the down projection; of each, `tensors` has left, right and the stored weight."""
    end = 2 + len(TENSORS[forms[0].kind])
    pieces = zip(forms, (tensors[:end], tensors[end:]), strict=True)
    return [_Stack(Frozen(form, tuple(own[2:])), config.input_first, *own[:2]) for form, own in pieces]


def _product(rows: Tensor, matrices: Tensor, left: Tensor | None, right: Tensor | None, ends: Tensor) -> Tensor:
    projected = grouped_matmul(rows, matrices, ends)
    if left is not None and right is not None:
        projected += grouped_matmul(grouped_matmul(rows, left, ends), right, ends)
    return projected


def _sort(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order (M,) of the choices by expert, and the end (E,) int32 of each expert's rows."""
    experts, order = chosen.flatten().sort(stable=True)
    every = torch.arange(num_experts, device=experts.device)
    return order, torch.searchsorted(experts, every, right=True, out_int32=True)


def _rows(tokens: Tensor, order: Tensor, config: MixtureConfig) -> Tensor:
    """A copy (M, D) of each token per chosen expert, sorted by expert."""
    return tokens.index_select(0, order // config.experts_per_token)


def _sum_of_choices(rows: Tensor, order: Tensor, config: MixtureConfig) -> Tensor:
    """The sum (N, D) of each token's rows (M, D)."""
    # Unlike index_add, this sums in float32 and in a fixed order.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return F.embedding_bag(places.view(-1, config.experts_per_token), rows, mode="sum")


def _weighed(factors: Tensor, row_weights: Tensor) -> Tensor:
    return (factors * row_weights).to(factors.dtype)


def _gate_and_up(factors: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """Views (M, I) of the two halves of (M, 2 * I)."""
    if config.gates_interleaved:
        return factors[:, ::2], factors[:, 1::2]
    gate, up = factors.chunk(2, dim=-1)
    return gate, up


def _clamped(factors: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """The activation's argument, and up with its offset."""
    gate, up = _gate_and_up(factors, config)
    if config.limit is not None:
        gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    if config.gate_scale != 1.0:
        gate = gate * config.gate_scale
    return gate, up + config.up_offset if config.up_offset else up


def activation(factors: Tensor, config: MixtureConfig) -> Tensor:
    if not config.gated:
        return factors.relu().square_()
    gate, up = _clamped(factors, config)
    product = ACTIVATIONS[config.activation].value(gate).mul_(up)
    return product if config.gate_scale == 1.0 else product.div_(config.gate_scale)


def activation_gradient(factors: Tensor, grad: Tensor, config: MixtureConfig) -> Tensor:
    if not config.gated:
        return factors.relu().mul_(grad).mul_(2)
    gate, up = _clamped(factors, config)
    value, backward = ACTIVATIONS[config.activation]
    result = torch.empty_like(factors)
    grad_gate, grad_up = _gate_and_up(result, config)
    grad_gate.copy_(backward(grad * up, gate))
    grad_up.copy_(value(gate).mul_(grad))
    if config.gate_scale != 1.0:
        grad_up.div_(config.gate_scale)
    if config.limit is not None:
        gate, up = _gate_and_up(factors, config)
        grad_gate.masked_fill_(gate > config.limit, 0)
        grad_up.masked_fill_(up.abs() > config.limit, 0)
    return result
