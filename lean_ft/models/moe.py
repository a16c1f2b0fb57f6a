"""Mixture of experts: a router sends each token to a few of many feed-forward layers and sums their weighted outputs.

Experts are stacked in one parameter per projection; an expert without tokens gets a zero gradient. `mix` computes their
sum.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; load balancing: Fedus et al. 2021,
https://arxiv.org/abs/2101.03961.

Shapes: N tokens, D features, E experts, K experts per token, I intermediate features of an expert, R rank of an
adapter.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.config import DecoderConfig, MixtureConfig
from lean_ft.models.frozen_weight import Frozen, as_frozen, product_dtype
from lean_ft.models.layers import MLP, wide, wide_dtype
from lean_ft.models.mix import ExpertFormula, MixedExperts, activation


class Router(nn.Module):
    """A linear layer that scores every expert for every token.

    A family with another router overrides `add_others`, `ranks` or `choose`, or has a module with the same calls.
    """

    # Added to the sum of a token's weights that divides them, unless a softmax normalizes them.
    weights_sum_offset = 1e-20
    # A group's score is the sum of this many best scores of its experts.
    scores_per_group = 2

    @classmethod
    def of(cls, config: DecoderConfig, mixture: MixtureConfig) -> Self:
        """The router of one of the decoder's layers."""
        return cls(config.hidden_size, mixture)

    def __init__(self, hidden_size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.is_wide = config.router_in_float32
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias: nn.Parameter | None = None
        if config.has_score_correction:  # balances the experts' load in pretraining; not trained here
            self.e_score_correction_bias = nn.Buffer(torch.empty(config.num_experts))
        self.add_others(config)

    def add_others(self, config: MixtureConfig) -> None:
        """Parameters beside those of all families."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_wide:
            with torch.autocast(tokens.device.type, enabled=False):
                return F.linear(tokens.to(wide_dtype(self.weight)), wide(self.weight))
        return F.linear(tokens, self.weight, self.bias)  # (N, E)

    def choose(self, logits: Tensor, config: MixtureConfig, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights (N, K) and indices (N, K) of each token's experts, from the router's logits (N, E).

        recorded (N, K): experts to use instead of the router's choice, counted from 1; 0 keeps the router's choice.
        """
        logits = wide(logits)
        by_logits = not config.has_score_correction and config.num_groups == 1
        if config.score == "softmax" and by_logits and config.weights_sum_to_one:
            best, chosen = best_experts(logits, config.experts_per_token, recorded)
            return best.softmax(-1) * config.weights_factor, chosen
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        ranks = self.ranks(logits, scores, config)
        if config.num_groups > 1:
            groups = ranks.unflatten(-1, (config.num_groups, -1))  # (N, groups, experts of a group)
            best = groups.topk(self.scores_per_group).values.sum(-1).topk(config.groups_per_token).indices
            is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
            ranks = groups.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
        _, chosen = best_experts(ranks, config.experts_per_token, recorded)
        weights = scores.gather(-1, chosen)
        if config.weights_sum_to_one:
            weights = weights / (weights.sum(-1, keepdim=True) + self.weights_sum_offset)
        return weights * config.weights_factor, chosen

    def ranks(self, logits: Tensor, scores: Tensor, config: MixtureConfig) -> Tensor:
        """The numbers (N, E) of which the largest are chosen, from logits and their softmax or sigmoids (N, E)."""
        if config.has_score_correction:
            return scores.detach() + self.e_score_correction_bias
        # Sigmoids of logits far from 0 round to the same number.
        return (logits if config.num_groups == 1 else scores).detach()


def best_experts(logits: Tensor, number: int, recorded: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest logits (N, K) and their experts (N, K), or those of the `recorded` experts, as in `Router.choose`."""
    best, chosen = logits.topk(number)
    if recorded is None:
        return best, chosen
    chosen = torch.where(recorded > 0, recorded.long() - 1, chosen)
    return logits.gather(-1, chosen), chosen


class Experts(nn.Module):
    """The experts' projections, stacked, with biases if `has_bias`.

    A family with other experts states their formula in `of`.
    """

    input_first_in_adapters: bool  # whether PEFT takes the projections for (inputs, outputs), not (outputs, inputs)

    @classmethod
    def of(cls, config: DecoderConfig, mixture: MixtureConfig) -> Self:
        """The experts of one of the decoder's layers."""
        return cls(config.hidden_size, mixture)

    def __init__(
        self, hidden_size: int, config: MixtureConfig, formula: ExpertFormula | None = None, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.config, self.formula = config, formula or ExpertFormula.of(config)
        self.input_first_in_adapters = self.formula.input_first
        assert not (self.formula.scales_input and has_bias), "biases would not be scaled"
        num_experts, inner = config.num_experts, config.intermediate_size
        projected = 2 * inner if self.formula.gated else inner
        into, out_of = (projected, hidden_size), (hidden_size, inner)
        if self.formula.input_first:
            into, out_of = into[::-1], out_of[::-1]
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, *into))
        self.down_proj = nn.Parameter(torch.empty(num_experts, *out_of))
        self.gate_up_proj_bias = self.down_proj_bias = None
        if has_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, projected))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up_adapter: tuple[Tensor, Tensor] | None = None,
        down_adapter: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The sum (N, D) of the outputs of the experts `chosen` (N, K), weighted by `weights` (N, K), for tokens (N,
        D).

        Adapters add the product of two low-rank matrices per expert: (E, D, R) and (E, R, 2 * I) to the gate and up
        projection, (E, I, R) and (E, R, D) to the down projection.
        """
        tokens = tokens.to(product_dtype(tokens))
        gate_up, down = self.stacks()
        tensors = (*(gate_up_adapter or (None, None)), *gate_up.tensors, *(down_adapter or (None, None)), *down.tensors)
        forms = gate_up.form, down.form
        how = self.config, self.formula, forms
        mixed = MixedExperts.apply(tokens, weights, chosen, self.gate_up_proj_bias, *how, *tensors)
        if self.down_proj_bias is not None:
            spread = torch.zeros_like(weights[:, :1]).expand(-1, self.config.num_experts).scatter(1, chosen, weights)
            mixed = mixed + spread.to(mixed.dtype) @ self.down_proj_bias.to(mixed.dtype)
        return mixed

    def stacks(self) -> tuple[Frozen, Frozen]:
        """The stored weights of both projections."""
        return as_frozen(self.gate_up_proj), as_frozen(self.down_proj)

    def inner(self, tokens: Tensor, expert: int) -> Tensor:
        """The inputs (N, I) of the down projection of one expert, for tokens (N, D)."""
        into = as_frozen(self.gate_up_proj).whole(experts=expert)
        factors = tokens @ (into if self.formula.input_first else into.T)
        if self.gate_up_proj_bias is not None:
            factors += self.gate_up_proj_bias[expert]
        return activation(factors, self.formula)


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """The stacks of experts of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


class MixtureOfExperts(nn.Module):
    """A router, its experts, and optionally a shared expert that every token uses."""

    def __init__(
        self, hidden_size: int, config: MixtureConfig, router: nn.Module | None = None, experts: Experts | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.add_module(config.router_name, Router(hidden_size, config) if router is None else router)
        self.experts = Experts(hidden_size, config) if experts is None else experts
        if config.shared_intermediate_size:
            formula = config.activation, self.experts.formula.gated, config.shared_is_fused
            shared = MLP(hidden_size, config.shared_intermediate_size, False, *formula)
            self.add_module(config.shared_name, shared)
        if config.shared_gate:
            self.add_module(f"{config.shared_name}_gate", nn.Linear(hidden_size, 1, bias=False))

    @classmethod
    def of(cls, config: DecoderConfig, mixture: MixtureConfig) -> Self:
        """The mixture of one of the decoder's layers, with the family's own parts."""
        router, experts = config.parts.router or Router, config.parts.experts or Experts
        return cls(config.hidden_size, mixture, router.of(config, mixture), experts.of(config, mixture))

    def forward(
        self, x: Tensor, router_input: Tensor | None = None, recorded: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The experts' output (..., D) for x (..., D), the router's logits (N, E), and the chosen experts (N, K).

        By default the router's input is x. recorded (..., K): as in `Router.choose`.
        """
        tokens = x.flatten(0, -2)
        recorded = None if recorded is None else recorded.flatten(0, -2)
        router = getattr(self, self.config.router_name)
        logits = router(tokens if router_input is None else router_input.flatten(0, -2))
        choose = getattr(router, "base_layer", router).choose  # an adapter may wrap it
        weights, chosen = choose(logits, self.config, recorded)
        mixed = self.experts(tokens, weights, chosen)
        if self.config.shared_intermediate_size:
            shared = getattr(self, self.config.shared_name)(tokens)
            if self.config.shared_gate:
                shared = shared * getattr(self, f"{self.config.shared_name}_gate")(tokens).sigmoid()
            mixed = mixed + shared
        return mixed.view(x.shape), logits, chosen


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    experts_per_token: int,
    is_token: Tensor | None,
    over_row: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """The load-balancing loss of the routers of all layers, a float32 scalar: K for an even load, up to E.

    It is E times the sum over experts of (choices per token) * (mean probability), with means over the tokens of all
    layers.
    router_logits: (N, E) per layer. is_token (N,) bool: False for padding, which is ignored. over_row: sums over the
    ranks that share a row's tokens.
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
