"""Distillation loss of a student against a teacher on next-token batches, with the recipe's settings.

One call runs the student and sums the loss over the targets (`linear_distillation`). The caller passes the teacher's
predictions for the same batch.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lean_ft.losses.linear_distillation import TeacherStates, TopLogProbs, linear_distillation
from lean_ft.losses.output_layer import OutputLayer, hidden_states, mean_losses, with_router_loss
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings.run import TaughtConfig
from lean_ft.system.shards import ALONE, Ranks

if TYPE_CHECKING:
    from lean_ft.data import Batch
    from lean_ft.models import Decoder

Teacher = Callable[["Batch"], TeacherStates | TopLogProbs]
"""Returns the teacher's predictions for a batch on the student's device."""


class Distillation:
    """`distillation(model, batch, said, statistics)` returns the loss summed over a batch's targets, a scalar.

    Divide the sum by the number of targets in the whole optimizer step. The router loss of a mixture of experts is a
    mean, so it is multiplied by the batch's number of targets.
    """

    def __init__(self, model: "Decoder", cfg: TaughtConfig, ranks: Ranks = ALONE) -> None:
        """Read the settings of distillation, memory and dtype from `cfg`.

        model: a `Decoder`; ranks: the ranks whose batches are evaluated together.
        """
        self._ranks = ranks
        self._output_layer = OutputLayer(model, cfg)
        self._terms: dict[str, Any] = {
            "divergence": cfg.distill.divergence,
            "beta": cfg.distill.beta_of_jsd,
            "temperature": cfg.distill.temperature,
            "cross_entropy_weight": cfg.distill.cross_entropy_weight,
        }

    def __call__(
        self,
        model: "Decoder",
        batch: "Batch",
        said: TeacherStates | TopLogProbs,
        statistics: TokenStatistics | None = None,
    ) -> Tensor:
        """batch: like `lean_ft.data.Batch`, on the model's device; said: the teacher's predictions for the batch;
        statistics: receives the metrics."""
        with self._output_layer.arithmetic():
            hidden, router_loss = hidden_states(model, batch)
            loss = linear_distillation(
                hidden,
                model.output_weight,
                batch.labels,
                said,
                num_targets=batch.num_targets,
                statistics=statistics,
                **self._terms,
                **self._output_layer.settings,
            )
        return with_router_loss(loss, router_loss, batch.num_targets, statistics)

    def evaluate(self, model: "Decoder", teacher: Teacher, batches: Iterable["Batch"]) -> dict[str, Tensor | None]:
        """Return `eval_loss`, `eval_divergence` and the other metrics, averaged over the targets of all batches.

        If there is no target, return only `eval_loss`: None.
        """
        return mean_losses(
            model, batches, self._ranks, lambda batch, statistics: self(model, batch, teacher(batch), statistics)
        )
