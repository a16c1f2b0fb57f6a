"""Loss and metrics of text classification, and of labels of tokens. Shapes: P texts or labeled tokens, C labels."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from lean_ft.losses.entities import Entities, are_bio
from lean_ft.system.shards import ALONE, Ranks


def classification_losses(scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the loss of each text, (P,), from scores (P, C), as transformers computes it.

    targets: (P,) int64, one label per text: cross-entropy of the softmax; or (P, C), 1 for each label of the text: mean
    binary cross-entropy of the sigmoids; or (P,) floats, the probability of the second of two labels: cross-entropy of
    the two; weights: (C,), factors of the labels' terms.
    """
    if targets.dim() == 1 and targets.is_floating_point():
        probabilities = torch.stack([1 - targets, targets], 1).to(scores.dtype)
        return cross_entropy(scores, probabilities, weights, reduction="none")
    if targets.dim() == 1:
        return cross_entropy(scores, targets, weights, reduction="none")
    return binary_cross_entropy_with_logits(scores, targets, weights, reduction="none").mean(1)


class Predictions:
    """Counts of predictions: the likeliest label of each text, or each label with a score above 0 if texts have several
    labels.

    tags: the names of labels of tokens; if they are O, B-TYPE and I-TYPE, entities are counted too.
    """

    def __init__(
        self, num_labels: int, device: torch.device, ranks: Ranks = ALONE, *, tags: Sequence[str] = ()
    ) -> None:
        self._entities = Entities(tags, device, ranks) if are_bio(tags) else None
        self._has_several = False  # labels per text
        self._ranks, self._num_right = ranks, torch.zeros(1, dtype=torch.float64, device=device)
        self._sums = torch.zeros(num_labels + 2, num_labels, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, scores: Tensor, targets: Tensor, text_of: Tensor | None = None) -> Tensor:
        """Count predictions, and return whether each text has exactly the right labels, (P,) bool.

        scores: (P, C); targets: as in `classification_losses`; text_of: (P,), the text of each label of a token.
        """
        self._has_several = targets.dim() > 1
        if targets.dim() == 1 and targets.is_floating_point():
            targets = (targets > 0.5).long()
        if self._entities is not None and text_of is not None:
            self._entities.add(scores.argmax(1), targets, text_of)
        actual, predicted = targets > 0, scores > 0
        if targets.dim() == 1:
            actual, predicted = (one_hot(label, scores.shape[1]) for label in (targets, scores.argmax(1)))
        is_right = (actual == predicted).all(1)
        self._num_right += is_right.sum()
        actual, predicted = actual.double(), predicted.double()
        self._sums += torch.cat([actual.T @ predicted, actual.sum(0, True), predicted.sum(0, True)])
        return is_right

    def metrics(self, num_texts: int) -> tuple[dict[str, float], list[list[int]] | list[list[list[int]]]]:
        """Return `eval_accuracy` and `eval_macro_f1`, and the confusion matrix. Call it on every rank. With entities,
        also return their metrics (`Entities.metrics`).

        `eval_accuracy` is the share of texts with exactly the right labels; `eval_macro_f1` is over labels that occur.
        The confusion matrix (C, C) counts texts with the row's label and the column's prediction. If texts have several
        labels, there is one (2, 2) per label: its rows are texts without and with the label, its columns predictions.
        """
        sums = self._ranks.sum(torch.cat([self._num_right, self._sums.flatten()])) / self._ranks.num_sharing
        *confusion, actual, predicted = sums[1:].view_as(self._sums)
        table, total = torch.stack(confusion), actual + predicted
        f1 = (2 * table.diagonal() / total)[total > 0].mean()
        accuracy = sums[0] / num_texts
        if self._has_several:
            hits = table.diagonal()
            cells = [num_texts - total + hits, predicted - hits, actual - hits, hits]
            table = torch.stack(cells, 1).view(-1, 2, 2)
        of_entities = {} if self._entities is None else self._entities.metrics()
        return {"eval_accuracy": float(accuracy), "eval_macro_f1": float(f1), **of_entities}, table.long().tolist()
