"""Metrics of held-out rows: retrieval over all passages, rank correlation with scores, and the order within rows.

A text counts once, so equal passages are one, and all own passages of equal queries are right for them. Ties count
against the model: a wrong passage with the similarity of a right one is ranked before it, and so is one whose
similarity is not a number. A model that maps all texts to one vector finds nothing.

Each rank adds its own rows and calls `metrics`, which every rank calls. Ranks that share a row's tokens have the same
rows, of which one counts. Rows that fill up a rank's batches are left out by the caller.

Sources: nDCG, Järvelin and Kekäläinen 2002, doi:10.1145/582415.582418; values as in sentence-transformers'
InformationRetrievalEvaluator, and Spearman's correlation as in SciPy.

Shapes: R rows of all ranks, S texts of a row, Q different queries, U different passages, E pairs of a query and a right
passage, C pairs of a chunk, D features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lean_ft.data.by_source import BatchSources
from lean_ft.system.shards import ALONE, Ranks

Metrics = dict[str, float | None]


class _Rows:
    """Values of rows that each rank adds."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks, self._added = ranks, list[tuple[Tensor, ...]]()
        self._names: tuple[str, ...] = ()  # of the sources of rows, if there are several

    def _add(self, *values: Tensor, sources: BatchSources | None = None) -> None:
        """Keep tensors with one entry per row; the last one is the number of its source, if there are several. A rank
        without rows adds tensors of 0 rows, for their shapes."""
        if sources is not None:
            self._names = sources.names
            values = *values, torch.from_numpy(sources.of_rows).to(values[0].device)
        self._added.append(tuple(value.detach() for value in values))

    def _by_source(self, metric: str, values: Tensor, sources: Sequence[Tensor]) -> Metrics:
        """Return the mean of values (R,) over the rows of each source; sources: [(R,)], or [] without several."""
        means = Metrics()
        for number, name in enumerate(self._names if sources else ()):
            if len(own := values[sources[0] == number]):
                means[f"eval_{metric}/{name}"] = float(own.mean())
        return means

    def _of_all_ranks(self) -> tuple[tuple[Tensor, ...], slice] | None:
        """The values of all ranks' rows, on every rank, and which rows are this rank's; None without rows."""
        ranks, columns = self._ranks, [torch.cat(column) for column in zip(*self._added, strict=True)]
        counts = ranks.on_every_rank(lambda: (len(columns[0]) if columns else 0, bool(columns)))
        assert len({has_added for _, has_added in counts}) == 1, "a rank without rows adds tensors of 0 rows"
        counts = [0 if rank % ranks.num_sharing else number for rank, (number, _) in enumerate(counts)]
        first, number = sum(counts[: ranks.rank]), counts[ranks.rank]
        own = slice(first, first + number)
        if not sum(counts):
            return None
        if ranks.size == 1:
            return tuple(columns), own
        gathered = list[Tensor]()
        for column in columns:  # each rank fills in its rows of zeros
            whole = column.new_zeros(sum(counts), *column.shape[1:])
            whole[own] = column[:number]
            gathered.append(ranks.sum(whole))
        return tuple(gathered), own


class Ranking(_Rows):
    """Where the right passages of each held-out query are among all held-out passages."""

    def __init__(
        self, ranks: Ranks = ALONE, *, recall_at: Sequence[int] = (1, 10), cutoff: int = 10, chunk_rows: int = 1024
    ) -> None:
        """recall_at: numbers of first passages for recall; cutoff: the same for nDCG and MRR; chunk_rows: queries whose
        similarities to all passages are in memory at once."""
        super().__init__(ranks)
        self._recall_at, self._cutoff, self._chunk_rows = recall_at, cutoff, chunk_rows

    @torch.no_grad()
    def add(self, vectors: Tensor, identities: Tensor, sources: BatchSources | None = None) -> None:
        """vectors: (rows, S, D) of this rank's rows: query, own passage, negatives; identities: (rows, S) int64, equal
        numbers for equal texts, also in other batches and on other ranks; sources: of the rows."""
        self._add(normalize(vectors, dim=-1), identities, sources=sources)

    @torch.no_grad()
    def metrics(self) -> Metrics:
        """Return `eval_ndcg@10`, `eval_mrr@10`, `eval_recall@1` and `eval_recall@10`, means over queries, and the first
        recall for the queries of each source among all passages; empty without rows."""
        gathered = self._of_all_ranks()
        if gathered is None:
            return {}
        (vectors, ids, *sources), _ = gathered
        query, queries = _different(ids[:, 0])  # (R,) in 0 to Q, and (Q,) in 0 to R
        passage, passages = _different(ids[:, 1:].flatten())
        pairs = torch.unique(torch.stack((query, passage.view(len(ids), -1)[:, 0]), 1), dim=0)  # (E, 2), by query
        texts = vectors[:, 1:].flatten(0, 1)[passages]  # (U, D)
        num_right = pairs[:, 0].bincount(minlength=len(queries))
        best = (1 / _discounts(self._cutoff, vectors.device)).cumsum(0)  # DCG of 1, 2 ... right passages
        sums = torch.zeros(2 + len(self._recall_at), dtype=torch.float64, device=vectors.device)
        of_queries = sums.new_zeros(len(queries))  # the first recall
        # Chunks of queries take turns between the ranks, and all pairs of a query are in one chunk.
        size, turn = self._ranks.size // self._ranks.num_sharing, self._ranks.rank // self._ranks.num_sharing
        for i, first in enumerate(range(0, len(queries), self._chunk_rows)):
            if i % size != turn or self._ranks.rank % self._ranks.num_sharing:
                continue
            chunk = slice(first, first + self._chunk_rows)
            is_in = (pairs[:, 0] >= first) & (pairs[:, 0] < first + self._chunk_rows)
            row, column = pairs[is_in].unbind(1)
            place = _places(vectors[queries[chunk], 0] @ texts.T, row - first, column)
            share = 1 / num_right[row].double()
            gain = torch.where(place < self._cutoff, 1 / torch.log2(place.double() + 2), 0.0)
            sums[0] += (gain / best[num_right[row].clamp(max=self._cutoff) - 1]).sum()
            foremost = place.new_full((len(queries[chunk]),), len(texts)).scatter_reduce(0, row - first, place, "amin")
            sums[1] += torch.where(foremost < self._cutoff, 1 / (foremost.double() + 1), 0.0).sum()
            for j, most in enumerate(self._recall_at):
                sums[2 + j] += share[place < most].sum()
            if sources:
                of_queries += row.bincount(share * (place < self._recall_at[0]), minlength=len(queries))
        names = [f"ndcg@{self._cutoff}", f"mrr@{self._cutoff}", *(f"recall@{most}" for most in self._recall_at)]
        means = (self._ranks.sum(sums) / len(queries)).tolist()
        found: Metrics = {f"eval_{name}": mean for name, mean in zip(names, means, strict=True)}
        if not sources:
            return found
        return found | self._by_source(names[2], self._ranks.sum(of_queries), [sources[0][queries]])


def _different(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each text among the different ones, and the first place of each different text."""
    different, number = ids.unique(return_inverse=True)
    places = torch.arange(len(ids), device=ids.device)
    return number, places.new_full((len(different),), len(ids)).scatter_reduce(0, number, places, "amin")


def _discounts(number: int, device: torch.device) -> Tensor:
    return torch.log2(torch.arange(2, number + 2, dtype=torch.float64, device=device))


def _places(similarities: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return how many passages are before each right one, (C,).

    similarities: (queries of the chunk, U); row, column: (C,), its right passages, by query.
    """
    right = similarities[row, column]
    others = similarities.index_put((row, column), similarities.new_tensor(float("-inf")))
    wrong = others.shape[1] - (others[row] < right[:, None]).sum(1)
    # Among the right passages of a query, in the order of their similarity.
    order = right.nan_to_num(nan=float("-inf")).argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    number = row.bincount(minlength=len(similarities))
    starts = number.cumsum(0) - number
    among = torch.empty_like(row)
    among[order] = torch.arange(len(row), device=row.device) - starts[row[order]]
    return wrong + among


class Correlation(_Rows):
    """Spearman's correlation of cosines with scores, over all held-out pairs of texts."""

    @torch.no_grad()
    def add(self, vectors: Tensor, scores: Tensor) -> None:
        """vectors: (rows, S, D) of this rank's rows; scores: (rows, S - 1) of the query and each passage."""
        scaled = normalize(vectors, dim=-1)
        self._add((scaled[:, :1] * scaled[:, 1:]).sum(-1), scores)

    @torch.no_grad()
    def metrics(self) -> Metrics:
        """Return `eval_spearman`, None if it is not defined: with equal cosines or equal scores. Empty without rows."""
        gathered = self._of_all_ranks()
        if gathered is None:
            return {}
        ranked = [_mean_ranks(values.flatten()) for values in gathered[0]]
        cosines, scores = (values - values.mean() for values in ranked)
        norm = cosines.norm() * scores.norm()
        is_defined = bool(norm > 0) and all(bool(values.isfinite().all()) for values in gathered[0])
        return {"eval_spearman": float(cosines @ scores / norm) if is_defined else None}


def _mean_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value from 1 on, in float64; equal values have the mean of their ranks."""
    _, number, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[number]


class RowRanking(_Rows):
    """The order of the passages of each held-out row by a reranker's scores. Rows with equal labels have none and are
    left out."""

    def __init__(self, ranks: Ranks = ALONE, *, cutoff: int = 10) -> None:
        """cutoff: number of first passages for nDCG and MRR."""
        super().__init__(ranks)
        self._cutoff = cutoff

    @torch.no_grad()
    def add(self, scores: Tensor, labels: Tensor, sources: BatchSources | None = None) -> None:
        """scores, labels: (rows, S) of this rank's rows; sources: of the rows."""
        self._add(scores, labels, sources=sources)

    @torch.no_grad()
    def metrics(self) -> Metrics:
        """Return `eval_accuracy@1`, `eval_mrr@10` and `eval_ndcg@10`, means over rows, and the first one for each
        source; empty without rows.

        The passages with the highest label of a row are right for the first two; nDCG has the labels as gains, and 0
        for those below it.
        """
        gathered = self._of_all_ranks()
        if gathered is None:
            return {}
        scores, labels, *sources = gathered[0]
        has_order = (labels != labels[:, :1]).any(1)
        scores, labels = scores[has_order], labels[has_order].double()
        if not len(labels):
            return {}
        scores = torch.where(scores.isfinite().all(1, keepdim=True), scores, 0.0)  # all tied
        worst_first = labels.argsort(dim=1, stable=True)  # so that ties count against the model
        order = scores.gather(1, worst_first).argsort(dim=1, descending=True, stable=True)
        by_score = labels.gather(1, worst_first.gather(1, order))
        is_right = by_score == by_score.amax(1, keepdim=True)
        place = is_right.int().argmax(1)
        discounts = _discounts(labels.shape[1], labels.device)[: self._cutoff]
        gains = (by_score.clamp(min=0)[:, : self._cutoff] / discounts).sum(1)
        best = (labels.clamp(min=0).sort(1, descending=True).values[:, : self._cutoff] / discounts).sum(1)
        means = {
            "accuracy@1": (place == 0).double(),
            f"mrr@{self._cutoff}": torch.where(place < self._cutoff, 1 / (place.double() + 1), 0.0),
            f"ndcg@{self._cutoff}": torch.where(best > 0, gains / best, 0.0),
        }
        sources = [source[has_order] for source in sources]
        of_sources = self._by_source("accuracy@1", means["accuracy@1"], sources)
        return {f"eval_{name}": float(values.mean()) for name, values in means.items()} | of_sources
