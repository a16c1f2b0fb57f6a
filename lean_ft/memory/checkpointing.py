"""Layerwise activation checkpointing: keep a layer's input, and recompute the rest of the layer in backward.

A layer with hidden size D keeps about 30 D values per token for its backward pass. A checkpointed layer keeps D, and
costs a second forward pass: a third more arithmetic if every layer is checkpointed. Selective checkpointing also keeps
the results of some operations. Attention's result is one hidden state per token and saves the operation whose cost
grows with the square of the length. If the results of matrix products are kept too, only norms, rotations and
activations are recomputed.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174); by operation: Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models, 2022 (arXiv:2205.05198).
"""

import logging
from functools import partial
from types import MethodType
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lean_ft.memory.compiling import decoder_layers
from lean_ft.torch_private import CHECKPOINT_LOGGER

# Substrings of the names of the operations whose results are kept.
KEPT_OPERATIONS = {
    "nothing": (),
    "attention": ("attention", "attn"),
    "products": (
        *("attention", "attn", "aten.mm.", "aten.addmm.", "aten.bmm.", "aten.linear.", "lean_ft.sum_of_"),
        *("_scaled_mm", "grouped_m"),
    ),
}
Kept = Literal["nothing", "attention", "products"]


def checkpoint_layers(model: nn.Module, every: int = 1, *, keep: Kept = "nothing") -> int:
    """Checkpoint layers 0, `every`, 2 `every` ... of a decoder, and return the number of checkpointed layers.

    `keep` names operations whose results are kept: `attention`, or `products` (attention and all matrix products). The
    random state is restored for recomputation, so dropout drops the same values. The blocks of a vision tower that
    trains are checkpointed too. Raises ValueError if the model has no `layers` or `every` is below 1.
    """
    layers = decoder_layers(model, "checkpoint_layers")
    if every < 1:
        raise ValueError(f"checkpoint_layers expects `every` of at least 1, but got {every}")
    # When compiling, torch warns that in-place operations may run twice. Here they never change anything that is kept.
    logging.getLogger(CHECKPOINT_LOGGER).addFilter(_is_other_warning)
    tower: Any = getattr(model, "vision", None)
    blocks = [] if tower is None or not any(p.requires_grad for p in tower.parameters()) else tower.blocks
    chosen: Any = [*layers[::every], *blocks[::every]]
    for layer in chosen:
        # A bound method, not a closure over the layer's forward: the compiler then finds the same code in every layer.
        layer.forward = MethodType(_FORWARDS[keep], layer)
        layer.checkpoint_keeps = keep  # for `compile_layers`
        for part in layer.modules():
            if hasattr(part, "overwrites"):
                # Gradients of trained weights would be allocated in between and fragment the memory that this saves.
                trains = any(p.requires_grad for name, p in part.named_parameters() if name.endswith("weight"))
                part.overwrites = keep != "products" and not trains
    return len(chosen)


def _is_other_warning(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _checkpointed(layer: nn.Module, *args: object, **kwargs: Any) -> Any:
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _keeping_attention(layer: nn.Module, *args: object, **kwargs: Any) -> Any:
    return _checkpointed(layer, *args, context_fn=partial(_contexts, "attention"), **kwargs)


def _keeping_products(layer: nn.Module, *args: object, **kwargs: Any) -> Any:
    return _checkpointed(layer, *args, context_fn=partial(_contexts, "products"), **kwargs)


_FORWARDS = {"nothing": _checkpointed, "attention": _keeping_attention, "products": _keeping_products}


def _contexts(keep: Kept) -> Any:
    def policy(context: SelectiveCheckpointContext, operation: object, *_: object, **__: object) -> CheckpointPolicy:
        kept = any(name in str(operation) for name in KEPT_OPERATIONS[keep])
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
