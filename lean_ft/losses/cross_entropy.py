"""The cross-entropy of a model on batches of next tokens, as the settings of a recipe want it.

One call runs the model to its hidden states and sums the loss over the targets, with logits that exist a chunk of tokens
at a time (`linear_cross_entropy`). float16 is mixed precision: the model's arithmetic, and the products of the loss, run
in float16 whatever the weights are kept in.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lean_ft.losses.linear_cross_entropy import linear_cross_entropy
from lean_ft.losses.output_layer import output_layer_settings
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import LossConfig, TrainingConfig
from lean_ft.shards import ALONE, Ranks

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
        self._device_type = model.output_weight.device.type
        self._is_float16 = cfg.model.dtype == "float16"
        self._settings = output_layer_settings(model, cfg)

    def __call__(self, model: Any, batch: Any, statistics: TokenStatistics | None = None) -> Tensor:
        """batch: on the model's device, as `lean_ft.data.Batch` is; statistics: where to add what the metrics tell."""
        return self._sum(model, batch, statistics, self._loss)

    @torch.no_grad()
    def evaluate(self, model: Any, batches: Iterable[Any]) -> dict[str, Any]:
        """Returns `eval_loss`, `eval_token_accuracy` and `eval_entropy`, scalars: means over the targets of all batches,
        of the plain cross-entropy without smoothing or further terms. Without a target the loss is None, and alone."""
        statistics, num_targets = TokenStatistics(self._ranks), 0
        device = model.output_weight.device
        for batch in batches:
            self._sum(model, batch.to(device), statistics, _PLAIN)
            num_targets += batch.num_targets
        num_targets = self._ranks.total(num_targets)
        return statistics.means(num_targets, "eval_") if num_targets else {"eval_loss": None}

    def _sum(self, model: Any, batch: Any, statistics: TokenStatistics | None, terms: LossConfig) -> Tensor:
        with torch.autocast(self._device_type, torch.float16, enabled=self._is_float16):
            hidden, router_loss = model(
                batch.input_ids,
                batch.positions,
                batch.cu_seqlens,
                return_hidden=True,
                return_router_loss=True,
                is_token=batch.is_token,
            )
            # A vocabulary that is cut over ranks has a loss of its own.
            cut = getattr(model, "cut_vocabulary", None)
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
