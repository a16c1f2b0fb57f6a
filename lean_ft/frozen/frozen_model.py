"""A second model beside the one that trains, which only computes: a reference or a teacher."""

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
    nf4: bool = False,
    link: HostLink | None = None,
    memory: MemoryConfig,
    compile: bool,
    parallel: ParallelConfig | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """Returns a model without gradients, whose linear layers `nf4` keeps in 4 bits, or whose layers a `link` brings from
    the host's memory as they compute.

    Of the memory settings it takes what holds for forward passes. It is cut over the ranks like the one that trains; layers in 4
    bits, or in the host's memory, each has whole. Raises as `load_model` and `quantize_as_loaded` do.
    """
    is_cut_first = ranks.size > 1 and not nf4 and link is None
    quantize = quantize_as_loaded(LoRAConfig.model_validate({"quantize": "nf4" if nf4 else "none"}))
    first = "cpu" if link is not None else "meta" if is_cut_first else device
    frozen = load_model(model, first, dtype, after_module=quantize).requires_grad_(False).eval()
    # What is recomputed or moved away is for a backward pass, and here is none.
    for_forward = {"activation_checkpointing": "none", "activation_offload": False, "tied_gradient": "separate"}
    if parallel is not None:
        cut(frozen, parallel, ranks)
    apply_memory(frozen, memory.model_copy(update=for_forward), compile=compile)
    if link is not None:
        stream_weights(frozen, link)
    elif parallel is not None:
        # A layer that stays whole is for a backward pass, too.
        parallelize(frozen, parallel.model_copy(update={"reshard_after_forward": True}), ranks)
    return frozen
