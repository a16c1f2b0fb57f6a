"""Techniques that trade memory against time; each is one function that edits a model in place."""

from torch import nn

from lean_ft.memory.checkpointing import checkpoint_layers
from lean_ft.memory.compiling import compile_layers
from lean_ft.settings import MemoryConfig

__all__ = ["apply_memory", "checkpoint_layers", "compile_layers"]


def apply_memory(model: nn.Module, memory: MemoryConfig, *, compile: bool) -> None:
    """Applies the settings to the model's layers, in the one order that works: checkpoint inside, compile outside.

    The compiler then sees the checkpoint, and recomputes in backward only what backward needs.
    """
    if memory.activation_checkpointing != "none":
        every = memory.checkpoint_every_n if memory.activation_checkpointing == "every_n" else 1
        checkpoint_layers(model, every, keep_attention=memory.activation_checkpointing == "selective")
    if compile:
        compile_layers(model)
