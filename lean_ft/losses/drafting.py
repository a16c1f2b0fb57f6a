"""Loss of drafting layers (multi-token prediction), beside or instead of the next-token loss.

Layer k predicts token i + k + 1 from position i, where that token's label trains, within a document. Each layer's sum
of cross-entropies is divided by the step's targets, as the next-token loss, and the layers' mean is the drafting loss:
equations 24 and 25 of the DeepSeek-V3 technical report (arXiv:2412.19437). Metrics are means over each layer's own
targets, which are fewer: a document's last k tokens have no label k tokens further.

In an evaluation, a draft is accepted if it is the token that the model itself finds likeliest after the same text.

Shapes: B rows, T tokens of a row, D hidden size.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.losses.linear_cross_entropy import IGNORED_LABEL, select_targets
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import ModelConfig
from lean_ft.system.world import in_chunks, read_number

if TYPE_CHECKING:
    from lean_ft.data import Batch
    from lean_ft.models import Decoder

# Sums the cross-entropy of hidden states (B, T, D) at labels (B, T), of which a number are not ignored.
SumOfLosses = Callable[[Tensor, Tensor, int, TokenStatistics | None], Tensor]
_CHUNK_TOKENS = 1024  # of logits whose highest one is found


class DraftingLoss:
    """`drafting_loss(model, batch, statistics, cross_entropy)` returns a batch's loss summed over its targets: that of
    the drafting layers on a frozen trunk; on a training trunk, the next-token loss plus their weighted loss.

    Statistics are `mtp_loss`, and `mtp_accuracy`, the share of drafts that equal their label. `loss` is `mtp_loss` on a
    frozen trunk and the next-token loss on a training trunk. In an evaluation there are also `mtp_accepted`, the share
    of accepted drafts, and on a frozen trunk `trunk_loss`, the next-token loss.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        self._is_alone, self._weight = cfg.trains_drafting_alone, cfg.mtp_weight

    def __call__(
        self, model: "Decoder", batch: "Batch", statistics: TokenStatistics | None, cross_entropy: SumOfLosses
    ) -> Tensor:
        """batch: on the model's device. cross_entropy: with the settings of the loss."""
        depths = range(1, 1 + model.config.num_drafting)
        labels = [draft_labels(batch.labels, batch.cu_seqlens, depth) for depth in depths]
        counts = [_count(some, batch.num_targets) for some in labels]  # before the device has more work
        hidden, router_loss, drafts = model(
            **batch.inputs, return_hidden=True, return_router_loss=True, return_drafts=True
        )
        of_drafts = [TokenStatistics() for _ in depths]
        losses = [cross_entropy(*of_layer) for of_layer in zip(drafts, labels, counts, of_drafts, strict=True)]
        loss = torch.stack(losses).mean()

        def add(name: str, sums: list[Tensor]) -> None:
            """The mean over the layers of means over their targets, times the batch's targets."""
            means = [of_layer.detach() / max(1, count) for of_layer, count in zip(sums, counts, strict=True)]
            if statistics is not None:
                statistics.add(**{name: torch.stack(means).mean() * batch.num_targets})

        if not self._is_alone:
            next_loss = cross_entropy(hidden, batch.labels, batch.num_targets, statistics)
            loss = next_loss + self._weight * loss
            if statistics is not None:
                statistics.add(loss=next_loss)
        else:
            add("loss", losses)
        add("mtp_loss", losses)
        add("mtp_accuracy", [_right(of_layer) for of_layer in of_drafts])
        if not model.training:
            if self._is_alone and statistics is not None:
                statistics.add(trunk_loss=cross_entropy(hidden, batch.labels, batch.num_targets, None))
            own = likeliest_tokens(model, hidden, batch.labels, batch.num_targets)
            of_model = [TokenStatistics() for _ in depths]
            for depth, states, count, found in zip(depths, drafts, counts, of_model, strict=True):
                cross_entropy(states, draft_labels(own, batch.cu_seqlens, depth), count, found)
            add("mtp_accepted", [_right(of_layer) for of_layer in of_model])
        if router_loss is not None:
            loss = loss + router_loss * batch.num_targets
            if statistics is not None:
                statistics.add(router_aux_loss=router_loss * batch.num_targets)
        return loss


def likeliest_tokens(model: "Decoder", hidden: Tensor, labels: Tensor, num_targets: int) -> Tensor:
    """The token (B, T) with the highest logit at each position with a label, and IGNORED_LABEL elsewhere.

    hidden: (B, T, D), what `model` returns with `return_hidden`. labels: (B, T), with `num_targets` labels.
    """
    _, states = select_targets(labels, num_targets, hidden)
    chunks = [model.logits(states[chunk]).argmax(-1) for chunk in in_chunks(len(states), _CHUNK_TOKENS)]
    return labels.masked_scatter(labels != IGNORED_LABEL, torch.cat([*chunks, labels.new_empty(0)]))


def draft_labels(labels: Tensor, cu_seqlens: Tensor | None, depth: int) -> Tensor:
    """The labels (B, T) that are `depth` positions further in the same document, and IGNORED_LABEL elsewhere.

    labels: (B, T), those of a batch. cu_seqlens: (documents + 1,), bounds of documents in the B * T tokens; None: each
    row is one.
    """
    shifted = F.pad(labels[:, depth:], (0, depth), value=IGNORED_LABEL)
    if cu_seqlens is None:
        return shifted
    indices = torch.arange(labels.numel(), dtype=cu_seqlens.dtype, device=labels.device).view_as(labels)
    document = torch.bucketize(indices, cu_seqlens, right=True)
    is_same = F.pad(document[:, depth:], (0, depth), value=-1) == document
    return shifted.masked_fill(~is_same, IGNORED_LABEL)


def _count(labels: Tensor, num_targets: int) -> int:
    """The number of labels, at most `num_targets`. A GPU's host waits for it."""
    return read_number(lambda: (labels != IGNORED_LABEL).sum(), num_targets)


def _right(statistics: TokenStatistics) -> Tensor:
    """The number of right predictions that `linear_cross_entropy` counted."""
    return statistics.means(1)["token_accuracy"]
