"""A mixture of experts: a router sends each token to a few of many feed-forward layers and weighs what they return.

Tokens are sorted by expert, so that the experts' products run over neighbouring rows (`grouped_matmul`), and no shape
depends on how many tokens an expert got: nothing waits for the device and nothing breaks a compiled graph. Experts
are stacked in one parameter a projection; one that saw no token gets a zero gradient.

The backward pass is written by hand. It keeps the tokens, not their copies sorted by expert, and of the experts' own
results only the two factors of the activation. A token's weight multiplies the activation rather than the expert's
output, which the last projection, being linear, does not mind: so no output is kept for the weight's gradient. Where it
multiplies the expert's input, it multiplies these two factors in the same way.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; the balance of the router's load is Fedus et al.'s
(2021, https://arxiv.org/abs/2101.03961).

Shapes: N tokens, D features, E experts, K experts a token, M = N * K rows sorted by expert, I an expert's
intermediate features.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.config import MixtureConfig
from lean_ft.models.grouped_matmul import grouped_matmul, grouped_outer
from lean_ft.models.layers import ACTIVATIONS, MLP, is_gated, unit_rms, wide, wide_dtype


class Router(nn.Module):
    """Scores every expert for every token: a linear layer."""

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.is_wide = config.wide_router
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        if config.corrected:  # set by pretraining, which balances the experts' load by it, and left as it is
            shape = (1, config.num_experts) if config.correction_is_row else (config.num_experts,)
            self.e_score_correction_bias = nn.Buffer(torch.empty(shape))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_wide:
            with torch.autocast(tokens.device.type, enabled=False):
                return F.linear(tokens.to(wide_dtype(self.weight)), wide(self.weight))
        return F.linear(tokens, self.weight, self.bias)  # (N, E)

    def choose(self, logits: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
        """The weights (N, K) of each token's experts, and which these are (N, K), by the router's logits (N, E)."""
        logits = wide(logits)
        if config.margin is not None:
            return _one_after_another(logits, config.experts_per_token, config.margin)
        if config.score == "softmax" and not config.corrected and config.weights_sum_to_one:
            logits, chosen = logits.topk(config.experts_per_token)
            return logits.softmax(-1) * config.weights_factor, chosen
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        # Those of logits where nothing is added to them: far from 0 sigmoids round to one number.
        ranks = scores.detach() if config.corrected or config.num_groups > 1 else logits.detach()
        if config.corrected:
            ranks = ranks + self.e_score_correction_bias
        if config.num_groups > 1:
            groups = ranks.unflatten(-1, (config.num_groups, -1))  # (N, groups, experts of one)
            best = groups.topk(2).values.sum(-1).topk(config.groups_per_token).indices
            is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
            ranks = groups.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
        chosen = ranks.topk(config.experts_per_token).indices
        weights = scores.gather(-1, chosen)
        if config.weights_sum_to_one:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.weights_factor, chosen


def _one_after_another(logits: Tensor, experts_per_token: int, margin: float) -> tuple[Tensor, Tensor]:
    """Of each token the best expert, then the best of the others, and so on (Liu et al. 2024, https://arxiv.org/abs/2409.12136,
    without its draws): weights and experts (N, K)."""
    weights, chosen, left = [], [], logits
    for _ in range(experts_per_token):
        best, index = left.detach().max(-1, keepdim=True)
        is_far = (best - logits.detach()) / logits.detach().abs().maximum(best) > margin
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


class NormedRouter(nn.Module):
    """A linear layer of what is scaled to a root mean square of 1 and by a number a feature; beside it each expert has a
    number that its weights are multiplied by (Gemma 4)."""

    def __init__(self, hidden_size: int, num_experts: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.empty(hidden_size))
        self.proj = nn.Linear(hidden_size, num_experts, bias=False)
        self.per_expert_scale = nn.Parameter(torch.empty(num_experts))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.proj(unit_rms(tokens, self.eps) * self.scale * tokens.shape[-1] ** -0.5)  # (N, E)

    def choose(self, logits: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
        best, chosen = wide(logits).topk(config.experts_per_token)
        return best.softmax(-1) * self.per_expert_scale[chosen], chosen


_Thin = Sequence[Tensor | None]  # left (E, D, R) and right (E, R, I), or None twice
NO_THIN_PRODUCT = (None, None)


class Experts(nn.Module):
    """The experts' projections, stacked."""

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        assert not (config.weighs_input and config.expert_bias), "a bias is not weighed"
        num_experts, inner = config.num_experts, config.intermediate_size
        projected = 2 * inner if is_gated(config.activation) else inner
        into, out_of = (projected, hidden_size), (hidden_size, inner)
        if config.input_first:
            into, out_of = into[::-1], out_of[::-1]
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, *into))
        self.down_proj = nn.Parameter(torch.empty(num_experts, *out_of))
        self.gate_up_proj_bias = self.down_proj_bias = None
        if config.expert_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, projected))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        thin_gate_up: _Thin = NO_THIN_PRODUCT,
        thin_down: _Thin = NO_THIN_PRODUCT,
    ) -> Tensor:
        """tokens (N, D); weights (N, K) of the experts chosen (N, K); returns (N, D).

        Products of two thin matrices an expert are added to frozen projections: (E, D, R) and (E, R, 2 * I) to the one
        of gates and ups, (E, I, R) and (E, R, D) to the one down.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        if torch.is_autocast_enabled(tokens.device.type):
            dtype = torch.get_autocast_dtype(tokens.device.type)
            tokens, gate_up, down = tokens.to(dtype), gate_up.to(dtype), down.to(dtype)
        bias, thin = self.gate_up_proj_bias, (*thin_gate_up, *thin_down)
        mixed = _Mix.apply(tokens, weights, chosen, gate_up, bias, down, self.config, *thin)
        if self.down_proj_bias is not None:
            spread = torch.zeros_like(weights[:, :1]).expand(-1, self.config.num_experts).scatter(1, chosen, weights)
            mixed = mixed + spread.to(mixed.dtype) @ self.down_proj_bias.to(mixed.dtype)
        return mixed


class MixtureOfExperts(nn.Module):
    """A feed-forward layer in which each token meets only the experts that its router chose."""

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        eps = config.router_norm_eps
        router = Router(hidden_size, config) if eps is None else NormedRouter(hidden_size, config.num_experts, eps)
        self.add_module(config.router_name, router)
        self.experts = Experts(hidden_size, config)
        if config.shared_intermediate_size:
            sizes, kind = (hidden_size, config.shared_intermediate_size), (config.activation, config.shared_is_fused)
            shared = MLP(*sizes, False, *kind)
            self.add_module(config.shared_name, shared)
        if config.shared_gate:
            self.add_module(f"{config.shared_name}_gate", nn.Linear(hidden_size, 1, bias=False))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (..., D), which the router sees too unless something else of that shape is `seen`; returns what the experts make
        of x (..., D), and the router's logits (N, E)."""
        tokens = x.flatten(0, -2)
        router = getattr(self, self.config.router_name)
        logits = router(tokens if seen is None else seen.flatten(0, -2))
        weights, chosen = _router_of(router).choose(logits, self.config)
        mixed = self.experts(tokens, weights, chosen)
        if self.config.shared_intermediate_size:
            shared = getattr(self, self.config.shared_name)(tokens)
            if self.config.shared_gate:
                shared = shared * getattr(self, f"{self.config.shared_name}_gate")(tokens).sigmoid()
            mixed = mixed + shared
        return mixed.view(x.shape), logits


def _router_of(layer: nn.Module) -> Router | NormedRouter:
    """The router itself, where an adapter is in its place."""
    router = getattr(layer, "base_layer", layer)
    assert isinstance(router, Router | NormedRouter)
    return router


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    experts_per_token: int,
    is_token: Tensor | None,
    over_row: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """Returns how unevenly the routers of all layers load their experts, a float32 scalar: K if evenly, up to E.

    It is E * sum over experts of (choices a token) * (mean probability), the means being over the tokens of all layers
    together. router_logits: (N, E) a layer; is_token (N,) bool: False for padding, which does not count. `over_row` sums over
    the ranks that share the tokens, where several do.
    """
    num_experts = router_logits[0].shape[1]
    counted = torch.ones_like(router_logits[0][:, :1]) if is_token is None else is_token.view(-1, 1)
    counted = counted.float()  # (N, 1)
    choices = probability = torch.zeros(num_experts, device=counted.device)
    for logits in router_logits:
        chosen = logits.detach().topk(experts_per_token).indices
        choices = choices.scatter_add(0, chosen.flatten(), counted.expand_as(chosen).flatten())
        probability = probability + (logits.float().softmax(-1) * counted).sum(0)
    sums = over_row(torch.cat((choices, probability, counted.sum().view(1))))
    choices, probability, num_tokens = sums.split((num_experts, num_experts, 1))
    num_counted = num_tokens.clamp(min=1) * len(router_logits)
    return num_experts * (choices / num_counted) @ (probability / num_counted)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,  # (N, D)
        weights: Tensor,  # (N, K)
        chosen: Tensor,  # (N, K)
        gate_up: Tensor,
        gate_up_bias: Tensor | None,  # (E, 2 * I)
        down: Tensor,
        config: MixtureConfig,
        *thin: Tensor | None,  # the two of gate_up and the two of down
    ) -> Tensor:
        order, ends = _sort(chosen, config.num_experts)
        into, out_of = _input_first(gate_up, down, config)  # (E, D, 2 * I), (E, I, D)
        factors = _project(_rows(tokens, order, config), into, thin[:2], ends)  # (M, 2 * I)
        if gate_up_bias is not None:
            factors += gate_up_bias.to(factors.dtype).index_select(0, chosen.flatten()[order])
        ctx.save_for_backward(tokens, weights, chosen, order, ends, factors, gate_up, gate_up_bias, down, *thin)
        ctx.config = config
        row_weights = weights.flatten()[order, None]
        if config.weighs_input:
            inner = _activation(_weighed(factors, row_weights), config)  # (M, I)
        else:
            inner = _activation(factors, config).mul_(row_weights)
        return _sum_of_choices(_project(inner, out_of, thin[2:], ends), order, config)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, chosen, order, ends, factors, gate_up, gate_up_bias, down, *thin = ctx.saved_tensors
        config = ctx.config
        into, out_of = _input_first(gate_up, down, config)
        row_weights = weights.flatten()[order, None]  # (M, 1)
        grad_rows = _rows(grad, order, config)  # (M, D)
        weighed = _weighed(factors, row_weights) if config.weighs_input else factors
        inner = _activation(weighed, config)  # (M, I)
        grad_inner = _project_back(grad_rows, out_of, thin[2:], ends)  # with weights of results as if they were 1
        if not config.weighs_input:
            grad_weights = (inner * grad_inner).sum(-1, dtype=weights.dtype)
            inner.mul_(row_weights)
            grad_inner.mul_(row_weights)
        grad_down = None
        if ctx.needs_input_grad[5]:
            grad_down = _outer(inner, grad_rows, ends, config)
        grad_thin_down = _thin_gradients(inner, grad_rows, thin[2:], ends)
        del inner, grad_rows
        grad_factors = _activation_gradient(weighed, grad_inner, config)  # (M, 2 * I)
        del grad_inner, weighed
        if config.weighs_input:
            grad_weights = (factors * grad_factors).sum(-1, dtype=weights.dtype)
            grad_factors.mul_(row_weights)
        grad_weights = torch.empty_like(grad_weights).scatter_(0, order, grad_weights).view_as(weights)
        grad_gate_up = grad_bias = None
        if ctx.needs_input_grad[3]:
            grad_gate_up = _outer(_rows(tokens, order, config), grad_factors, ends, config)
        if ctx.needs_input_grad[4]:
            experts = torch.arange(config.num_experts, device=chosen.device)[:, None]
            is_of_expert = (chosen.flatten()[order] == experts).to(grad_factors.dtype)  # (E, M)
            grad_bias = (is_of_expert @ grad_factors).to(gate_up_bias.dtype)
        grad_thin_gate_up = None, None
        if thin[0] is not None:
            grad_thin_gate_up = _thin_gradients(_rows(tokens, order, config), grad_factors, thin[:2], ends)
        grad_tokens = None
        if ctx.needs_input_grad[0]:
            grad_tokens = _sum_of_choices(_project_back(grad_factors, into, thin[:2], ends), order, config)
        grads = grad_tokens, grad_weights, None, grad_gate_up, grad_bias, grad_down, None
        return *grads, *grad_thin_gate_up, *grad_thin_down


def _project(rows: Tensor, matrices: Tensor, thin: _Thin, ends: Tensor) -> Tensor:
    """Each row (M, D) times its expert's matrix (E, D, I), plus the thin product where there is one."""
    projected = grouped_matmul(rows, matrices, ends)
    left, right = thin
    if left is not None and right is not None:
        projected += grouped_matmul(grouped_matmul(rows, left, ends), right, ends)
    return projected


def _project_back(grad: Tensor, matrices: Tensor, thin: _Thin, ends: Tensor) -> Tensor:
    """The gradient of the rows of `_project`: a product with everything transposed."""
    left, right = (None if factor is None else factor.mT for factor in thin)
    return _project(grad, matrices.mT, (right, left), ends)


def _thin_gradients(rows: Tensor, grad: Tensor, thin: _Thin, ends: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the thin matrices of `_project`."""
    left, right = thin
    if left is None or right is None:
        return None, None
    grad_left = grouped_outer(rows, grouped_matmul(grad, right.mT, ends), ends)
    return grad_left, grouped_outer(grouped_matmul(rows, left, ends), grad, ends)


def _sort(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The choices (M,) in the order of their experts, and where each expert's end (E,) int32."""
    experts, order = chosen.flatten().sort(stable=True)
    every = torch.arange(num_experts, device=experts.device)
    return order, torch.searchsorted(experts, every, right=True, out_int32=True)


def _rows(tokens: Tensor, order: Tensor, config: MixtureConfig) -> Tensor:
    """A copy (M, D) of each token for each of its choices, sorted by expert."""
    return tokens.index_select(0, order // config.experts_per_token)


def _sum_of_choices(rows: Tensor, order: Tensor, config: MixtureConfig) -> Tensor:
    """The inverse of `_rows`, where a token's copies (M, D) add up to one (N, D)."""
    # It sums in float32, and in the same order each time, which adding rows onto one another would not.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return F.embedding_bag(places.view(-1, config.experts_per_token), rows, mode="sum")


def _input_first(gate_up: Tensor, down: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    return (gate_up, down) if config.input_first else (gate_up.mT, down.mT)


def _outer(inputs: Tensor, grads: Tensor, ends: Tensor, config: MixtureConfig) -> Tensor:
    """The gradient of a projection, in its own layout."""
    return grouped_outer(inputs, grads, ends) if config.input_first else grouped_outer(grads, inputs, ends)


def _weighed(factors: Tensor, row_weights: Tensor) -> Tensor:
    return (factors * row_weights).to(factors.dtype)


def _gate_and_up(factors: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """Views (M, I) of the two halves of (M, 2 * I)."""
    if config.gates_alternate:
        return factors[:, ::2], factors[:, 1::2]
    gate, up = factors.chunk(2, dim=-1)
    return gate, up


def _clamped(factors: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """What is multiplied: the activation's argument, and the up-projection with its offset."""
    gate, up = _gate_and_up(factors, config)
    if config.limit is not None:
        gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    if config.gate_scale != 1.0:
        gate = gate * config.gate_scale
    return gate, up + config.up_offset if config.up_offset else up


def _activation(factors: Tensor, config: MixtureConfig) -> Tensor:
    if not is_gated(config.activation):
        return factors.relu().square_()
    gate, up = _clamped(factors, config)
    product = ACTIVATIONS[config.activation].value(gate).mul_(up)
    return product if config.gate_scale == 1.0 else product.div_(config.gate_scale)


def _activation_gradient(factors: Tensor, grad: Tensor, config: MixtureConfig) -> Tensor:
    if not is_gated(config.activation):
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
