"""Scores of how relevant passages are to a query, and losses of the scores of a row's passages.

A score is read at the last token of a text with the query and a passage: from a layer with one output, or as the
difference of the logits of two tokens, for which two rows of the output layer suffice (Qwen3-Reranker, Zhang et al.
2025, arXiv:2506.05176).

A loss is the mean over the terms of a row, so every query counts the same, however the rows are batched.
sentence-transformers 6.2 averages pairs over a batch, which is the same if all rows have as many pairs, such as rows
with one right passage. Left out: ListMLE and p-ListMLE.

Shapes: P rows, S passages of a row, M = P * S texts.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from lean_ft.losses.reward import output_scores
from lean_ft.settings.embedding_losses import RerankingLossConfig, Weighting
from lean_ft.system.user_functions import check_shape, is_function_path, load_function

if TYPE_CHECKING:
    from lean_ft.data.embedding import EmbeddingBatch
    from lean_ft.models import Decoder


def relevance(
    model: "Decoder", batch: "EmbeddingBatch", yes_no: tuple[int, int] | None, *, is_float16: bool = False
) -> Tensor:
    """Return the score of each text, (M,), in float32 or wider, read at its last token.

    batch: on the model's device; yes_no: ids of two tokens, whose logits are subtracted, after the model's soft cap;
    None: the model has a layer with one output; is_float16: compute in float16, whatever the dtype of the weights.
    """
    scores, _ = output_scores(model, batch, batch.last, rows=yes_no, is_float16=is_float16)
    if yes_no is None:
        return scores.squeeze(-1)
    cap = model.config.logits_softcap
    yes, no = (scores if cap is None else cap * torch.tanh(scores / cap)).unbind(-1)
    return yes - no


def reranking_losses(scores: Tensor, labels: Tensor, cfg: RerankingLossConfig) -> Tensor:
    """Return the loss of each row, (P,).

    scores: (P, S); labels: (P, S), how relevant each passage is: 1 or 0, grades, or a teacher's scores; for bce from 0
    to 1.
    """
    labels = labels.to(scores.dtype)
    if is_function_path(cfg.name):
        return check_shape(cfg.name, load_function(cfg.name, listnet)(scores, labels), scores.shape[:1])
    return LOSSES[cfg.name](scores, labels, **cfg.of_loss)


def check_labels(cfg: RerankingLossConfig, labels: Tensor) -> None:
    """Raise ValueError if labels are out of the range of the loss, or if no row has different labels to learn from.

    labels: (P, S) of all rows, or of enough rows that some have different labels; in host memory.
    """
    lowest, highest = labels.min().item(), labels.max().item()
    if cfg.name == "bce" and not 0 <= lowest <= highest <= 1:
        raise ValueError(
            f"loss.name=bce expects labels from 0 (wrong) to 1 (right), and the labels are from {lowest:g} to "
            f"{highest:g}. Divide them by their maximum, or set loss.name=ranknet for labels with an order alone."
        )
    if cfg.name in ("ranknet", "listnet", "lambda") and bool((labels == labels[:, :1]).all()):
        raise ValueError(
            f"loss.name={cfg.name} learns the order of a row's passages, and all passages of a row have the same "
            f"label, {labels[0, 0].item():g} in the first row. Give them labels that differ, or set loss.name=bce."
        )


def bce(scores: Tensor, labels: Tensor, *, positive_weight: float = 1.0) -> Tensor:
    """Return the binary cross-entropy of each passage, averaged over the row, (P,)."""
    weight = None if positive_weight == 1 else scores.new_tensor(positive_weight)
    return binary_cross_entropy_with_logits(scores, labels, pos_weight=weight, reduction="none").mean(1)


def listnet(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the softmax of labels and the softmax of scores, (P,). Cao et al. 2007,
    doi:10.1145/1273496.1273513."""
    return -(labels.softmax(1) * scores.log_softmax(1)).sum(1)


def ranknet(scores: Tensor, labels: Tensor, *, k: int | None = None, sigma: float = 1.0) -> Tensor:
    """Return -log2 sigmoid(sigma (s_i - s_j)) over the pairs with label_i > label_j, (P,). Burges et al. 2005,
    doi:10.1145/1102351.1102363.

    k: count only pairs of which one passage is among the first k by its score.
    """
    return _pairwise(scores, labels, None, k, sigma)


def lambda_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    weighting: Weighting = "ndcg2pp",
    mu: float = 10.0,
    k: int | None = None,
    sigma: float = 1.0,
    eps: float = 1e-10,
) -> Tensor:
    """Return RankNet's loss with weights of pairs that bound nDCG, (P,). Wang et al. 2018 (LambdaLoss),
    doi:10.1145/3269206.3271784.

    weighting: NDCG-Loss1 (of all pairs), NDCG-Loss2, LambdaRank, or NDCG-Loss2++, which adds LambdaRank to mu times
    NDCG-Loss2; k: nDCG of the first k, and pairs of which one passage is among them; eps: lower bound of the best DCG.
    """
    places = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
    discounts = torch.log2(1 + places)  # (S,), of the 1st place, of the 2nd and so on
    graded = labels.clamp(min=0)  # a gain below 0 has no meaning
    best = ((2 ** graded.sort(descending=True, dim=1).values - 1) / discounts)[:, :k].sum(1, keepdim=True)
    by_score = graded.gather(1, scores.argsort(descending=True, dim=1, stable=True))
    gains = (2**by_score - 1) / best.clamp(min=eps)  # (P, S)
    if weighting == "ndcg1":
        return _pairwise(scores, labels, (gains / discounts)[:, :, None], k, sigma, all_pairs=True)
    of_places = torch.zeros(len(places), len(places), device=scores.device, dtype=scores.dtype)
    if weighting != "lambdarank":
        apart = (places[:, None] - places).abs().long()  # in places; 0 on the diagonal, where no pair is
        closer, further = discounts[(apart - 1).clamp(min=0)], discounts[apart]
        of_places += (1 / closer - 1 / further).abs() * (mu if weighting == "ndcg2pp" else 1.0)
    if weighting != "ndcg2":
        of_places += (1 / discounts[:, None] - 1 / discounts).abs()
    weights = of_places * (gains[:, :, None] - gains[:, None, :]).abs()
    return _pairwise(scores, labels, weights, k, sigma)


def _pairwise(
    scores: Tensor, labels: Tensor, weights: Tensor | None, k: int | None, sigma: float, *, all_pairs: bool = False
) -> Tensor:
    """Return the weighted mean of -log2 sigmoid(sigma (s_i - s_j)) over the pairs of a row, (P,); 0 without pairs.

    weights: (P, S, S) or (P, S, 1) of pairs in the order of scores; all_pairs: not only those with label_i > label_j.
    """
    scores, order = scores.sort(descending=True, dim=1, stable=True)
    labels = labels.gather(1, order)
    counts = torch.ones_like(order, dtype=torch.bool)[:, :, None].expand(-1, -1, order.shape[1])
    if not all_pairs:
        counts = labels[:, :, None] > labels[:, None, :]
    if k is not None:
        is_first = torch.arange(order.shape[1], device=order.device) < k
        counts = counts & (is_first[:, None] | is_first)
    losses = -logsigmoid(sigma * (scores[:, :, None] - scores[:, None, :])) / math.log(2)
    losses = losses if weights is None else weights * losses
    return torch.where(counts, losses, 0.0).sum((1, 2)) / counts.sum((1, 2)).clamp(min=1)


LOSSES = {"bce": bce, "ranknet": ranknet, "listnet": listnet, "lambda": lambda_loss}
