"""Hidden states and output-layer settings, shared by the losses of all objectives.

float16 means mixed precision: the model and the matrix products of the loss run in float16, whatever the dtype of the
weights.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings.run import LogitsConfig
from lean_ft.system.environment import memory_bytes
from lean_ft.system.passes import evaluating
from lean_ft.system.shards import Ranks, whole_numel

if TYPE_CHECKING:
    from lean_ft.data import Batch
    from lean_ft.models import Decoder

BatchT = TypeVar("BatchT", bound="Batch")

SHARE = 64  # a chunk takes at most 1 / SHARE of the memory that the weights leave
FEWEST_TOKENS, MOST_TOKENS = 256, 4096
UNKNOWN_MEMORY_TOKENS = 1024  # if the memory size is unknown


class OutputLayer:
    """Autocast and chunking settings for the forward pass and the loss of `model`, a `Decoder`."""

    def __init__(self, model: "Decoder", cfg: LogitsConfig) -> None:
        # Wrap each forward pass: `with output_layer.arithmetic():`
        self.arithmetic = partial(
            torch.autocast, model.output_weight.device.type, torch.float16, enabled=cfg.model.dtype == "float16"
        )
        # Keyword arguments of `linear_cross_entropy` and the other losses that compute logits in chunks.
        self.settings: dict[str, Any] = {
            "chunk_tokens": loss_chunk_tokens(model, cfg.memory.loss_chunk_tokens),
            "accumulation_dtype": cfg.memory.loss_accumulation_dtype,
            "softcap": model.config.logits_softcap,
            "compile": cfg.compile,
        }


def hidden_states(model: "Decoder", batch: "Batch", *, of_rows: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states (B, T, D) and, for a mixture of experts, the router's auxiliary loss.

    model: a `Decoder`; batch: a `lean_ft.data.Batch`, or any object with its `inputs`, on the model's device; of_rows:
    gather the hidden states of all tokens if several ranks share a row.
    """
    hidden, router_loss = model(**batch.inputs, return_hidden=True, return_router_loss=True)
    sharding = getattr(model, "sharding", None) if of_rows else None  # only a Decoder has one
    row_tokens = None if sharding is None else sharding.row_tokens
    return hidden if row_tokens is None else row_tokens.gather(hidden), router_loss


def mean_losses(
    model: "Decoder", batches: Iterable[BatchT], ranks: Ranks, add: Callable[[BatchT, TokenStatistics], object]
) -> dict[str, Tensor | None]:
    """Return the statistics averaged over the targets of all batches, with `eval_` before their names.

    add: called with each batch, on the device, and the statistics, while the model is in evaluation mode. Without any
    target, return only `eval_loss`: None.
    """
    statistics, num_targets, device = TokenStatistics(ranks), 0, model.output_weight.device
    with evaluating(model):
        for batch in statistics.following(batches):
            add(batch.to(device), statistics)
            num_targets += batch.num_targets
    num_targets = ranks.total(num_targets)
    return {**statistics.means(num_targets, "eval_")} if num_targets else {"eval_loss": None}


def with_router_loss(
    loss: Tensor, router_loss: Tensor | None, num_targets: int, statistics: TokenStatistics | None
) -> Tensor:
    """Return the summed loss plus the router loss times `num_targets`, and add both to the statistics."""
    terms = {"loss": loss} | ({} if router_loss is None else {"router_aux_loss": router_loss * num_targets})
    if statistics is not None:
        statistics.add(**terms)
    return loss if router_loss is None else loss + terms["router_aux_loss"]


def loss_chunk_tokens(model: nn.Module, chosen: int | Literal["auto"]) -> int:
    """Return the target tokens per chunk of C * V logits: `chosen`, or for `auto` a size for this model and its device.

    Small chunks make narrow matrix products and add the output weight's gradient often; large chunks take memory while
    everything that backward needs is alive. The share is of the device's total memory, not of its free memory: the
    chunk size decides how sums are rounded, and a resumed run must choose the same.
    """
    if chosen != "auto":
        return chosen
    weight = model.output_weight
    assert isinstance(weight, Tensor)
    total_bytes = memory_bytes(weight.device)
    if total_bytes is None:
        return UNKNOWN_MEMORY_TOKENS
    room_bytes = total_bytes - sum(whole_numel(param) * param.element_size() for param in model.parameters())
    tokens = max(1, room_bytes // SHARE // (weight.shape[0] * weight.element_size()))
    return min(max(2 ** math.floor(math.log2(tokens)), FEWEST_TOKENS), MOST_TOKENS)
