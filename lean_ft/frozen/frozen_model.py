"""Frozen second models: references and teachers."""

from typing import Unpack

import torch

from lean_ft.memory import apply_memory, stream_weights
from lean_ft.models import Decoder, load_model
from lean_ft.models.load_options import LoadKeywords
from lean_ft.parallel import cut, parallelize
from lean_ft.settings import MemoryConfig, ModelConfig, ParallelConfig, RecipeConfig
from lean_ft.system.host_link import HostLink
from lean_ft.system.shards import Ranks


def load_frozen(
    model: str | ModelConfig,
    device: torch.device,
    cfg: RecipeConfig,
    ranks: Ranks,
    link: HostLink | None = None,
    **options: Unpack[LoadKeywords],
) -> Decoder:
    """Return a model without gradients for a run with the settings `cfg`; a `link` streams its layers from host memory.
    `options` are those of `load_model`.

    The model is sharded over the ranks like the one that trains, unless it is quantized or streamed; then each rank has
    all of it. Raises as `load_model` does.
    """
    is_cut_first = ranks.size > 1 and options.get("quantize") is None and link is None
    first = "cpu" if link is not None else "meta" if is_cut_first else device
    frozen = load_model(model, first, **options).requires_grad_(False).eval()
    parallel = cfg.group(ParallelConfig)
    if parallel is not None:
        cut(frozen, parallel, ranks)
    apply_memory(frozen, for_forward(cfg.needed(MemoryConfig)), compile=cfg.compile)
    if link is not None:
        stream_weights(frozen, link)
    elif parallel is not None:
        # Gathered weights are only kept for a backward pass.
        parallelize(frozen, parallel.model_copy(update={"reshard_after_forward": True}), ranks)
    return frozen


def for_forward(memory: MemoryConfig) -> MemoryConfig:
    """The memory settings without those that only serve training: checkpointing, offload and weights on the host."""
    off = {"activation_checkpointing": "none", "activation_offload": False}
    off |= {"tied_gradient": "separate", "frozen_embeddings": "device", "experts": "device"}
    return memory.model_copy(update=off)
