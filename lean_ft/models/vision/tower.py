"""One vision tower for all families; the differences between families are facts of `VisionConfig`.

The patches of all images are one sequence, and each image attends to itself, so nothing is padded. Pixels come as bytes and are
normalized on the device, so a batch takes 2 to 4 times less memory on its way there.

Everything that depends on sizes alone (places of patches, rotary angles, weights of the position table) is computed on the
host, so no operation waits for a GPU.

Shapes: P patches of all images, D hidden size, H heads, C = 3 colors, p pixels of a patch's side, N embeddings of all images.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from lean_ft.images.batch import Images
from lean_ft.models.cache import on_device
from lean_ft.models.layers import ACTIVATIONS, RMSNorm, gated
from lean_ft.models.rope import rotate_both
from lean_ft.models.vision.config import VisionConfig

GROUP_PATCHES = 16_384  # patches that a frozen tower computes at a time, in whole images

Grid = tuple[int, int]  # rows and columns of patches


class Seen(NamedTuple):
    """Which patches see each other, and how their queries and keys are rotated."""

    sizes: tuple[int, ...]  # patches of each image
    bounds: Tensor | None  # on CUDA, where each image begins, and the end: int32
    rotation: tuple[Tensor, Tensor] | None  # cos and sin, (1, P, D / H) each


class Attention(nn.Module):
    """Attention of each image to itself."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, self.head_dim, self.is_fused = config.hidden_size, config.head_dim, config.fused_qkv
        if self.is_fused:
            self.qkv = nn.Linear(size, 3 * size, bias=config.bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size, bias=config.bias) for _ in range(3))
        self.proj = nn.Linear(size, size, bias=config.bias)

    def forward(self, hidden: Tensor, seen: Seen) -> Tensor:
        if self.is_fused:
            parts = self.qkv(hidden).chunk(3, -1)
        else:
            parts = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)  # (P, H, D / H)
        if seen.rotation is not None:
            query, key = (x[0] for x in rotate_both(query[None], key[None], *seen.rotation))
        return self.proj(_attend(query, key, value, seen).flatten(-2))


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Tensor:
    """The attention (P, H, D / H) of each image to itself."""
    if seen.bounds is not None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0:
        longest = max(seen.sizes)
        bounds = seen.bounds, seen.bounds, longest, longest
        attended: Any = varlen_attn(query, key, value, *bounds, window_size=(-1, -1))
        return attended
    images = zip(*(x.split(seen.sizes) for x in (query, key, value)), strict=True)
    attend = F.scaled_dot_product_attention
    return torch.cat([attend(*(x.transpose(0, 1)[None] for x in image))[0].transpose(0, 1) for image in images])


class MLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.activation = config.activation
        if config.is_gated:
            self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.is_gated = config.is_gated
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.linear_fc1(x)
        if self.is_gated:
            return self.linear_fc2(gated(self.gate(x), up, self.activation, overwrites=True))
        return self.linear_fc2(ACTIVATIONS[self.activation].value(up))


class Block(nn.Module):
    """One layer of the tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = _norm(config), Attention(config), _norm(config), MLP(config)

    def forward(self, hidden: Tensor, seen: Seen) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), seen)
        return hidden + self.mlp(self.norm2(hidden))


def _norm(config: VisionConfig) -> nn.Module:
    return (nn.LayerNorm if config.norm == "layer" else RMSNorm)(config.hidden_size, config.norm_eps)


class Merger(nn.Module):
    """The projector: the patches of a square become one embedding of the decoder."""

    def __init__(self, config: VisionConfig, norm_after_merge: bool) -> None:
        super().__init__()
        self.config, self.norm_after_merge = config, norm_after_merge
        merged = config.hidden_size * (1 if config.pools else config.merge**2)
        self.norm, size = None, merged if norm_after_merge else config.hidden_size
        if config.projector_norm == "layer":
            self.norm = nn.LayerNorm(size, config.projector_norm_eps)
        elif config.projector_norm == "rms":
            self.norm = RMSNorm(size, config.projector_norm_eps, config.projector_norm_offset)
        sizes = (merged, *config.projector_sizes, config.out_size)
        self.linears = [f"linear_fc{i}" for i in range(1, len(sizes))]
        for i, (name, bias) in enumerate(zip(self.linears, config.projector_bias, strict=True)):
            shape = (sizes[i + 1], sizes[i]) if config.projector_input_first else (sizes[i], sizes[i + 1])
            self.add_module(name, nn.Linear(*shape, bias=bias))

    def forward(self, hidden: Tensor) -> Tensor:
        """Embeddings (N, out_size) of patches (P, D)."""
        if self.norm is not None and not self.norm_after_merge:
            hidden = self.norm(hidden)
        squares = hidden.unflatten(0, (-1, self.config.merge**2))  # (N, patches of an embedding, D)
        if self.config.pools:
            hidden = squares.mean(1)
        else:
            hidden = (squares.transpose(1, 2) if self.config.features_first else squares).flatten(1)
        if self.norm is not None and self.norm_after_merge:
            hidden = self.norm(hidden)
        for i, name in enumerate(self.linears):
            linear = getattr(self, name)
            hidden = F.gelu(hidden) if i >= self.config.gelu_before else hidden
            hidden = hidden @ linear.weight if self.config.projector_input_first else linear(hidden)
        return hidden


class Patches(nn.Module):
    """The linear projection of patches, stored as a convolution."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, side = config.hidden_size, config.patch_size
        if config.frames:
            self.proj = nn.Conv3d(3, size, (config.frames, side, side), bias=config.patch_bias)
        else:
            self.proj = nn.Conv2d(3, size, side, bias=config.patch_bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """The embeddings (P, D) of normalized pixels (P, C, p, p)."""
        weight = self.proj.weight
        if weight.dim() == 5:  # all frames of an image are equal
            weight = weight.sum(2)
        return F.linear(pixels.flatten(1), weight.flatten(1), self.proj.bias)


class VisionTower(nn.Module):
    """Patches of images to embeddings for the decoder."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = Patches(config)
        self.pos_embed = nn.Embedding(config.table_side**2, config.hidden_size) if config.table_side else None
        self.first_norm = _norm(config) if config.norms_patches else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.last_norm = _norm(config) if config.norms_output else None
        self.merger = Merger(config, config.norm_after_merge)
        self.deepstack_merger_list = nn.ModuleList(Merger(config, True) for _ in config.deepstack)

    def forward(self, patches: Tensor, grids: tuple[Grid, ...]) -> list[Tensor]:
        """Embeddings (N, out_size) for the decoder's input, then those to add after each of its first layers.

        patches (P, C, p, p): bytes, in blocks of `merge` x `merge`; grids: rows and columns of each image. A frozen tower keeps no
        graph, and computes `GROUP_PATCHES` at a time.
        """
        is_trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        if is_trained:
            return self._embeddings(patches, grids)
        with torch.no_grad():
            groups = list(_groups(grids))
            sizes = [sum(rows * columns for rows, columns in group) for group in groups]
            computed = [self._embeddings(*group) for group in zip(patches.split(sizes), groups, strict=True)]
            return computed[0] if len(computed) == 1 else [torch.cat(parts) for parts in zip(*computed, strict=True)]

    def put(self, hidden: Tensor, images: Images) -> tuple[Tensor, list[Tensor]]:
        """Replace the decoder's embeddings (B, T, D) of image tokens. Also return what to add to them after its first layers."""
        embeddings, *deep = (x.to(hidden.dtype)[images.rows] for x in self(images.patches, images.grids))
        return hidden.flatten(0, 1).index_copy(0, images.places, embeddings).view_as(hidden), deep

    def _embeddings(self, patches: Tensor, grids: tuple[Grid, ...]) -> list[Tensor]:
        config, device = self.config, patches.device
        mean, std = on_device([config.mean, config.std], device, torch.float32)[..., None, None] * 255
        hidden = self.patch_embed(((patches - mean) / std).to(self.patch_embed.proj.weight.dtype))
        places, sizes = _places(grids, config.merge), tuple(rows * columns for rows, columns in grids)
        if self.pos_embed is not None:
            near, weights = (_moved(x, device) for x in _stretched(places, grids, sizes, config.table_side))
            hidden = hidden + (self.pos_embed(near) * weights[..., None]).sum(1).to(hidden.dtype)
        if self.first_norm is not None:
            hidden = self.first_norm(hidden)
        bounds = None
        if device.type == "cuda":
            bounds = _moved(F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(torch.int32), device)
        seen, deep = Seen(sizes, bounds, self._rotation(places, device)), []
        for i, block in enumerate(self.blocks):
            hidden = block(hidden, seen)
            if i in config.deepstack:
                deep.append(self.deepstack_merger_list[config.deepstack.index(i)](hidden))
        return [self.merger(hidden if self.last_norm is None else self.last_norm(hidden)), *deep]

    def _rotation(self, places: Tensor, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Cos and sin (1, P, D / H) of each patch: half of a head's pairs turns with the row, the other half with the column."""
        size, theta = self.config.head_dim, self.config.rope_theta
        if theta is None:
            return None
        steps = torch.arange(0, size, 2, dtype=torch.float32) / size
        steps = steps.view(-1, 2).T if self.config.rope_alternates else 2 * steps[: size // 4]
        angles = (places[..., None] * (1.0 / theta**steps)).flatten(1)  # (P, D / H / 2)
        angles = _moved(torch.cat((angles, angles), -1)[None], device)
        return angles.cos(), angles.sin()


def _groups(grids: tuple[Grid, ...]) -> Iterator[tuple[Grid, ...]]:
    """Split images into groups of at most `GROUP_PATCHES`, or of one image."""
    group, total = [], 0
    for grid in grids:
        size = grid[0] * grid[1]
        if group and total + size > GROUP_PATCHES:
            yield tuple(group)
            group, total = [], 0
        group.append(grid)
        total += size
    yield tuple(group)


def _places(grids: tuple[Grid, ...], side: int) -> Tensor:
    """The row and column (P, 2) of each patch in its image, in blocks of `side` x `side`."""
    places = []
    for rows, columns in grids:
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        blocks = grid.view(rows // side, side, columns // side, side, 2)
        places.append(blocks.transpose(1, 2).reshape(-1, 2))
    return torch.cat(places)


def _stretched(places: Tensor, grids: tuple[Grid, ...], sizes: tuple[int, ...], side: int) -> tuple[Tensor, Tensor]:
    """The 4 entries of a square table that surround each patch, and their weights, (P, 4) each: linear interpolation, so that the
    table's corners are an image's corners."""
    steps = torch.tensor([[(side - 1) / max(n - 1, 1) for n in grid] for grid in grids])
    exact = places * steps.repeat_interleave(torch.tensor(sizes), 0)  # (P, 2)
    low = exact.long().clamp(max=side - 1)
    near = torch.stack((low, (low + 1).clamp(max=side - 1)), -1)  # (P, axes, 2)
    above = exact - low
    weights = torch.stack((1 - above, above), -1)
    entries = near[:, 0, :, None] * side + near[:, 1, None]
    return entries.flatten(1), (weights[:, 0, :, None] * weights[:, 1, None]).flatten(1)


def rows_and_columns(grids: tuple[Grid, ...], merge: int, device: torch.device) -> Tensor:
    """The row and column (N, 2) of each embedding in its image."""
    merged = tuple((rows // merge, columns // merge) for rows, columns in grids)
    return _moved(_places(merged, 1), device)


def to_image_ends(grids: tuple[Grid, ...], merge: int, device: torch.device) -> Tensor:
    """The number of embeddings (N,) between each one and the end of its image, int32."""
    sizes = [rows * columns // merge**2 for rows, columns in grids]
    return _moved(torch.cat([torch.arange(size - 1, -1, -1, dtype=torch.int32) for size in sizes]), device)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
