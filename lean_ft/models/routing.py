"""The choices of a model's routers in a forward pass: recorded choices in their place, their loss, and metrics of a
step.

Source of recorded choices: Rollout Routing Replay, Ma et al. 2025, https://arxiv.org/abs/2510.11370.

Shapes: N tokens of a batch, E experts, K experts per token, L mixtures of a model.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lean_ft.models.cache import KVCache
from lean_ft.models.moe import load_balancing_loss
from lean_ft.system.passes import is_first_pass
from lean_ft.system.shards import Ranks

if TYPE_CHECKING:
    from lean_ft.models.decoder import Decoder


class Routes:
    """The choices in one forward pass of `model`. The other arguments are those of `Decoder.forward`."""

    def __init__(
        self, model: "Decoder", is_token: Tensor | None, cache: KVCache | None, recorded: Tensor | None
    ) -> None:
        self._model, self._is_token = model, is_token
        self._has_gradients = torch.is_grad_enabled()
        self._counts = model.training and not is_first_pass()  # tokens of two passes count once
        self._recorded = None if recorded is None else iter(recorded.split(model.config.choices_of_mixtures, -1))
        self._records = cache is not None and cache.experts is not None
        self._logits: list[Tensor] = []
        self.chosen: list[Tensor] = []  # (N, K) of each mixture, if the cache records them

    def recorded(self) -> Tensor | None:
        """The recorded choices (B, T, K) of the next layer that has a mixture."""
        return None if self._recorded is None else next(self._recorded)

    def add(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        """logits (N, E) and chosen experts (N, K) of a layer."""
        if self._records:
            self.chosen.append(chosen)
        if self._has_gradients and self._model.router_aux_loss_coef:
            self._logits.append(logits)
        if self._counts and self._model.routing is not None:
            self._model.routing.add(layer, logits.detach(), chosen, self._is_token)

    def loss(self) -> Tensor | None:
        """The weighted load-balancing loss, a float32 scalar; None if its weight is 0 or no gradients are computed."""
        model, mixture = self._model, self._model.mixture
        if not self._logits or mixture is None:
            return None
        tokens = model.sharding.row_tokens
        over_row = (lambda values: values) if tokens is None else tokens.sum
        balance = load_balancing_loss(self._logits, mixture.experts_per_token, self._is_token, over_row)
        return model.router_aux_loss_coef * balance


class RoutingStatistics:
    """Adds up where the tokens of a step's micro-batches go. Nothing waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # of each layer, (2, E): choices of each expert, and its probabilities

    def add(self, layer: int, logits: Tensor, chosen: Tensor, is_token: Tensor | None) -> None:
        """logits (N, E), chosen (N, K); is_token, N values: False for padding, which is ignored."""
        counted = (torch.ones_like(logits[:, 0]) if is_token is None else is_token.flatten()).float()
        if layer not in self._sums:
            self._sums[layer] = torch.zeros(2, logits.shape[1], device=logits.device)
        choices, probabilities = self._sums[layer]
        choices.scatter_add_(0, chosen.flatten(), counted.repeat_interleave(chosen.shape[1]))
        probabilities += counted @ logits.softmax(-1, dtype=torch.float32)

    def take(self, ranks: Ranks) -> dict[str, Tensor]:
        """The metrics since the last call, over the tokens of all ranks, as means over the layers; empty without a
        pass.

        expert_load: choices of the most chosen expert, as a multiple of the mean expert's, from 1 to E / K.
        unused_experts: share of experts that no token chose. router_entropy: entropy of the tokens' mean probabilities,
        as a share of the highest, log E.
        """
        if not self._sums:
            return {}
        sums = ranks.sum(torch.stack([self._sums[layer] for layer in sorted(self._sums)]))  # (L, 2, E)
        self._sums = {}
        choices, probabilities = (sums / sums.sum(-1, keepdim=True).clamp(min=1)).unbind(1)
        num_experts = choices.shape[1]
        return {
            "expert_load": choices.amax(-1).mean() * num_experts,
            "unused_experts": (choices == 0).float().mean(),
            "router_entropy": -torch.xlogy(probabilities, probabilities).sum(-1).mean() / math.log(num_experts),
        }
