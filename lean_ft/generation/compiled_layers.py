"""A step of generation with compiled layers.

The cache grows with every token, and rows leave as they end: neither is a constant of the code. So a kind of layer is compiled
once, and once more for a single row, for more rows than `few_rows` is for, and for texts of different lengths. What gives other
layers something or is given it stays as it is written, and so do layers that keep a state and mixtures of experts and
attention to latents, which would be compiled anew for other numbers of rows.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from lean_ft.models import Decoder, DecoderConfig
from lean_ft.torch_private import dynamo, uncompiled

MOST_KINDS = 64  # of layers and batches; beyond that the compiler would let them run as they are written


class CompiledLayers:
    """While entered, a model's layers compute tokens that go on from a cache compiled, and not as they are compiled for training."""

    def __init__(self, model: Decoder) -> None:
        self._layers: list[Any] = list(model.layers)
        self._taken: list[Any] = [layer for i, layer in enumerate(self._layers) if _is_plain(model.config, i)]

    def __enter__(self) -> None:
        self._before = [(layer, vars(layer).get("forward")) for layer in self._layers]
        self._uncompiled = uncompiled(self._layers)
        self._uncompiled.__enter__()
        for layer in self._taken:
            layer.forward = partial(_forward, layer)

    def __exit__(self, *_: object) -> None:
        self._uncompiled.__exit__(None, None, None)
        for layer, forward in self._before:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _is_plain(config: DecoderConfig, i: int) -> bool:
    layer = config.layers[i]
    alone = layer.kv_from_layer is None and i not in config.kv_source_layers and layer.mixer is None
    return layer.has_attention and alone and layer.mixture is None and config.latent is None


def _forward(layer: nn.Module, *args: Any, **others: Any) -> Any:
    attention: Any = layer.self_attn
    kept, _ = args[4]
    # A mask that layers share: it is there before the first of them.
    kept.owner.visible(attention.scoring.window, attention.scoring.chunk)
    with dynamo.config.patch(recompile_limit=MOST_KINDS):
        return _compiled(layer, *args, **others)


def _run(layer: nn.Module, *args: Any, **others: Any) -> Any:
    return type(layer).forward(layer, *args, **others)  # without what checkpointing has put in its place


_compiled = torch.compile(_run, dynamic=True)
