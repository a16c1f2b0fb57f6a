"""Techniques that trade memory against time; each is one function that edits a model in place."""

from torch import nn

from lean_ft.memory.checkpointing import checkpoint_layers
from lean_ft.memory.compiling import compile_layers
from lean_ft.memory.loss_chunk import loss_chunk_tokens
from lean_ft.settings import MemoryConfig

__all__ = ["apply_memory", "checkpoint_layers", "compile_layers", "loss_chunk_tokens"]


def apply_memory(model: nn.Module, memory: MemoryConfig, *, compile: bool) -> None:
    """Applies the settings to the model's layers, in the one order that works: checkpoint inside, compile outside.

    The compiler then sees the checkpoint, and recomputes in backward only what backward needs.

    Raises:
        ValueError: for settings that contradict each other, the model or its device.
    """
    kind = memory.activation_checkpointing
    if kind == "budget" and not compile:
        raise ValueError(
            "memory.activation_checkpointing=budget is the compiler's choice of what to keep, but compile=false: there "
            "is no compiler to choose. Set compile=true, or memory.activation_checkpointing=selective."
        )
    if kind in ("full", "every_n", "selective"):
        every = memory.checkpoint_every_n if kind == "every_n" else 1
        checkpoint_layers(model, every, keep=memory.selective_keeps if kind == "selective" else "nothing")
    if compile:
        compile_layers(model, memory.activation_budget if kind == "budget" else None)
