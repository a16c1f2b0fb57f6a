"""Tiled feed-forward layers: tokens are processed in tiles, so that only one tile's inner activations exist at a time.

The feed-forward layer is the widest part of a decoder, 3 to 4 times as wide as its input, and computes each token
separately. Each tile is computed, its inner activations are freed, and it is recomputed in backward. A layer's working
memory thus shrinks by the number of tiles. For long sequences with activation checkpointing, this is most of the
activations' peak. It costs one more forward pass of the feed-forward layers, or nothing if the layers are fully
checkpointed and compiled.

The weights' gradients are summed over the tiles within one backward pass, in the weights' dtype: each parameter gets
one gradient per backward, and its hooks fire once. Every tile after the first rounds that sum once more.

Source: Arctic Long Sequence Training (Bekman et al., 2025, arXiv:2506.13996). Left out: choosing the tiles by length.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lean_ft.models.frozen_weight import quantized_weights


def tile_mlp(model: nn.Module, num_tiles: int) -> int:
    """Split the tokens of every feed-forward layer (`mlp` and `mixture`) into `num_tiles`; return the number of layers.

    Raises ValueError if no layer has an `mlp`, or `num_tiles` is below 2.
    """
    if num_tiles < 2:
        raise ValueError(f"tile_mlp expects at least 2 tiles, but got {num_tiles}")
    layers = getattr(model, "layers", None)
    parts = [getattr(layer, name, None) for layer in layers or () for name in ("mlp", "mixture")]
    mlps: list[Any] = [part for part in parts if isinstance(part, nn.Module)]
    if not mlps:
        raise ValueError(f"tile_mlp expects a model whose `layers` have an `mlp`, but got {type(model).__name__}")
    for mlp in mlps:
        mlp.num_tiles = num_tiles
        mlp.forward = MethodType(_tiled, mlp)
        for weight in quantized_weights(mlp).values():  # all tiles need it
            weight.form = weight.form._replace(stays_whole=True)
    return len(mlps)


def _tiled(mlp: nn.Module, x: Tensor, *further: Tensor) -> Any:  # (B, T, D) each
    num_tiles: Any = mlp.num_tiles
    forward = type(mlp).forward
    cut = (each.flatten(0, -2).tensor_split(num_tiles) for each in (x, *further))
    tiles = [checkpoint(forward, mlp, *tile, use_reentrant=False) for tile in zip(*cut, strict=True)]
    if isinstance(tiles[0], tuple):  # a mixture of experts also returns its router's logits
        results, *logits = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        return results.view(x.shape), *logits
    return torch.cat(tiles).view(x.shape)
