"""The loss of a model before and after quantization."""

from collections.abc import Iterable

import torch

from lean_ft.data import Batch
from lean_ft.losses import TokenStatistics, linear_cross_entropy
from lean_ft.models import Decoder
from lean_ft.system.passes import evaluating


@torch.inference_mode()
def mean_loss(model: Decoder, batches: Iterable[Batch], statistics: TokenStatistics | None = None) -> float:
    """Return the mean cross-entropy over the targets of the batches; statistics: receives other metrics."""
    total, num_targets = 0.0, 0
    for batch in batches:
        with evaluating(model):
            hidden = model(**batch.inputs, return_hidden=True)
        loss = linear_cross_entropy(
            hidden,
            model.output_weight,
            batch.labels,
            num_targets=batch.num_targets,
            softcap=model.config.logits_softcap,
            statistics=statistics,
        )
        total, num_targets = total + loss.item(), num_targets + batch.num_targets
    return total / max(1, num_targets)
