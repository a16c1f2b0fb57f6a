"""Log-probabilities of whole answers, without logits: what losses of preferred answers are made of.

A pass of the model over a `PairBatch`, and one sum an answer, in the same order for the same batch on every device.

LD-DPO counts the tokens behind the length of the shorter answer by `loss.ld_alpha` (Liu et al. 2024, arXiv:2409.06411);
it is in these sums, and so in the reference's. WPO weighs a pair by exp of the mean of log p - log(sum of p^2 over all tokens),
once for each of its answers (Zhou et al. 2024, arXiv:2406.11827, eq. 2 and its sampled alignment).

Answers that stand by themselves are pairs of one side (`UnpairedBatch`): then what is (P, 2) here is (P, 1).

Shapes: P pairs, N tokens of their answers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lean_ft.losses.linear_log_probs import linear_log_probs
from lean_ft.losses.output_layer import OutputLayer, hidden_states
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import PreferenceLossConfig
from lean_ft.settings.run import ComparisonConfig


class Answers(NamedTuple):
    """What a model makes of P pairs of answers."""

    log_probs: Tensor  # (P, 2): sums over the tokens of the chosen and the rejected answers
    weights: Tensor  # (P,): WPO's, without gradients; ones where it is off
    chosen_loss: Tensor  # a scalar: the cross-entropy of the chosen answers, summed over their tokens
    router_loss: Tensor | None  # what a mixture of experts adds to a mean loss


class AnswerLogProbs:
    """`log_probs(model, batch, statistics)`: the `Answers` of a batch, with gradients where they are on."""

    def __init__(self, model: Any, cfg: ComparisonConfig) -> None:
        """Takes what `cfg` says of the loss, its memory, and arithmetic for `model`, a `Decoder`."""
        self._loss = cfg.loss if isinstance(cfg.loss, PreferenceLossConfig) else None  # LD-DPO and WPO are for pairs
        self._output_layer = OutputLayer(model, cfg)

    def __call__(self, model: Any, batch: Any, statistics: TokenStatistics | None = None) -> Answers:
        """batch: on the model's device, as `lean_ft.data.PairBatch` is; statistics: where to add what tokens tell."""
        lengths, num_labels = batch.answer_tokens.flatten(), len(batch.label)  # (2 P,)
        sides = batch.answer_tokens.shape[1]  # 2, and 1 where answers stand by themselves
        answer = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=num_labels)
        place = torch.arange(num_labels, device=lengths.device) - (lengths.cumsum(0) - lengths)[answer]  # (N,), in it

        def sums(values: Tensor) -> Tensor:  # of values (N,), an answer's each, (P, 2)
            # No position is written twice, so no order is left to chance, as adding by index would on a GPU.
            width = batch.positions.shape[1]
            grid = values.new_zeros(len(lengths) * width).index_copy(0, answer * width + place, values)
            return grid.view(len(batch.answer_tokens), sides, width).sum(2)

        with self._output_layer.arithmetic():
            hidden, router_loss = hidden_states(model, batch, of_rows=True)
            squares = (
                torch.empty(num_labels, device=hidden.device) if self._loss is not None and self._loss.wpo else None
            )
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
