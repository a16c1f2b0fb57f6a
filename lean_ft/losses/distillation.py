"""What a student costs against a teacher on batches of next tokens, as the settings of a recipe want it.

One call runs the student to its hidden states and sums the loss over the targets (`linear_distillation`), given what the
teacher says of the same batch. float16 is mixed precision, as in `CrossEntropy`.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from lean_ft.losses.chunk_tokens import loss_chunk_tokens
from lean_ft.losses.linear_distillation import TeacherStates, TopLogProbs, linear_distillation
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import DistillConfig, MemoryConfig, ModelConfig
from lean_ft.shards import ALONE, Ranks

Teacher = Callable[[Any], TeacherStates | TopLogProbs]
"""Of a batch on the student's device what the teacher says of it."""


class DistillationConfig(Protocol):
    """What the Config of a recipe that learns from a teacher has."""

    model: ModelConfig
    distill: DistillConfig
    memory: MemoryConfig
    compile: bool


class Distillation:
    """`distillation(model, batch, said, statistics)`: the sum over a batch's targets, a scalar to go backward from.

    Divide it by the targets of the whole optimizer step. A mixture of experts' router loss, which is a mean, is in the sum
    by the batch's targets.
    """

    def __init__(self, model: Any, cfg: DistillationConfig, ranks: Ranks = ALONE) -> None:
        """Takes what `cfg` says of the loss, its memory, and arithmetic for `model`, a `Decoder`; evaluations are over the
        batches of all `ranks`."""
        self._ranks = ranks
        self._device_type = model.output_weight.device.type
        self._is_float16 = cfg.model.dtype == "float16"
        self._settings: dict[str, Any] = {
            "divergence": cfg.distill.divergence,
            "beta": cfg.distill.beta_of_jsd,
            "temperature": cfg.distill.temperature,
            "cross_entropy_weight": cfg.distill.cross_entropy_weight,
            "chunk_tokens": loss_chunk_tokens(model, cfg.memory.loss_chunk_tokens),
            "accumulation_dtype": cfg.memory.loss_accumulation_dtype,
            "softcap": model.config.logits_softcap,
            "compile": cfg.compile,
        }

    def __call__(
        self, model: Any, batch: Any, said: TeacherStates | TopLogProbs, statistics: TokenStatistics | None = None
    ) -> Tensor:
        """batch: on the model's device, as `lean_ft.data.Batch` is; said: of it by the teacher; statistics: where to add
        what the metrics tell."""
        with torch.autocast(self._device_type, torch.float16, enabled=self._is_float16):
            hidden, router_loss = model(
                batch.input_ids,
                batch.positions,
                batch.cu_seqlens,
                return_hidden=True,
                return_router_loss=True,
                is_token=batch.is_token,
            )
            loss = linear_distillation(
                hidden,
                model.output_weight,
                batch.labels,
                said,
                num_targets=batch.num_targets,
                statistics=statistics,
                **self._settings,
            )
        if statistics is not None:
            statistics.add(loss=loss)
        if router_loss is None:
            return loss
        router_loss = router_loss * batch.num_targets
        if statistics is not None:
            statistics.add(router_aux_loss=router_loss)
        return loss + router_loss

    @torch.no_grad()
    def evaluate(self, model: Any, teacher: Teacher, batches: Iterable[Any]) -> dict[str, Any]:
        """Returns `eval_loss`, `eval_divergence` and what else the metrics tell: means over the targets of all batches.
        Without a target the loss is None, and alone."""
        statistics, num_targets = TokenStatistics(self._ranks), 0
        device = model.output_weight.device
        for batch in batches:
            here = batch.to(device)
            self(model, here, teacher(here), statistics)
            num_targets += batch.num_targets
        num_targets = self._ranks.total(num_targets)
        return statistics.means(num_targets, "eval_") if num_targets else {"eval_loss": None}
