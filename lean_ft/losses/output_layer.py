"""What the losses of all objectives begin with: a model's hidden states, and how the settings want its output layer computed.

float16 is mixed precision: the model's arithmetic, and the products of the loss, run in float16 whatever the weights are
kept in.
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lean_ft.losses.chunk_tokens import loss_chunk_tokens
from lean_ft.settings import MemoryConfig, ModelConfig


class OutputLayerConfig(Protocol):
    """What the Config of any recipe that trains has."""

    model: ModelConfig
    memory: MemoryConfig
    compile: bool


class OutputLayer:
    """What `cfg` says of the pass of `model`, a `Decoder`, to its hidden states and from there to the loss."""

    def __init__(self, model: Any, cfg: OutputLayerConfig) -> None:
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
    return hidden if model.tokens is None or not of_rows else model.tokens.gather(hidden), router_loss
