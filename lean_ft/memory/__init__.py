"""Memory techniques; each is one function that edits a model in place."""

from torch import nn

from lean_ft.memory.checkpointing import checkpoint_layers
from lean_ft.memory.compiling import compile_layers
from lean_ft.memory.frozen_embeddings import keep_embeddings_on_host
from lean_ft.memory.host_pool import pool_host_memory, wants_host_pool
from lean_ft.memory.offload import offload_activations
from lean_ft.memory.streamed_experts import stream_experts
from lean_ft.memory.streamed_weights import stream_weights
from lean_ft.memory.tied_gradient import fuse_tied_gradient
from lean_ft.memory.tiling import tile_mlp
from lean_ft.models import Decoder
from lean_ft.quantize.float8 import float8_products
from lean_ft.settings import MemoryConfig
from lean_ft.system.host_link import open_link

__all__ = [
    "apply_memory",
    "checkpoint_layers",
    "compile_layers",
    "float8_products",
    "fuse_tied_gradient",
    "keep_embeddings_on_host",
    "offload_activations",
    "pool_host_memory",
    "stream_experts",
    "stream_weights",
    "tile_mlp",
    "wants_host_pool",
]


def apply_memory(model: nn.Module, memory: MemoryConfig, *, compile: bool) -> None:
    """Apply the settings in the only order that works: float8, experts, tile, checkpoint, compile, embeddings, offload.

    The compiler then sees what is recomputed, and offloading sees what compiled layers keep. Raises ValueError for
    settings that contradict each other, the model or its device.
    """
    checkpointing = memory.activation_checkpointing
    if checkpointing == "budget" and not compile:
        raise ValueError(
            "memory.activation_checkpointing=budget needs the compiler, but compile=false. Set compile=true, or "
            "memory.activation_checkpointing=selective."
        )
    if memory.float8_products:
        float8_products(model)
    if memory.experts == "streamed":
        stream_experts(
            model, open_link(next(model.parameters()).device, "memory.experts=streamed", "memory.experts=device")
        )
    if memory.tile_mlp:
        tile_mlp(model, memory.tile_mlp)
    if checkpointing in ("full", "every_n", "selective"):
        every = memory.checkpoint_every_n if checkpointing == "every_n" else 1
        checkpoint_layers(model, every, keep=memory.selective_keeps if checkpointing == "selective" else "nothing")
    if compile:
        compile_layers(model, memory.activation_budget if checkpointing == "budget" else None)
    if memory.frozen_embeddings == "host":
        device = next(model.parameters()).device
        link = open_link(device, "memory.frozen_embeddings=host", "memory.frozen_embeddings=device")
        keep_embeddings_on_host(model, link)
    else:
        _place_tied_gradient(model, memory.tied_gradient)
    if memory.activation_offload:
        offload_activations(model)


def _place_tied_gradient(model: nn.Module, choice: str) -> None:
    host, fused = "memory.tied_gradient=host", "memory.tied_gradient=fused"
    if not isinstance(model, Decoder) or not model.ties_output:
        if choice == "host":
            raise ValueError(
                f"{host} needs tied embeddings, but the output layer has its own weight, or there is none. Set {fused}."
            )
        return
    if choice == "separate" or not isinstance(model.model.embed_tokens, nn.Embedding):  # frozen, with trained new rows
        return
    device = next(model.parameters()).device
    fuse_tied_gradient(model, open_link(device, host, fused) if choice == "host" else None)
