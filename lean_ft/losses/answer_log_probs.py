"""Log-probabilities of whole completions without full logits, for preference losses.

The model runs on a `PairBatch`. Each completion's log-probabilities are summed in an order that is the same on every
device.

LD-DPO multiplies the log-probabilities of tokens beyond the shorter completion's length by `loss.ld_alpha` (Liu et al.
2024, arXiv:2409.06411), in the sums of the model and of the reference. WPO weights a pair by the product over its
completions of exp(mean of log p - log(sum of p^2 over the vocabulary)) (Zhou et al. 2024, arXiv:2406.11827, eq. 2,
sampled alignment).

Single completions (`UnpairedBatch`) have one side: shapes (P, 2) become (P, 1).

Shapes: P pairs, N tokens of their completions.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lean_ft.losses.linear_log_probs import linear_log_probs
from lean_ft.losses.output_layer import OutputLayer, hidden_states
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import PreferenceLossConfig
from lean_ft.settings.run import ComparisonConfig

if TYPE_CHECKING:
    from lean_ft.data import PairBatch
    from lean_ft.models import Decoder


class Answers(NamedTuple):
    """Log-probabilities of P pairs of completions under a model."""

    log_probs: Tensor  # (P, 2): sums over the tokens of the chosen and rejected completions
    weights: Tensor  # (P,): WPO weights, without gradients; ones if WPO is off
    chosen_loss: Tensor  # scalar: cross-entropy of the chosen completions, summed over their tokens
    router_loss: Tensor | None  # auxiliary loss of a mixture of experts, on the scale of a mean loss


class AnswerLogProbs:
    """`log_probs(model, batch, statistics)` returns the `Answers` of a batch, with gradients if enabled."""

    def __init__(self, model: "Decoder", cfg: ComparisonConfig) -> None:
        """Read the settings of the loss, memory and dtype from `cfg`. `model` is a `Decoder`."""
        self._loss = cfg.loss if isinstance(cfg.loss, PreferenceLossConfig) else None  # LD-DPO and WPO need pairs
        self._output_layer = OutputLayer(model, cfg)

    def __call__(self, model: "Decoder", batch: "PairBatch", statistics: TokenStatistics | None = None) -> Answers:
        """batch: like `lean_ft.data.PairBatch`, on the model's device; statistics: receives the token metrics."""
        lengths, num_labels = batch.answer_tokens.flatten(), len(batch.label)  # (2 P,)
        sides = batch.answer_tokens.shape[1]  # 2, or 1 for single completions
        answer = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=num_labels)
        starts = lengths.cumsum(0) - lengths
        place = torch.arange(num_labels, device=lengths.device) - starts[answer]  # (N,): index in the completion

        def sums(values: Tensor) -> Tensor:  # values (N,) summed per completion, (P, 2)
            # Each position is written once, so the result is deterministic; index_add is not on a GPU.
            width = batch.positions.shape[1]
            grid = values.new_zeros(len(lengths) * width).index_copy(0, answer * width + place, values)
            return grid.view(len(batch.answer_tokens), sides, width).sum(2)

        with self._output_layer.arithmetic():
            hidden, router_loss = hidden_states(model, batch, of_rows=True)
            has_weights = self._loss is not None and self._loss.wpo
            squares = torch.empty(num_labels, device=hidden.device) if has_weights else None
            log_probs = linear_log_probs(
                hidden,
                model.output_weight,
                batch.index,
                batch.label,
                log_sum_squares=squares,
                statistics=statistics,
                **self._output_layer.settings,
            )
        weights = torch.ones_like(lengths[::sides], dtype=log_probs.dtype)
        if squares is not None:
            weights = (sums(log_probs.detach() - squares) / batch.answer_tokens).sum(1).exp()
        chosen_loss = -torch.where(answer % sides == 0, log_probs, 0.0).sum()
        if self._loss is not None and self._loss.ld_alpha < 1:
            is_beyond = place >= batch.answer_tokens.amin(1)[answer // sides]
            log_probs = torch.where(is_beyond, log_probs * self._loss.ld_alpha, log_probs)
        return Answers(sums(log_probs), weights, chosen_loss, router_loss)
