"""Losses of the vectors of texts: InfoNCE, CoSENT, triplet, and two that learn a teacher's scores.

A loss gets the vectors of all rows of a step, also those of other micro-batches and ranks, and returns a scalar. Rows
have a query, its own passage, and negatives. InfoNCE compares every query with every passage. It computes similarities
and their gradients for `chunk_rows` queries at a time, during the forward pass, so no matrix of all similarities exists
(as `linear_cross_entropy` does with logits).

Values and gradients are those of sentence-transformers 6.2, except that InfoNCE leaves duplicates out of the negatives,
and triplet takes several negatives. Left out: losses with a guide model (GISTEmbed), and losses of class labels.

Shapes: P rows, S texts of a row, N = P (S - 1) passages, C rows of a chunk, K texts that a chunk is compared with, D
features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, mse_loss, normalize, relu

from lean_ft.settings.embedding_losses import (
    LEARN_SCORES,
    Direction,
    Distance,
    EmbeddingLossConfig,
    Hardness,
    Similarity,
)
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.user_functions import check_shape, is_function_path, load_function


class EmbeddingLoss(NamedTuple):
    """The loss of a step, and the number of passages that InfoNCE left out as duplicates; both are scalars."""

    loss: Tensor
    num_masked: Tensor  # int64, summed over queries


def embedding_loss(
    vectors: Tensor, scores: Tensor, identities: Tensor, cfg: EmbeddingLossConfig, *, normalizes: bool = True
) -> EmbeddingLoss:
    """Return the loss of all rows of a step, with the sizes of `cfg.matryoshka`.

    vectors: (P, S, D), of any length; scores: (P, S - 1), of the passages, read by cosent, margin_mse and kl;
    identities: (P, S) int64, equal numbers for equal texts; normalizes: whether the model scales its vectors to length
    1 before it returns them. Distances and dot products are then those of scaled vectors; cosines always are.

    Raises ValueError if a Matryoshka size is above D. Matryoshka: Kusupati et al. 2022, arXiv:2205.13147.
    """
    check_matryoshka(cfg, vectors.shape[-1])
    sizes = cfg.matryoshka or [vectors.shape[-1]]
    weights = cfg.matryoshka_weights or [1.0] * len(sizes)
    scales = cfg.name not in COMPARES_COSINES and (normalizes or bool(cfg.matryoshka))
    masks = cfg.name == "infonce" and cfg.of_loss["mask_duplicates"]
    losses = list[Tensor]()
    for size, weight in zip(sizes, weights, strict=True):
        cut = vectors[..., :size]
        if scales:
            cut = normalize(cut, dim=-1)
        losses.append(weight * _loss(cut, scores, identities if masks else None, cfg))
    num_masked = _num_duplicates(identities) if masks else identities.new_zeros(())
    return EmbeddingLoss(torch.stack(losses).sum(), num_masked)


def _loss(vectors: Tensor, scores: Tensor, identities: Tensor | None, cfg: EmbeddingLossConfig) -> Tensor:
    own = cfg.of_loss
    if cfg.name == "infonce":
        mode, strength = own.pop("hardness_mode"), own.pop("hardness_strength")
        del own["mask_duplicates"]
        return infonce(vectors, identities, hardness=None if mode is None else (mode, strength), **own)
    if cfg.name == "triplet":
        return triplet(vectors, **own)
    if is_function_path(cfg.name):
        return check_shape(cfg.name, load_function(cfg.name, cosent)(vectors, scores), ())
    return _LOSSES_OF_SCORES[cfg.name](vectors, scores, **own)


def check_matryoshka(cfg: EmbeddingLossConfig, width: int) -> None:
    """Raise ValueError if a size of `cfg.matryoshka` is above the number of features of the model's vectors."""
    above = [size for size in cfg.matryoshka if size > width]
    if above:
        raise ValueError(
            f"loss.matryoshka has the size {above[0]}, and the vectors of this model have {width} features. Set sizes "
            f"of at most {width}."
        )


def check_scores(cfg: EmbeddingLossConfig, scores: Tensor) -> None:
    """Raise ValueError if a loss that learns scores gets equal ones, which rows without scores have: its gradient is 0.

    scores: of all rows, or of enough rows that different scores are certain; in host memory.
    """
    if cfg.name in LEARN_SCORES and scores.numel() > 1 and bool((scores == scores.flatten()[0]).all()):
        raise ValueError(
            f"loss.name={cfg.name} learns the differences of scores, and all {scores.numel():,} scores are "
            f"{scores.flatten()[0].item():g}. Give the rows scores that differ, or set loss.name=infonce for rows with "
            "a right passage."
        )


# InfoNCE --------------------------------------------------------------------------------------------------------------


def infonce(
    vectors: Tensor,
    identities: Tensor | None = None,
    *,
    temperature: float = 0.05,
    directions: Sequence[Direction] = ("query_to_doc",),
    partition_mode: str = "joint",
    hardness: tuple[Hardness, float] | None = None,
    chunk_rows: int = 512,
) -> Tensor:
    """Return the mean cross-entropy of each query's own passage among all passages.

    van den Oord et al. 2018, arXiv:1807.03748; both directions from Günther et al. 2023, arXiv:2310.19923; all four in
    one softmax from Li et al. 2023 (GTE), arXiv:2308.03281.

    Args:
        vectors: (P, S, D), each row a query, its own passage, and negatives; scaled to length 1 here.
        identities: (P, S) int64, equal numbers for equal texts. A passage with the text of a query's own passage is no
            negative; nor is a query with the same text or the same own passage. None compares with all of them.
        temperature: divides cosines.
        directions: whose similarities compete with that of the query and its own passage: the query's to all passages,
            the own passage's to all queries, the query's to other queries, the own passage's to other rows' passages.
        partition_mode: `joint`, one softmax over all directions, or `per_direction`, the mean of a softmax for each.
        hardness: negatives, and the factor of the constant cosine that is added to their logit for query_to_doc. Lan et
            al. 2025, arXiv:2503.04812; for explicit negatives EmbeddingGemma, arXiv:2509.20354.
        chunk_rows: rows whose similarities are in memory at once.
    """
    scaled = normalize(vectors, dim=-1)
    queries, passages = scaled[:, 0], scaled[:, 1:].transpose(0, 1).flatten(0, 1)  # (P, D), (N, D)
    ids = None if identities is None else (identities[:, 0], identities[:, 1:].T.flatten())
    compared = _Compared(ids, len(queries), temperature, tuple(directions), partition_mode == "joint", hardness)
    loss = _InfoNCE.apply(queries, passages, compared, chunk_rows, torch.is_grad_enabled())
    return loss / len(queries)


def _num_duplicates(identities: Tensor) -> Tensor:
    """Return how many passages have the text of a query's own passage, without the own ones, summed over queries."""
    own, passages = identities[:, 1].contiguous(), identities[:, 1:].flatten().sort().values
    equal = torch.searchsorted(passages, own, right=True) - torch.searchsorted(passages, own)
    return equal.sum() - len(own)


@dataclass(frozen=True)
class _Compared:
    """Which texts the rows of a chunk are compared with, and how."""

    ids: tuple[Tensor, Tensor] | None  # (P,) of queries, (N,) of passages; None: duplicates are negatives
    num_rows: int
    temperature: float
    directions: tuple[Direction, ...]
    is_joint: bool
    hardness: tuple[Hardness, float] | None

    def logits(self, direction: Direction, similarities: Tensor, rows: Tensor) -> Tensor:
        """Return the logits of a direction, (C, K), from similarities that are overwritten; rows: (C,)."""
        text = torch.arange(similarities.shape[1], device=rows.device)
        is_own = text == rows[:, None]  # the row's own query or own passage
        is_of_row = text % self.num_rows == rows[:, None]  # or its negatives
        penalty = None
        if direction == "query_to_doc" and self.hardness is not None:
            mode, strength = self.hardness
            is_hard = {"in_batch_negatives": ~is_of_row, "all_negatives": ~is_own}.get(mode, is_of_row & ~is_own)
            penalty = similarities.mul(strength).masked_fill_(~is_hard, 0.0)
        logits = similarities.div_(self.temperature)
        if penalty is not None:
            logits += penalty
        excluded = self._excluded(direction, rows, is_own, is_of_row)
        return logits if excluded is None else logits.masked_fill_(excluded, float("-inf"))

    def _excluded(self, direction: Direction, rows: Tensor, is_own: Tensor, is_of_row: Tensor) -> Tensor | None:
        """Return the texts that a row is not compared with, (C, K): itself, and duplicates."""
        among_queries = direction.endswith("query")
        itself = {"query_to_query": is_own, "doc_to_doc": is_of_row}.get(direction)
        if self.ids is None:
            return itself
        queries, passages = self.ids
        own = passages[: self.num_rows]
        equal = (own if among_queries else passages) == own[rows, None]
        if direction == "query_to_query":
            equal |= queries == queries[rows, None]
        return equal & ~is_own if itself is None else equal | itself


class _InfoNCE(torch.autograd.Function):
    """The loss summed over rows. Gradients are computed during the forward pass."""

    @staticmethod
    def forward(
        ctx: AutogradContext[Tensor, Tensor],
        queries: Tensor,  # (P, D)
        passages: Tensor,  # (N, D), the P own passages first
        compared: _Compared,
        chunk_rows: int,
        grad_enabled: bool,
    ) -> Tensor:
        texts = {"query": queries, "doc": passages}
        needs_gradients = grad_enabled and any(ctx.needs_input_grad[:2])
        gradients = {side: torch.zeros_like(some) for side, some in texts.items()} if needs_gradients else {}
        total = queries.new_zeros(())
        for first in range(0, len(queries), chunk_rows):
            chunk = slice(first, min(first + chunk_rows, len(queries)))
            rows = torch.arange(chunk.start, chunk.stop, device=queries.device)
            logits = dict[Direction, Tensor]()
            for direction in compared.directions:
                anchor, other = direction.split("_to_")
                logits[direction] = compared.logits(direction, texts[anchor][chunk] @ texts[other].T, rows)
            right = logits["query_to_doc"].gather(1, rows[:, None])
            log_z = torch.stack([matrix.logsumexp(1, keepdim=True) for matrix in logits.values()])
            if compared.is_joint:
                log_z = log_z.logsumexp(0).expand_as(log_z)
            total += (log_z.mean(0) - right).sum()
            if not needs_gradients:
                continue
            for direction, of_direction in zip(compared.directions, log_z, strict=True):
                softmax = logits.pop(direction).sub_(of_direction).exp_()
                if not compared.is_joint:
                    softmax /= len(compared.directions)
                if direction == "query_to_doc":
                    softmax.scatter_add_(1, rows[:, None], softmax.new_full((len(rows), 1), -1.0))
                softmax /= compared.temperature
                anchor, other = direction.split("_to_")
                gradients[anchor][chunk].addmm_(softmax, texts[other])
                gradients[other].addmm_(softmax.T, texts[anchor][chunk])
        if needs_gradients:
            ctx.save_for_backward(gradients["query"], gradients["doc"])
        return total

    @staticmethod
    def backward(ctx: AutogradContext[Tensor, Tensor], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        queries, passages = ctx.saved_tensors
        return queries * grad_outputs[0], passages * grad_outputs[0], None, None, None


# Losses within a row, and of scores -----------------------------------------------------------------------------------


def similarities(vectors: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """Return the similarity of each row's query and each of its passages, (P, S - 1); vectors: (P, S, D)."""
    if similarity == "cosine":
        vectors = normalize(vectors, dim=-1)
    return (vectors[:, :1] * vectors[:, 1:]).sum(-1)


def cosent(vectors: Tensor, scores: Tensor, *, temperature: float = 0.05) -> Tensor:
    """Return log(1 + sum of exp((c_j - c_i) / temperature)) over all pairs of texts i and j with score_i > score_j.

    c: cosines of a row's query and its passages; scores: (P, S - 1); vectors: (P, S, D). Su 2022,
    https://kexue.fm/archives/8847; Huang et al. 2024, doi:10.1109/TASLP.2024.3402087.
    """
    scores, order = scores.flatten().sort()
    scaled = similarities(vectors).flatten()[order] / temperature
    # With pairs in the order of their scores, the sum over pairs with a higher one is cumulative from the end.
    higher = torch.searchsorted(scores, scores, right=True)
    from_each_on = (-scaled).flip(0).logcumsumexp(0).flip(0)
    from_each_on = torch.cat((from_each_on, scaled.new_full((1,), float("-inf"))))
    return torch.cat((scaled.new_zeros(1), scaled + from_each_on[higher])).logsumexp(0)


def triplet(vectors: Tensor, *, margin: float = 5.0, distance: Distance = "euclidean") -> Tensor:
    """Return max(0, d(query, own passage) - d(query, negative) + margin), averaged over all negatives.

    vectors: (P, S, D). Hermans et al. 2017, arXiv:1703.07737, with the negatives of the row.
    """
    if distance == "cosine":
        distances = 1 - similarities(vectors)
    else:
        order = 2 if distance == "euclidean" else 1
        distances = torch.linalg.vector_norm(vectors[:, :1] - vectors[:, 1:], order, dim=-1)  # (P, S - 1)
    return relu(distances[:, :1] - distances[:, 1:] + margin).mean()


def margin_mse(vectors: Tensor, scores: Tensor, *, similarity: Similarity = "dot") -> Tensor:
    """Return the mean squared error of margins: how much more similar the own passage is than a negative, next to how
    much higher the teacher scored it.

    vectors: (P, S, D); scores: (P, S - 1). Hofstätter et al. 2020, arXiv:2010.02666.
    """
    margins, expected = (
        values[:, :1] - values[:, 1:] for values in (similarities(vectors, similarity), scores.to(vectors.dtype))
    )
    return mse_loss(margins, expected)


def kl(
    vectors: Tensor,
    scores: Tensor,
    *,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    similarity: Similarity = "dot",
) -> Tensor:
    """Return KL(teacher || model) of the softmax over a row's passages, times temperature^2, averaged over rows.

    vectors: (P, S, D); scores: (P, S - 1), the teacher's, divided by teacher_temperature (None: temperature). Lin et
    al. 2020, arXiv:2010.11386; the factor from Hinton et al. 2015, arXiv:1503.02531.
    """
    log_probs = (similarities(vectors, similarity) / temperature).log_softmax(1)
    teacher = (scores.to(vectors.dtype) / (teacher_temperature or temperature)).softmax(1)
    return kl_div(log_probs, teacher, reduction="batchmean") * temperature**2


COMPARES_COSINES = ("infonce", "cosent")
"""Losses to which the length of vectors makes no difference."""
_LOSSES_OF_SCORES: dict[str, Callable[..., Tensor]] = {"cosent": cosent, "margin_mse": margin_mse, "kl": kl}
