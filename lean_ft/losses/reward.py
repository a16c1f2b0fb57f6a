"""The scores that a reward model gives whole sequences, and the loss of a pair of them.

A sequence's score is read at its last token, where transformers' models for sequence classification read it. Or each token
of an answer has a reward, and the sequence's score is their mean, so that what is learned of pairs is shared out to tokens
(Yang et al. 2023, arXiv:2306.00398). Scores are float32 products whatever the model's type is.

Shapes: P pairs, N tokens of their answers, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lean_ft.losses.output_layer import hidden_states
from lean_ft.losses.statistics import TokenStatistics


def scores_of(
    model: Any, batch: Any, *, per_token: bool = False, is_float16: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The scores (P, 2) of a batch's pairs, and what a mixture of experts' router adds to a mean loss.

    model: a `Decoder` that gives scores; batch: on its device, as `lean_ft.data.PairBatch` is; per_token: means over the
    answers' tokens, for prompts that are not shared; is_float16: arithmetic is in float16 whatever the weights are kept in.
    """
    # The position that predicts a token is before it.
    places = batch.index + 1 if per_token else batch.last
    scores, router_loss = output_scores(model, batch, places, is_float16=is_float16)
    scores = scores[:, 0]
    if per_token:
        lengths = batch.answer_tokens.flatten()  # (2 P,)
        sums = torch.nn.functional.pad(scores.cumsum(0), (1, 0))
        ends = lengths.cumsum(0)
        scores = (sums[ends] - sums[ends - lengths]) / lengths.clamp(min=1)
    return scores.view(-1, 2), router_loss


def output_scores(model: Any, batch: Any, places: Tensor, *, is_float16: bool = False) -> tuple[Tensor, Tensor | None]:
    """The model's C scores at each of M flattened positions of a batch, (M, C), and its router loss, if any."""
    with torch.autocast(places.device.type, torch.float16, enabled=is_float16):
        hidden, router_loss = hidden_states(model, batch, of_rows=True)
    weight = model.output_weight  # (C, D); gathered by the forward pass if it is sharded
    read = hidden.flatten(0, -2).index_select(0, places)
    wide = torch.promote_types(read.dtype, torch.float32)
    return read.to(wide) @ weight.to(wide).T, router_loss


def reward_loss(scores: Tensor, margins: Tensor, *, centering: float = 0.01) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin) + centering (r_chosen + r_rejected)^2 of each of P pairs.

    scores: (P, 2), chosen and rejected; margins: (P,), by how much the chosen one is to be ahead. Returns (P,). Bradley and
    Terry; the margin is of Touvron et al. 2023, arXiv:2307.09288, the centering of Eisenstein et al. 2023, arXiv:2312.09244.
    """
    chosen, rejected = scores.unbind(1)
    return -logsigmoid(chosen - rejected - margins) + centering * (chosen + rejected).square()


@torch.no_grad()
def add_scores(statistics: TokenStatistics, scores: Tensor) -> None:
    """Adds what the metrics tell of scores (P, 2), sums over pairs; two equal scores are half right."""
    chosen, rejected = scores.unbind(1)
    margins = chosen - rejected
    sums = {"chosen": chosen, "rejected": rejected, "margins": margins, "accuracies": (margins.sign() + 1) / 2}
    statistics.add(**{f"rewards/{name}": value.sum() for name, value in sums.items()})
