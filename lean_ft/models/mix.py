"""The weighted sum of experts' outputs, with a hand-written backward pass.

Tokens are sorted by expert, so that the experts' products run over consecutive rows (`grouped_matmul`). No shape
depends on the number of tokens of an expert, so the host never waits for the device and compiled graphs do not break.

The backward pass keeps the tokens (not their sorted copies) and the activation's gate and up. A token's weight
multiplies the activation instead of the expert's output, which is equivalent because the last projection is linear; so
no output is kept for the weight's gradient. Weights of inputs multiply gate and up in the same way.

On a GPU with Triton, one kernel computes the activation and its gradient, with the bias and the row weights, and one
the sum of each token's rows. Other devices compute one operation at a time.

Shapes: N tokens, D features, E experts, K experts per token, M = N * K rows sorted by expert, I intermediate features
of an expert, R rank of an adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.models.config import MixtureConfig
from lean_ft.models.frozen_weight import TENSORS, Form, Frozen
from lean_ft.models.grouped_matmul import add_grouped_matmul, grouped_matmul, grouped_outer
from lean_ft.models.layers import ACTIVATIONS, is_on_cuda
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import register_cost
from lean_ft.system.triton_compiler import HAS_TRITON

FormulaArguments = tuple[
    str, bool, bool, float, float, float | None, bool
]  # the last arguments of `grouped_activation`
ActivationArguments = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, bool, *FormulaArguments]


class _MixContext(
    # tokens, weights, chosen, order, ends, factors, gate_up_bias, and the tensors of both stacks
    AutogradContext[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, *tuple[Tensor | None, ...]]
):
    config: MixtureConfig
    formula: "ExpertFormula"
    forms: tuple[Form, Form]


@dataclass(frozen=True)
class ExpertFormula:
    """What each expert computes between its two projections, and how these are stored. Kernels read it."""

    activation: str = "silu"  # relu2 has an up projection alone, other activations a gate too
    gates_interleaved: bool = False  # gate and up features alternate; False: all gates first
    gate_scale: float = 1.0  # the activation is silu(gate_scale * gate) / gate_scale
    up_offset: float = 0.0  # the activation is multiplied by up + up_offset
    limit: float | None = None  # gates are clamped from above, ups from both sides
    scales_input: bool = False  # weights multiply the experts' inputs, not their outputs
    input_first: bool = False  # projections are (D, 2 * I) and (I, D), not (2 * I, D) and (D, I)

    @classmethod
    def of(cls, config: MixtureConfig, **facts: Any) -> Self:
        """The usual formula of a mixture; `facts` are a family's other values."""
        return cls(config.activation, **facts)

    @property
    def gated(self) -> bool:
        return self.activation != "relu2"

    def for_kernel(self) -> FormulaArguments:
        """The last arguments of `grouped_activation`."""
        factors = self.gate_scale, self.up_offset, self.limit
        return self.activation, self.gated, self.gates_interleaved, *factors, self.scales_input


class MixedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _MixContext,
        tokens: Tensor,  # (N, D)
        weights: Tensor,  # (N, K)
        chosen: Tensor,  # (N, K)
        gate_up_bias: Tensor | None,  # (E, 2 * I)
        config: MixtureConfig,
        formula: ExpertFormula,
        forms: tuple[Form, Form],  # of gate_up and down
        *tensors: Tensor | None,  # of both `_stacks`
    ) -> Tensor:
        order, ends = _sort(chosen, config.num_experts)
        gate_up, down = _stacks(formula, forms, tensors)
        factors = gate_up.product(_rows(tokens, order, config), ends)  # (M, 2 * I)
        row_weights, experts, fused = weights.flatten()[order, None], chosen.flatten()[order], _is_fused(factors)
        if gate_up_bias is not None and not fused:
            factors += gate_up_bias.to(factors.dtype).index_select(0, experts)
        ctx.save_for_backward(tokens, weights, chosen, order, ends, factors, gate_up_bias, *tensors)
        ctx.config, ctx.formula, ctx.forms = config, formula, forms
        if fused:
            rows = factors, row_weights, gate_up_bias, experts
            inner, _, _ = grouped_activation(*rows, None, True, *formula.for_kernel())
        elif formula.scales_input:
            inner = activation(_weighed(factors, row_weights), formula)  # (M, I)
        else:
            inner = activation(factors, formula).mul_(row_weights)
        return _sum_of_choices(down.product(inner, ends), order, config)

    @staticmethod
    def backward(ctx: _MixContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        tokens, weights, chosen, order, ends, factors, gate_up_bias, *tensors = ctx.saved_tensors
        config, formula, trains = ctx.config, ctx.formula, ctx.needs_input_grad
        gate_up, down = _stacks(formula, ctx.forms, tensors)
        row_weights = weights.flatten()[order, None]  # (M, 1)
        grad_rows = _rows(grad, order, config)  # (M, D)
        thin = down.thin_back(grad_rows, ends)
        grad_inner = down.product_back(grad_rows, thin, ends)  # without the weights of outputs
        if _is_fused(factors):
            experts, needs_inner = chosen.flatten()[order], trains[-1] or down.left is not None
            rows = factors, row_weights, gate_up_bias, experts, grad_inner
            inner, grad_factors, grad_weights = grouped_activation(*rows, needs_inner, *formula.for_kernel())
            del grad_inner, rows
            grads_down = down.gradients(inner, grad_rows, thin, ends, trains=trains[-1])
            del inner, grad_rows
        else:
            grad_weights = None
            weighed = _weighed(factors, row_weights) if formula.scales_input else factors
            inner = activation(weighed, formula)  # (M, I)
            if not formula.scales_input:
                grad_weights = (inner * grad_inner).sum(-1, dtype=weights.dtype)
                inner.mul_(row_weights)
                grad_inner.mul_(row_weights)
            grads_down = down.gradients(inner, grad_rows, thin, ends, trains=trains[-1])
            del inner, grad_rows
            grad_factors = activation_gradient(weighed, grad_inner, formula)  # (M, 2 * I)
            del grad_inner, weighed
            if formula.scales_input:
                grad_weights = (factors * grad_factors).sum(-1, dtype=weights.dtype)
                grad_factors.mul_(row_weights)
            assert grad_weights is not None
        grad_weights = torch.empty_like(grad_weights).scatter_(0, order, grad_weights).view_as(weights)
        grads_gate_up: list[Tensor | None] = [None] * (2 + len(gate_up.weight.tensors))
        thin = gate_up.thin_back(grad_factors, ends)
        if trains[9] or gate_up.left is not None:
            rows = _rows(tokens, order, config)
            grads_gate_up = gate_up.gradients(rows, grad_factors, thin, ends, trains=trains[9])
            del rows
        grad_bias = grad_tokens = None
        if gate_up_bias is not None and trains[3]:
            experts = torch.arange(config.num_experts, device=chosen.device)[:, None]
            is_of_expert = (chosen.flatten()[order] == experts).to(grad_factors.dtype)  # (E, M)
            grad_bias = (is_of_expert @ grad_factors).to(gate_up_bias.dtype)
        if trains[0]:
            grad_tokens = _sum_of_choices(gate_up.product_back(grad_factors, thin, ends), order, config)
        return grad_tokens, grad_weights, None, grad_bias, None, None, None, *grads_gate_up, *grads_down


class _Stack(NamedTuple):
    """One projection of all experts: its weight, and the low-rank matrices of an adapter or None twice."""

    weight: Frozen
    input_first: bool
    left: Tensor | None  # (E, inputs, R)
    right: Tensor | None  # (E, R, outputs)

    def product(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Each row (M, inputs) times its expert's matrix, plus the low-rank product if there is an adapter: (M,
        outputs)."""
        weight, expert_ends = self._matrices(rows, ends, again=False)
        projected = grouped_matmul(rows, weight if self.input_first else weight.mT, expert_ends)
        if self.left is not None and self.right is not None:
            _add_product(projected, grouped_matmul(rows, self.left, ends), self.right, ends)
        return projected

    def thin_back(self, grad: Tensor, ends: Tensor) -> Tensor | None:
        """The gradient (M, R) of the rows times `left`, or None without an adapter."""
        return None if self.right is None else grouped_matmul(grad, self.right.mT, ends)

    def product_back(self, grad: Tensor, thin: Tensor | None, ends: Tensor) -> Tensor:
        """The gradient of the rows of `product`. thin: of `thin_back`."""
        weight, expert_ends = self._matrices(grad, ends, again=True)
        projected = grouped_matmul(grad, weight.mT if self.input_first else weight, expert_ends)
        if thin is not None and self.left is not None:
            _add_product(projected, thin, self.left.mT, ends)
        return projected

    def _matrices(self, rows: Tensor, ends: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:
        """The dense matrices, and the ends of their rows. If a quantized stack has more experts than there are rows,
        each row gets a copy of its expert's matrix, and the other experts are not expanded."""
        if self.weight.form.kind == "plain" or not 0 < len(rows) < len(ends):
            return self.weight.whole(rows.dtype, again=again), ends
        row = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        return self.weight.whole(rows.dtype, torch.searchsorted(ends, row, right=True), again=again), row + 1

    def gradients(
        self, rows: Tensor, grad: Tensor, thin: Tensor | None, ends: Tensor, *, trains: bool
    ) -> list[Tensor | None]:
        """The gradients of the low-rank matrices, and of the stored tensors if the weight trains. thin: of
        `thin_back`."""
        grads: list[Tensor | None] = [None] * (2 + len(self.weight.tensors))
        if trains:  # in the layout of the weight; autograd converts it to the dtype of the weight
            grads[2] = grouped_outer(rows, grad, ends) if self.input_first else grouped_outer(grad, rows, ends)
        if self.left is not None and thin is not None:
            grads[0] = grouped_outer(rows, thin, ends)
            grads[1] = grouped_outer(grouped_matmul(rows, self.left, ends), grad, ends)
        return grads


def _stacks(formula: ExpertFormula, forms: tuple[Form, Form], tensors: Sequence[Any]) -> list[_Stack]:
    """The gate and up projection and the down projection; of each, `tensors` has left, right and the stored weight."""
    end = 2 + len(TENSORS[forms[0].kind])
    pieces = zip(forms, (tensors[:end], tensors[end:]), strict=True)
    return [_Stack(Frozen(form, tuple(part[2:])), formula.input_first, *part[:2]) for form, part in pieces]


def _add_product(total: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    if is_on_cuda(total):
        add_grouped_matmul(total, rows, matrices, ends)
    else:
        total += grouped_matmul(rows, matrices, ends)


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
    places = places.view(-1, config.experts_per_token)
    return summed_rows(rows, places) if _is_fused(rows) else F.embedding_bag(places, rows, mode="sum")


@torch.library.custom_op("lean_ft::summed_rows", mutates_args=())
def summed_rows(rows: Tensor, places: Tensor) -> Tensor:
    """The sums (N, D) of rows (M, D) at places (N, K)."""
    from lean_ft.models.expert_kernels import sum_rows

    out = rows.new_empty(len(places), rows.shape[1])
    sum_rows(rows, places, out)
    return out


@summed_rows.register_fake
def _(rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


register_cost(torch.ops.lean_ft.summed_rows)


def _weighed(factors: Tensor, row_weights: Tensor) -> Tensor:
    return (factors * row_weights).to(factors.dtype)


def _is_fused(factors: Tensor) -> bool:
    """Whether one kernel computes the activation and its gradient: on a GPU with Triton, and in a plan of a GPU."""
    return is_on_cuda(factors) and factors.dtype != torch.float64 and (HAS_TRITON or not factors.is_cuda)


def _results(*arguments: *ActivationArguments) -> tuple[Tensor, Tensor, Tensor]:
    """The empty results of `grouped_activation`."""
    factors, row_weights, _, _, grad_inner, needs_inner, _, gated, *_ = arguments
    num_rows, width = factors.shape
    num_grads = 0 if grad_inner is None else num_rows
    inner = factors.new_empty(num_rows if needs_inner else 0, width // 2 if gated else width)
    return inner, factors.new_empty(num_grads, width), row_weights.new_empty(num_grads)


@torch.library.custom_op(
    "lean_ft::grouped_activation",
    mutates_args=(),
    schema="(Tensor factors, Tensor row_weights, Tensor? bias, Tensor experts, Tensor? grad_inner, bool needs_inner, "
    "str activation, bool gated, bool interleaved, float gate_scale, float up_offset, float? limit, bool scales_input) "
    "-> (Tensor, Tensor, Tensor)",
)
def grouped_activation(*arguments: *ActivationArguments) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted activation (M, I), and from its gradient those of the factors (M, 2 * I) and of the row weights
    (M,).

    factors: without their bias (E, 2 * I). row_weights (M, 1). experts (M,): of each row. grad_inner (M, I): if outputs
    are weighed, without their weights; None: the gradients are empty. If not `needs_inner`, the activation is empty.
    """
    from lean_ft.models.expert_kernels import activate

    results = _results(*arguments)
    activate(results, *arguments)
    return results


grouped_activation.register_fake(_results)
register_cost(torch.ops.lean_ft.grouped_activation)


def _gate_and_up(factors: Tensor, formula: ExpertFormula) -> tuple[Tensor, Tensor]:
    """Views (M, I) of the two halves of (M, 2 * I)."""
    if formula.gates_interleaved:
        return factors[:, ::2], factors[:, 1::2]
    gate, up = factors.chunk(2, dim=-1)
    return gate, up


def _clamped(factors: Tensor, formula: ExpertFormula) -> tuple[Tensor, Tensor]:
    """The activation's argument, and up with its offset."""
    gate, up = _gate_and_up(factors, formula)
    if formula.limit is not None:
        gate, up = gate.clamp(max=formula.limit), up.clamp(-formula.limit, formula.limit)
    if formula.gate_scale != 1.0:
        gate = gate * formula.gate_scale
    return gate, up + formula.up_offset if formula.up_offset else up


def activation(factors: Tensor, formula: ExpertFormula) -> Tensor:
    if not formula.gated:
        return factors.relu().square_()
    gate, up = _clamped(factors, formula)
    product = ACTIVATIONS[formula.activation].value(gate).mul_(up)
    return product if formula.gate_scale == 1.0 else product.div_(formula.gate_scale)


def activation_gradient(factors: Tensor, grad: Tensor, formula: ExpertFormula) -> Tensor:
    if not formula.gated:
        return factors.relu().mul_(grad).mul_(2)
    gate, up = _clamped(factors, formula)
    value, backward = ACTIVATIONS[formula.activation]
    result = torch.empty_like(factors)
    grad_gate, grad_up = _gate_and_up(result, formula)
    grad_gate.copy_(backward(grad * up, gate))
    grad_up.copy_(value(gate).mul_(grad))
    if formula.gate_scale != 1.0:
        grad_up.div_(formula.gate_scale)
    if formula.limit is not None:
        gate, up = _gate_and_up(factors, formula)
        grad_gate.masked_fill_(gate > formula.limit, 0)
        grad_up.masked_fill_(up.abs() > formula.limit, 0)
    return result
