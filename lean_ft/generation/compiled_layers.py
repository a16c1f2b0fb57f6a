"""A step of generation with compiled layers.

The cache grows with every token, and rows leave as they end: neither is a constant of the code. So a kind of layer is compiled
once, and once more for a single row, for more rows than `few_rows` is for, and for texts of different lengths. What gives other
layers something or is given it stays as it is written, and so do layers that keep a state.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from lean_ft.models import Decoder

MOST_KINDS = 64  # of layers and batches; beyond that the compiler would let them run as they are written


class CompiledLayers:
    """While entered, a model's layers compute tokens that go on from a cache compiled, and not as they are compiled for training."""

    def __init__(self, model: Decoder) -> None:
        config, layers = model.config, list(enumerate(model.layers))
        kinds = config.layers
        self._layers: list[Any] = [layer for _, layer in layers]
        self._taken: list[Any] = [
            layer
            for i, layer in layers
            if kinds[i].attends and kinds[i].mixer is None and kinds[i].keys_of is None and i not in config.givers
        ]

    def __enter__(self) -> None:
        self._before = [(layer, layer._compiled_call_impl, vars(layer).get("forward")) for layer in self._layers]
        for layer in self._layers:
            layer._compiled_call_impl = None
        for layer in self._taken:
            layer.forward = partial(_forward, layer)

    def __exit__(self, *_: object) -> None:
        for layer, compiled, forward in self._before:
            layer._compiled_call_impl = compiled
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _forward(layer: nn.Module, *args: Any, **others: Any) -> Any:
    attention: Any = layer.self_attn
    kept, _ = args[4]
    kept.owner.visible(
        attention.scoring.window, attention.scoring.chunk
    )  # a mask that layers share: it is there before the first of them
    with torch._dynamo.config.patch(recompile_limit=MOST_KINDS):  # pyright: ignore[reportAttributeAccessIssue]
        return _compiled(layer, *args, **others)


def _run(layer: nn.Module, *args: Any, **others: Any) -> Any:
    return type(layer).forward(layer, *args, **others)  # without what checkpointing has put in its place


_compiled = torch.compile(_run, dynamic=True)
