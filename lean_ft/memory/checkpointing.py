"""Layerwise activation checkpointing: keep a layer's input, and recompute the rest of the layer in backward.

A layer of hidden size D keeps about 30 D values a token for its backward pass; checkpointed it keeps D, and costs a
second forward pass: a third more arithmetic if every layer is checkpointed, half of that for every second one.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174).
"""

from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def checkpoint_layers(model: nn.Module, every: int = 1, *, keep_attention: bool = False) -> int:
    """Checkpoints layers 0, `every`, 2 `every` ... of a decoder, and returns how many those are.

    With `keep_attention` a layer also keeps what its attention returned, one more hidden state a token, and does not
    attend again in backward. Random state is restored for the recomputation, so dropout drops the same values twice.

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
        layer.forward = MethodType(_selectively_checkpointed if keep_attention else _checkpointed, layer)
    return len(chosen)


def _checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)


def _selectively_checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _keep_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    attention = any(part in str(operation) for part in ("attention", "attn"))
    return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE
