"""Sequence scores of a reward model, and the loss of a pair of scores.

A sequence's score is read at its last token, like transformers' sequence classification models. With per-token rewards,
the score is the mean over the completion's tokens (Yang et al. 2023, arXiv:2306.00398). Scores are computed in float32,
whatever the model's dtype.

Shapes: P pairs, N tokens of their completions, D hidden size.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lean_ft.losses.output_layer import hidden_states
from lean_ft.losses.statistics import TokenStatistics

if TYPE_CHECKING:
    from lean_ft.data import Batch, PairBatch
    from lean_ft.models import Decoder


def scores_of(
    model: "Decoder", batch: "PairBatch", *, per_token: bool = False, is_float16: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the scores (P, 2) of a batch's pairs, and the router loss of a mixture of experts or None.

    model: a `Decoder` with a score layer; batch: like `lean_ft.data.PairBatch`, on the model's device; per_token:
    average over completion tokens, only if prompts are not shared; is_float16: compute in float16, whatever the dtype
    of the weights.
    """
    # batch.index has the position that predicts a token, which is 1 before the token.
    places = batch.index + 1 if per_token else batch.last
    scores, router_loss = output_scores(model, batch, places, is_float16=is_float16)
    scores = scores[:, 0]
    if per_token:
        lengths = batch.answer_tokens.flatten()  # (2 P,)
        sums = torch.nn.functional.pad(scores.cumsum(0), (1, 0))
        ends = lengths.cumsum(0)
        scores = (sums[ends] - sums[ends - lengths]) / lengths.clamp(min=1)
    return scores.view(-1, 2), router_loss


def output_scores(
    model: "Decoder", batch: "Batch", places: Tensor, *, rows: Sequence[int] | None = None, is_float16: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return C scores at each of M flattened positions of a batch, (M, C), and the router loss or None.

    rows: the C rows of the output layer to read, for a layer with many; None: all.
    """
    with torch.autocast(places.device.type, torch.float16, enabled=is_float16):
        hidden, router_loss = hidden_states(model, batch, of_rows=True)
    weight = model.output_weight  # (C, D); gathered by the forward pass if it is sharded
    weight = weight if rows is None else weight[[*rows]]
    read = hidden.flatten(0, -2).index_select(0, places)
    wide = torch.promote_types(read.dtype, torch.float32)
    return read.to(wide) @ weight.to(wide).T, router_loss


def reward_loss(scores: Tensor, margins: Tensor, *, centering: float = 0.01) -> Tensor:
    """Return -log sigmoid(r_chosen - r_rejected - margin) + centering (r_chosen + r_rejected)^2 of each of P pairs,
    (P,).

    scores: (P, 2), chosen and rejected; margins: (P,), required lead of the chosen completion. Bradley-Terry model;
    margin from Touvron et al. 2023, arXiv:2307.09288; centering from Eisenstein et al. 2023, arXiv:2312.09244.
    """
    chosen, rejected = scores.unbind(1)
    return -logsigmoid(chosen - rejected - margins) + centering * (chosen + rejected).square()


@torch.no_grad()
def add_scores(statistics: TokenStatistics, scores: Tensor) -> None:
    """Add the metrics of scores (P, 2), summed over pairs. Equal scores count as half correct."""
    chosen, rejected = scores.unbind(1)
    margins = chosen - rejected
    sums = {"chosen": chosen, "rejected": rejected, "margins": margins, "accuracies": (margins.sign() + 1) / 2}
    statistics.add(**{f"rewards/{name}": value.sum() for name, value in sums.items()})
    statistics.by_source(**{"rewards/accuracies": sums["accuracies"]})
