"""Log-probabilities of the tokens of answers, without logits: what losses of sampled answers are made of.

A pass of the model over a `PolicyBatch`, at the temperature that the answers were sampled at. The same batch gives the same
bits with gradients and without, so before the first update every ratio is exactly 1.

Shapes: B answers, A tokens of the longest, N tokens of all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lean_ft.losses.linear_log_probs import linear_log_probs
from lean_ft.losses.output_layer import OutputLayer, hidden_states
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings.run import SampledConfig


class AnswerTokens(NamedTuple):
    """What a model makes of the tokens of B answers; 0 behind an answer's end."""

    log_probs: Tensor  # (B, A)
    entropies: Tensor  # (B, A), without gradients
    router_loss: Tensor | None  # what a mixture of experts adds to a mean loss
    hidden: Tensor  # (B, T, D): of all positions


def on_grid(values: Tensor, batch: Any) -> Tensor:
    """Of values (N,), one a token of the batch's answers, the grid (B, A)."""
    flat = values.new_zeros(batch.counts.numel())  # no position is written twice, so no order is left to chance
    return flat.index_copy(0, batch.place, values).view(batch.counts.shape)


class TokenLogProbs:
    """`log_probs(model, batch, statistics)`: the `AnswerTokens` of a batch, with gradients where they are on."""

    def __init__(self, model: Any, cfg: SampledConfig) -> None:
        """Takes what `cfg`, of a recipe that has `generation`, says of sampling, memory and arithmetic for `model`, a `Decoder`."""
        self._output_layer = OutputLayer(model, cfg)
        self._temperature = cfg.generation.temperature

    def __call__(self, model: Any, batch: Any, statistics: TokenStatistics | None = None) -> AnswerTokens:
        """batch: on the model's device, as `lean_ft.data.PolicyBatch` is; statistics: where to add what tokens tell."""
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
        return tokens
