"""Log-probabilities of completion tokens without full logits, for policy losses.

The model runs on a `PolicyBatch`, at the sampling temperature. Results are bitwise equal with and without gradients, so
every ratio is exactly 1 before the first update.

Shapes: B completions, A tokens of the longest, N tokens of all.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lean_ft.losses.linear_log_probs import linear_log_probs
from lean_ft.losses.output_layer import OutputLayer, hidden_states
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings.run import SampledConfig

if TYPE_CHECKING:
    from lean_ft.data import PolicyBatch
    from lean_ft.models import Decoder


class AnswerTokens(NamedTuple):
    """Token values of B completions under a model; 0 after a completion's end."""

    log_probs: Tensor  # (B, A)
    entropies: Tensor  # (B, A), without gradients
    router_loss: Tensor | None  # auxiliary loss of a mixture of experts, on the scale of a mean loss
    hidden: Tensor  # (B, T, D): hidden states of all positions


def on_grid(values: Tensor, batch: "PolicyBatch") -> Tensor:
    """Arrange values (N,), one per completion token of the batch, in a grid (B, A)."""
    flat = values.new_zeros(batch.counts.numel())  # each position is written once, so the result is deterministic
    return flat.index_copy(0, batch.place, values).view(batch.counts.shape)


class TokenLogProbs:
    """`log_probs(model, batch, statistics)` returns the `AnswerTokens` of a batch, with gradients if enabled."""

    def __init__(self, model: "Decoder", cfg: SampledConfig) -> None:
        """Read the settings of sampling, memory and dtype from `cfg`. `model` is a `Decoder`."""
        self._output_layer = OutputLayer(model, cfg)
        self._temperature = cfg.generation.temperature

    def __call__(
        self, model: "Decoder", batch: "PolicyBatch", statistics: TokenStatistics | None = None
    ) -> AnswerTokens:
        """batch: like `lean_ft.data.PolicyBatch`, on the model's device; statistics: receives the entropy."""
        with self._output_layer.arithmetic():
            hidden, router_loss = hidden_states(model, batch, of_rows=True)
            entropies = torch.empty(len(batch.label), device=hidden.device)
            log_probs = linear_log_probs(
                hidden,
                model.output_weight,
                batch.index,
                batch.label,
                temperature=self._temperature,
                entropies=entropies,
                **self._output_layer.settings,
            )

        tokens = AnswerTokens(on_grid(log_probs, batch), on_grid(entropies, batch), router_loss, hidden)
        if statistics is not None:
            statistics.add(entropy=(tokens.entropies * batch.counts).sum())
            if router_loss is not None:
                statistics.add(router_aux_loss=router_loss * batch.num_targets)
        return tokens
