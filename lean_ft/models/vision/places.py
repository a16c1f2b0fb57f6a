"""Where patches and tokens are in their images: computed on the host from sizes alone, so nothing waits for a GPU.

Shapes: P patches of all images, N embeddings of all images, K image tokens of a batch.
"""

import torch
from torch import Tensor

from lean_ft.images.batch import Images
from lean_ft.models.attention.attention import Sight

Grid = tuple[int, int]  # rows and columns of patches


def in_blocks(x: Tensor, side: int) -> Tensor:
    """A grid (rows, columns, ...) as a sequence (rows * columns, ...) of blocks of `side` x `side`."""
    rows, columns = x.shape[:2]
    return x.unflatten(1, (columns // side, side)).unflatten(0, (rows // side, side)).transpose(1, 2).flatten(0, 3)


def places_in_blocks(grids: tuple[Grid, ...], side: int) -> Tensor:
    """The row and column (P, 2) of each patch in its image, in blocks of `side` x `side`."""
    steps = [torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij") for rows, columns in grids]
    return torch.cat([in_blocks(torch.stack(axes, -1), side) for axes in steps])


def on_axes(positions: Tensor, images: Images, merge: int) -> Tensor:
    """Positions (3, B, T) on the axes time, height and width, of positions (B, T) in time. An image's rows and columns
    are steps of height and width."""
    grids = tuple((rows // merge, columns // merge) for rows, columns in images.grids)
    steps = moved(places_in_blocks(grids, 1), positions.device)[images.rows]  # (K, 2)
    axes = positions.repeat(3, 1, 1)
    axes[1:].flatten(1).index_add_(1, images.places, steps.T.to(axes.dtype))
    return axes


def sight_of_images(sight: Sight | None, images: Images, merge: int, num_tokens: int) -> Sight:
    """The sight of layers in which the tokens of an image see each other, in a batch of `num_tokens` positions."""
    sizes = [rows * columns // merge**2 for rows, columns in images.grids]
    device = images.places.device
    to_end = torch.cat([torch.arange(size - 1, -1, -1, dtype=torch.int32) for size in sizes])  # (N,)
    ends = torch.arange(1, num_tokens + 1, dtype=torch.int32, device=device)
    ends = ends.index_add(0, images.places, moved(to_end, device)[images.rows])
    return (sight or Sight())._replace(ends=ends, num_ahead=max(sizes) - 1)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
