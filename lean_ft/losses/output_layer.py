"""What the losses of all objectives begin with: a model's hidden states, and how the settings want its output layer computed.

float16 is mixed precision: the model's arithmetic, and the products of the loss, run in float16 whatever the weights are
kept in.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lean_ft.losses.chunk_tokens import loss_chunk_tokens
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings.run import LogitsConfig
from lean_ft.system.shards import Ranks


class OutputLayer:
    """What `cfg`, of any recipe that trains, says of the pass of `model`, a `Decoder`, to its hidden states and from there to the loss."""

    def __init__(self, model: Any, cfg: LogitsConfig) -> None:
        # Of each pass: `with output_layer.arithmetic():`
        self.arithmetic = partial(
            torch.autocast, model.output_weight.device.type, torch.float16, enabled=cfg.model.dtype == "float16"
        )
        # What `linear_cross_entropy` and its like take beside tensors, to have logits a chunk of tokens at a time.
        self.settings: dict[str, Any] = {
            "chunk_tokens": loss_chunk_tokens(model, cfg.memory.loss_chunk_tokens),
            "accumulation_dtype": cfg.memory.loss_accumulation_dtype,
            "softcap": model.config.logits_softcap,
            "compile": cfg.compile,
        }


def hidden_states(model: Any, batch: Any, *, of_rows: bool = False) -> tuple[Tensor, Tensor | None]:
    """The hidden states (B, T, D) of a batch that is on the device of `model`, a `Decoder`; and what a mixture of experts'
    router adds to a mean loss, if anything.

    batch: a `lean_ft.data.Batch`, or what has its `inputs`; of_rows: of all tokens, where several ranks share a row.
    """
    hidden, router_loss = model(**batch.inputs, return_hidden=True, return_router_loss=True)
    sharding = getattr(model, "sharding", None) if of_rows else None  # a module that is no Decoder has none
    row_tokens = None if sharding is None else sharding.row_tokens
    return hidden if row_tokens is None else row_tokens.gather(hidden), router_loss


def mean_losses(
    model: Any, batches: Iterable[Any], ranks: Ranks, add: Callable[[Any, TokenStatistics], Any]
) -> dict[str, Any]:
    """The means over the targets of all batches of what `add` adds to the statistics for each, which is on the device by then;
    `eval_` goes before their names. Without a target the loss is None, and alone."""
    statistics, num_targets, device = TokenStatistics(ranks), 0, model.output_weight.device
    for batch in batches:
        add(batch.to(device), statistics)
        num_targets += batch.num_targets
    num_targets = ranks.total(num_targets)
    return statistics.means(num_targets, "eval_") if num_targets else {"eval_loss": None}


def with_router_loss(
    loss: Tensor, router_loss: Tensor | None, num_targets: int, statistics: TokenStatistics | None
) -> Tensor:
    """A sum of losses, and with it what a mixture of experts' router adds to their mean; both told to the statistics."""
    terms = {"loss": loss} | ({} if router_loss is None else {"router_aux_loss": router_loss * num_targets})
    if statistics is not None:
        statistics.add(**terms)
    return loss if router_loss is None else loss + terms["router_aux_loss"]
