"""How a recipe's settings want what the losses compute at the output layer, a chunk of tokens at a time."""

from typing import Any, Protocol

from lean_ft.losses.chunk_tokens import loss_chunk_tokens
from lean_ft.settings import MemoryConfig


class OutputLayerConfig(Protocol):
    """What the Config of any recipe that trains has."""

    memory: MemoryConfig
    compile: bool


def output_layer_settings(model: Any, cfg: OutputLayerConfig) -> dict[str, Any]:
    """What `linear_cross_entropy` and `linear_log_probs` take beside tensors, for `model`, a `Decoder`."""
    return {
        "chunk_tokens": loss_chunk_tokens(model, cfg.memory.loss_chunk_tokens),
        "accumulation_dtype": cfg.memory.loss_accumulation_dtype,
        "softcap": model.config.logits_softcap,
        "compile": cfg.compile,
    }
