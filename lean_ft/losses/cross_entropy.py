"""Cross-entropy of a model on next-token batches, with the recipe's settings.

One call runs the model and sums the loss over the targets. Logits exist for one chunk of tokens at a time
(`linear_cross_entropy`).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from lean_ft.losses.drafting import DraftingLoss, SumOfLosses
from lean_ft.losses.linear_cross_entropy import linear_cross_entropy
from lean_ft.losses.output_layer import OutputLayer, hidden_states, mean_losses, with_router_loss
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import LossConfig, TrainingConfig
from lean_ft.system.shards import ALONE, Ranks

if TYPE_CHECKING:
    from lean_ft.data import Batch
    from lean_ft.models import Decoder

_PLAIN = LossConfig.model_validate({})


class CrossEntropy:
    """`cross_entropy(model, batch, statistics)` returns the loss summed over a batch's targets, a scalar.

    Divide the sum by the number of targets in the whole optimizer step: a mean of means overweights short completions.
    The router loss of a mixture of experts is a mean, so it is multiplied by the batch's number of targets.
    """

    def __init__(self, model: "Decoder", cfg: TrainingConfig, ranks: Ranks = ALONE) -> None:
        """Read the settings of the loss, memory and dtype from `cfg`.

        model: a `Decoder`; ranks: the ranks whose batches are evaluated together.
        """
        self._ranks = ranks
        self._loss = cfg.loss
        self._output_layer = OutputLayer(model, cfg)
        self._of_batch = DraftingLoss(cfg.model) if model.config.num_drafting else next_token_loss

    def __call__(self, model: "Decoder", batch: "Batch", statistics: TokenStatistics | None = None) -> Tensor:
        """batch: like `lean_ft.data.Batch`, on the model's device; statistics: receives the metrics."""
        return self._sum(model, batch, statistics, self._loss)

    def evaluate(self, model: "Decoder", batches: Iterable["Batch"]) -> dict[str, Tensor | None]:
        """Return `eval_loss`, `eval_token_accuracy` and `eval_entropy`, scalar means over the targets of all batches.

        The loss is the plain cross-entropy, without label smoothing or z-loss. If there is no target, return only
        `eval_loss`: None.
        """
        return mean_losses(
            model, batches, self._ranks, lambda batch, statistics: self._sum(model, batch, statistics, _PLAIN)
        )

    def _sum(self, model: "Decoder", batch: "Batch", statistics: TokenStatistics | None, terms: LossConfig) -> Tensor:
        def cross_entropy(
            hidden: Tensor, labels: Tensor, num_targets: int, statistics: TokenStatistics | None
        ) -> Tensor:
            cut = model.sharding.vocabulary
            return linear_cross_entropy(
                hidden,
                model.output_weight if cut is None else cut.output_rows(),
                labels,
                cut=cut,
                num_targets=num_targets,
                label_smoothing=terms.label_smoothing,
                z_loss=terms.z_loss,
                statistics=statistics,
                **self._output_layer.settings,
            )

        with self._output_layer.arithmetic():
            return self._of_batch(model, batch, statistics, cross_entropy)


def next_token_loss(
    model: "Decoder", batch: "Batch", statistics: TokenStatistics | None, cross_entropy: SumOfLosses
) -> Tensor:
    """Return the next-token loss of a batch summed over its targets."""
    hidden, router_loss = hidden_states(model, batch)
    loss = cross_entropy(hidden, batch.labels, batch.num_targets, statistics)
    return with_router_loss(loss, router_loss, batch.num_targets, statistics)
