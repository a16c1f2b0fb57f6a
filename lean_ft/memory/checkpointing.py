"""Layerwise activation checkpointing: keep a layer's input, and recompute the rest of the layer in backward.

A layer of hidden size D keeps about 30 D values a token for its backward pass; checkpointed it keeps D, and costs a
second forward pass: a third more arithmetic if every layer is checkpointed, half of that for every second one. Between
the two lies keeping what some operations returned: attention's result is one hidden state a token and saves the one
operation whose cost grows with the square of the length; with the matrix products' results as well, all that is
computed twice is norms, rotations and activations.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174); by operation: Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models, 2022 (arXiv:2205.05198).
"""

import logging
from functools import partial
from types import MethodType
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lean_ft.torch_private import CHECKPOINT_LOGGER

# What a name's operations are, by a part of their own names.
KEPT_OPERATIONS = {
    "nothing": (),
    "attention": ("attention", "attn"),
    "products": (
        "attention",
        "attn",
        "aten.mm.",
        "aten.addmm.",
        "aten.bmm.",
        "aten.linear.",
        "lean_ft.sum_of_products.",
        "_scaled_mm",
        "grouped_m",
    ),
}
Kept = Literal["nothing", "attention", "products"]


def checkpoint_layers(model: nn.Module, every: int = 1, *, keep: Kept = "nothing") -> int:
    """Checkpoints layers 0, `every`, 2 `every` ... of a decoder, and returns how many those are.

    What the operations named by `keep` returned is kept too and not computed again: `attention`, or `products`, which
    is attention and every matrix product. Random state is restored for the recomputation, so dropout drops the same
    values twice.

    Raises:
        ValueError: when the model has no `layers`, or `every` is below 1.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ValueError(
            f"checkpoint_layers expects a model with a ModuleList `layers`, but got {type(model).__name__}"
        )
    if every < 1:
        raise ValueError(f"checkpoint_layers expects `every` of at least 1, but got {every}")
    # Compiling, torch warns that what happens in place may happen twice: here it happens to nothing that is kept.
    logging.getLogger(CHECKPOINT_LOGGER).addFilter(_is_of_something_else)
    chosen: Any = layers[::every]
    for layer in chosen:
        # A bound method, and not a closure over the layer's own forward: the compiler then finds the same code in
        # every layer, and compiles it once.
        layer.forward = MethodType(_FORWARDS[keep], layer)
        for part in layer.modules():
            if hasattr(part, "overwrites"):
                # Where its weights train, their gradients come to lie between, and leave holes as wide as what is saved.
                trains = any(p.requires_grad for name, p in part.named_parameters() if name.endswith("weight"))
                part.overwrites = keep != "products" and not trains
    return len(chosen)


def _is_of_something_else(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _keeping_attention(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(layer, *args, context_fn=partial(_contexts, "attention"), **kwargs)


def _keeping_products(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(layer, *args, context_fn=partial(_contexts, "products"), **kwargs)


_FORWARDS = {"nothing": _checkpointed, "attention": _keeping_attention, "products": _keeping_products}


def _contexts(keep: Kept) -> Any:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = any(name in str(operation) for name in KEPT_OPERATIONS[keep])
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
