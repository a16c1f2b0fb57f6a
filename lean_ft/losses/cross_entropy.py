"""The cross-entropy of a model on batches of next tokens, as the settings of a recipe want it.

One call runs the model to its hidden states and sums the loss over the targets, with logits that exist a chunk of tokens
at a time (`linear_cross_entropy`).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lean_ft.losses.linear_cross_entropy import linear_cross_entropy
from lean_ft.losses.output_layer import OutputLayer, hidden_states, mean_losses, with_router_loss
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import LossConfig, TrainingConfig
from lean_ft.system.shards import ALONE, Ranks

_PLAIN = LossConfig.model_validate({})


class CrossEntropy:
    """`cross_entropy(model, batch, statistics)`: the sum over a batch's targets, a scalar to go backward from.

    Divide it by the targets of the whole optimizer step: a mean of means would overweight short answers. A mixture of
    experts' router loss, which is a mean, is in the sum by the batch's targets.
    """

    def __init__(self, model: Any, cfg: TrainingConfig, ranks: Ranks = ALONE) -> None:
        """Takes what `cfg` says of the loss, its memory, and arithmetic for `model`, a `Decoder`; evaluations are over the
        batches of all `ranks`."""
        self._ranks = ranks
        self._loss = cfg.loss
        self._output_layer = OutputLayer(model, cfg)

    def __call__(self, model: Any, batch: Any, statistics: TokenStatistics | None = None) -> Tensor:
        """batch: on the model's device, as `lean_ft.data.Batch` is; statistics: where to add what the metrics tell."""
        return self._sum(model, batch, statistics, self._loss)

    @torch.no_grad()
    def evaluate(self, model: Any, batches: Iterable[Any]) -> dict[str, Any]:
        """Returns `eval_loss`, `eval_token_accuracy` and `eval_entropy`, scalars: means over the targets of all batches,
        of the plain cross-entropy without smoothing or further terms. Without a target the loss is None, and alone."""
        return mean_losses(
            model, batches, self._ranks, lambda batch, statistics: self._sum(model, batch, statistics, _PLAIN)
        )

    def _sum(self, model: Any, batch: Any, statistics: TokenStatistics | None, terms: LossConfig) -> Tensor:
        with self._output_layer.arithmetic():
            hidden, router_loss = hidden_states(model, batch)
            # A vocabulary that is cut over ranks has a loss of its own.
            cut = model.sharding.vocabulary
            of_hidden = (
                partial(linear_cross_entropy, hidden, model.output_weight)
                if cut is None
                else partial(cut.cross_entropy, hidden)
            )
            loss = of_hidden(
                batch.labels,
                num_targets=batch.num_targets,
                label_smoothing=terms.label_smoothing,
                z_loss=terms.z_loss,
                statistics=statistics,
                **self._output_layer.settings,
            )
        return with_router_loss(loss, router_loss, batch.num_targets, statistics)
