"""The evaluation of held-out rows: the loss of each batch by itself, and where right passages are among all."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lean_ft.embedding.ranking import Correlation, Ranking
from lean_ft.losses.embedding import embedding_loss
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings.embedding_losses import EmbeddingLossConfig
from lean_ft.system.shards import ALONE, Ranks

if TYPE_CHECKING:
    from lean_ft.data.embedding import EmbeddingBatch


@torch.no_grad()
def evaluation_of(
    embed: Callable[["EmbeddingBatch"], Tensor],
    held_out: Iterable["EmbeddingBatch"],
    cfg: EmbeddingLossConfig,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    normalizes: bool = True,
) -> dict[str, Tensor | float | None]:
    """Return `eval_loss`, the mean over rows of the loss within each batch; for rows with a right passage, its place
    among all held-out passages (`Ranking`); for scored pairs, `eval_spearman`. The loss of a source of rows is that of
    its rows in each batch among themselves.

    embed: the vectors (rows, S, D) of a batch; normalizes: whether the model scales vectors to length 1.
    """
    statistics, num_rows = TokenStatistics(ranks), 0
    ranking = Correlation(ranks) if cfg.name == "cosent" else Ranking(ranks)
    for batch in statistics.following(held_out):
        vectors = embed(batch := batch.to(device))
        loss = vectors.new_zeros(())
        if batch.num_rows:  # else it only keeps ranks together
            loss, _ = embedding_loss(vectors, batch.scores, batch.identities, cfg, normalizes=normalizes)
        statistics.add(loss=loss * batch.num_rows)
        if batch.sources is not None:
            own = vectors.new_zeros(batch.num_rows)
            for source in set(batch.sources.of_rows.tolist()):
                rows = torch.from_numpy(np.flatnonzero(batch.sources.of_rows == source)).to(device)
                compared = vectors[rows], batch.scores[rows], batch.identities[rows]
                own[rows] = embedding_loss(*compared, cfg, normalizes=normalizes).loss
            statistics.by_source(loss=own)
        if isinstance(ranking, Correlation):
            ranking.add(vectors, batch.scores)
        else:
            ranking.add(vectors, batch.identities, batch.sources)
        num_rows += batch.num_rows
    return {**statistics.means(ranks.total(num_rows), "eval_"), **ranking.metrics()}
