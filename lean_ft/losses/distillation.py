"""What a student costs against a teacher on batches of next tokens, as the settings of a recipe want it.

One call runs the student to its hidden states and sums the loss over the targets (`linear_distillation`), given what the
teacher says of the same batch.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lean_ft.losses.linear_distillation import TeacherStates, TopLogProbs, linear_distillation
from lean_ft.losses.output_layer import OutputLayer, hidden_states, mean_losses, with_router_loss
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings.run import TaughtConfig
from lean_ft.system.shards import ALONE, Ranks

Teacher = Callable[[Any], TeacherStates | TopLogProbs]
"""Of a batch on the student's device what the teacher says of it."""


class Distillation:
    """`distillation(model, batch, said, statistics)`: the sum over a batch's targets, a scalar to go backward from.

    Divide it by the targets of the whole optimizer step. A mixture of experts' router loss, which is a mean, is in the sum
    by the batch's targets.
    """

    def __init__(self, model: Any, cfg: TaughtConfig, ranks: Ranks = ALONE) -> None:
        """Takes what `cfg`, of a recipe that has `distill`, says of the loss, its memory, and arithmetic for `model`, a `Decoder`; evaluations are over the
        batches of all `ranks`."""
        self._ranks = ranks
        self._output_layer = OutputLayer(model, cfg)
        self._terms: dict[str, Any] = {
            "divergence": cfg.distill.divergence,
            "beta": cfg.distill.beta_of_jsd,
            "temperature": cfg.distill.temperature,
            "cross_entropy_weight": cfg.distill.cross_entropy_weight,
        }

    def __call__(
        self, model: Any, batch: Any, said: TeacherStates | TopLogProbs, statistics: TokenStatistics | None = None
    ) -> Tensor:
        """batch: on the model's device, as `lean_ft.data.Batch` is; said: of it by the teacher; statistics: where to add
        what the metrics tell."""
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

    @torch.no_grad()
    def evaluate(self, model: Any, teacher: Teacher, batches: Iterable[Any]) -> dict[str, Any]:
        """Returns `eval_loss`, `eval_divergence` and what else the metrics tell: means over the targets of all batches.
        Without a target the loss is None, and alone."""
        return mean_losses(
            model, batches, self._ranks, lambda batch, statistics: self(model, batch, teacher(batch), statistics)
        )
