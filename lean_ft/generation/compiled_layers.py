"""Generation steps with compiled layers.

The cache length and the number of rows are dynamic, since the cache grows and finished rows leave the batch. Each kind
of layer is compiled once, and again for a single row, for more rows than `FewRows` supports, and for texts of different
lengths. Some layers stay uncompiled: layers that share keys and values with other layers, and layers with a recurrent
state, a mixture of experts or latent attention, which would be recompiled for each number of rows.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder, DecoderConfig
from lean_ft.models.block import Pass
from lean_ft.torch_private import uncompiled

MOST_KINDS = 64  # compiled kinds of layers and batches; beyond this number the compiler falls back to eager mode


class CompiledLayers:
    """Context manager in which the layers use code compiled for generation, not the code compiled for training."""

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


def _forward(layer: nn.Module, hidden: Tensor, context: Pass) -> Any:
    from lean_ft.torch_private import dynamo

    attention: Any = layer.self_attn
    kept, _ = context.cache
    assert kept is not None, "generation has a cache"
    # Create the mask before the first of the layers that share it.
    kept.owner.visible(attention.scoring.window, attention.scoring.chunk)
    with dynamo.config.patch(recompile_limit=MOST_KINDS):
        return _compiled()(layer, hidden, context)


def _run(layer: nn.Module, hidden: Tensor, context: Pass) -> Any:
    return type(layer).forward(layer, hidden, context)  # without the wrapper of activation checkpointing


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_run, dynamic=True)  # imports the compiler, which takes a second
