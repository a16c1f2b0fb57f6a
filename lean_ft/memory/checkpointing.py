"""Layerwise activation checkpointing: keep a layer's input, and recompute the rest of the layer in backward.

A layer of hidden size D keeps about 30 D values a token for its backward pass; checkpointed it keeps D, and costs a
second forward pass: a third more arithmetic if every layer is checkpointed, half of that for every second one.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174).
"""

from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_layers(model: nn.Module, every: int = 1) -> int:
    """Checkpoints layers 0, `every`, 2 `every` ... of a decoder, and returns how many those are.

    Random state is restored for the recomputation, so dropout drops the same values twice.

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
    chosen = layers[::every]
    for layer in chosen:
        # A bound method, and not a closure over the layer's own forward: the compiler then finds the same code in
        # every layer, and compiles it once.
        layer.forward = MethodType(_checkpointed_forward, layer)
    return len(chosen)


def _checkpointed_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)
