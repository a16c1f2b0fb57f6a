"""Frozen second models: references and teachers."""

import torch

from lean_ft.memory import apply_memory, stream_weights
from lean_ft.models import Decoder, load_model
from lean_ft.parallel import cut, parallelize
from lean_ft.peft import quantize_as_loaded
from lean_ft.settings import LoRAConfig, MemoryConfig, ModelConfig, ParallelConfig
from lean_ft.system.host_link import HostLink
from lean_ft.system.shards import ALONE, Ranks


def load_frozen(
    model: str | ModelConfig,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    images: str = "none",
    nf4: bool = False,
    link: HostLink | None = None,
    memory: MemoryConfig,
    compile: bool,
    parallel: ParallelConfig | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """Return a model without gradients; `nf4` quantizes its linear layers to 4 bits, and a `link` streams its layers
    from host memory. `images` is a value of `model.images`, for a `model` that is a path.

    Memory settings apply as far as they concern forward passes. The model is sharded over the ranks like the one that
    trains, unless it is quantized or streamed; then each rank has all of it. Raises as `load_model` and
    `quantize_as_loaded` do.
    """
    is_cut_first = ranks.size > 1 and not nf4 and link is None
    quantize = quantize_as_loaded(LoRAConfig.model_validate({"quantize": "nf4" if nf4 else "none"}))
    first = "cpu" if link is not None else "meta" if is_cut_first else device
    tower = "none" if images == "none" else "frozen"
    frozen = load_model(model, first, dtype, after_module=quantize, images=tower).requires_grad_(False).eval()
    # Checkpointing and offload only serve a backward pass.
    for_forward = {"activation_checkpointing": "none", "activation_offload": False}
    for_forward |= {"tied_gradient": "separate", "frozen_embeddings": "device", "experts": "device"}
    if parallel is not None:
        cut(frozen, parallel, ranks)
    apply_memory(frozen, memory.model_copy(update=for_forward), compile=compile)
    if link is not None:
        stream_weights(frozen, link)
    elif parallel is not None:
        # Gathered weights are only kept for a backward pass.
        parallelize(frozen, parallel.model_copy(update={"reshard_after_forward": True}), ranks)
    return frozen
