"""Tiled feed-forward layers: a layer's tokens go through in tiles, and only one tile's inner activations ever exist.

The feed-forward layer is the widest place of a decoder, three or four times as wide as its input, and works on each
token by itself. A tile is computed, its inner activations dropped, and computed again in backward, tile after tile. So
what a layer holds while it works, forward or backward, shrinks by the number of tiles; for long sequences under
activation checkpointing that is what is left of the activations' peak. It costs one more forward pass of the
feed-forward layers, and none beside full checkpointing's where the compiler sees both.

The weights' gradients are added up over the tiles within one backward pass, in the weights' own type: each parameter
still gets one gradient a backward, and its hooks fire once. Every tile after the first rounds that sum once more.

Source: Arctic Long Sequence Training (Bekman et al., 2025, arXiv:2506.13996). Left out: choosing the tiles by length.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def tile_mlp(model: nn.Module, num_tiles: int) -> int:
    """Splits the tokens of every feed-forward layer (a layer's `mlp`, and the `mixture` beside it) into `num_tiles`, and returns
    how many those layers are.

    Raises:
        ValueError: when no layer has an `mlp`, or `num_tiles` is below 2.
    """
    if num_tiles < 2:
        raise ValueError(f"tile_mlp expects at least 2 tiles, but got {num_tiles}: one tile is the layer as it is")
    layers = getattr(model, "layers", None)
    parts = [getattr(layer, name, None) for layer in layers or () for name in ("mlp", "mixture")]
    found: list[Any] = [part for part in parts if isinstance(part, nn.Module)]
    if not found:
        raise ValueError(f"tile_mlp expects a model whose `layers` have an `mlp`, but got {type(model).__name__}")
    for mlp in found:
        mlp.num_tiles = num_tiles
        mlp.forward = MethodType(_tiled, mlp)
        for layer in mlp.modules():
            if hasattr(layer, "stays_whole"):  # one quantised, whose weight all tiles need
                layer.stays_whole = True
    return len(found)


def _tiled(mlp: nn.Module, x: Tensor, *others: Tensor) -> Any:  # (B, T, D) each
    num_tiles: Any = mlp.num_tiles
    forward = type(mlp).forward
    cut = (each.flatten(0, -2).tensor_split(num_tiles) for each in (x, *others))
    tiles = [checkpoint(forward, mlp, *tile, use_reentrant=False) for tile in zip(*cut, strict=True)]
    if isinstance(tiles[0], tuple):  # a mixture of experts returns its router's logits beside its result
        results, *logits = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        return results.view(x.shape), *logits
    return torch.cat(tiles).view(x.shape)
