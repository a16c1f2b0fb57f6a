"""Layerwise activation checkpointing: keep a layer's input, and recompute the rest of the layer in backward.

A layer of hidden size D keeps about 30 D values a token for its backward pass; checkpointed it keeps D, and costs a
second forward pass: a third more arithmetic if every layer is checkpointed, half of that for every second one.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174).
"""

from functools import partial

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
        raise ValueError(f"checkpoint_layers expects a model with a ModuleList `layers`, but got {type(model).__name__}")
    if every < 1:
        raise ValueError(f"checkpoint_layers expects `every` of at least 1, but got {every}")
    chosen = layers[::every]
    for layer in chosen:
        # Edits this instance; its class, and every other model of it, stay as they are.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(chosen)
