"""One vision tower for all families; the differences between families are facts of `VisionConfig`.

The patches of all images are one sequence, and each image attends to itself, so nothing is padded. Pixels come as bytes
and are normalized on the device, so a batch takes 2 to 4 times less memory on its way there.

Everything that depends on sizes alone (places of patches, rotary angles, weights of the position table) is computed on
the host, so no operation waits for a GPU.

Shapes: P patches of all images, D hidden size, H heads, C = 3 colors, p pixels of a patch's side, N embeddings of all
images.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.images.batch import Images
from lean_ft.models.attention.attention import Scoring, has_kernels
from lean_ft.models.cache import on_device
from lean_ft.models.layers import ACTIVATIONS, RMSNorm, gated, unit_rms
from lean_ft.models.projections import project
from lean_ft.models.rope import rotate_both
from lean_ft.models.vision.config import VisionConfig
from lean_ft.models.vision.places import Grid, in_blocks, moved, places_in_blocks
from lean_ft.system.shards import whole_numel
from lean_ft.system.world import device_type

NO_TOWER = "without its image encoder"  # see `VisionTower.describe`
GROUP_PATCHES = 16_384  # patches that a frozen tower computes at a time, in whole images


class Stretches(NamedTuple):
    """Stretches of patches that see each other."""

    sizes: tuple[int, ...]  # patches of each
    bounds: Tensor | None  # on CUDA, where each begins, and the end: int32

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> "Stretches":
        bounds = F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(torch.int32)
        return cls(tuple(sizes), moved(bounds, device) if device_type(device) == "cuda" else None)


Rotation = tuple[Tensor, Tensor] | None  # cos and sin, (1, P, D / H) each


class Clipped(nn.Module):
    """A linear layer whose inputs and outputs may be clamped to stored limits, which are not trained."""

    def __init__(self, num_inputs: int, num_outputs: int, bias: bool, clips: bool) -> None:
        super().__init__()
        self.linear, self.clips = nn.Linear(num_inputs, num_outputs, bias=bias), clips
        self.initial = {f"{of}_{end}": limit for of in ("input", "output") for end, limit in _LIMITS if clips}
        for name, limit in self.initial.items():
            self.register_buffer(name, torch.tensor(limit))

    def forward(self, x: Tensor) -> Tensor:
        if not self.clips:
            return self.linear(x)
        limits = self.get_buffer
        x = self.linear(torch.clamp(x, limits("input_min"), limits("input_max")))
        return torch.clamp(x, limits("output_min"), limits("output_max"))


_LIMITS = ("min", -torch.inf), ("max", torch.inf)


def _linear(config: VisionConfig, num_inputs: int, num_outputs: int) -> nn.Module:
    if config.linears == "plain":
        return nn.Linear(num_inputs, num_outputs, bias=config.bias)
    return Clipped(num_inputs, num_outputs, config.bias, config.linears == "clipped")


def _norm(kind: str | None, size: int, eps: float, offset: float = 0.0) -> nn.Module:
    if kind is None:
        return nn.Identity()
    return nn.LayerNorm(size, eps) if kind == "layer" else RMSNorm(size, eps, offset)


class VisionAttention(nn.Module):
    """Attention of stretches of patches to themselves."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size
        if config.fused_qkv:
            self.qkv = _linear(config, size, 3 * size)
        else:
            self.q_proj, self.k_proj, self.v_proj = (_linear(config, size, size) for _ in range(3))
        if config.qkv_norms:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))
        self.proj = _linear(config, size, size)

    def forward(self, hidden: Tensor, seen: Stretches, rotation: Rotation) -> Tensor:
        config = self.config
        if config.fused_qkv:
            parts = self.qkv(hidden).chunk(3, -1)
        else:
            parts = project(hidden, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (x.unflatten(-1, (-1, config.head_dim)) for x in parts)  # (P, H, D / H)
        if config.qkv_norms:
            query, key, value = self.q_norm(query), self.k_norm(key), unit_rms(value, config.norm_eps)
        if rotation is not None:
            if config.rope_axes == "halves":  # the pairs of both halves become those of a whole head
                query, key = (x.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3) for x in (query, key))
            query, key = (x[0] for x in rotate_both(query[None], key[None], *rotation))
        return self.proj(_attend(query, key, value, seen, config.attention_scale).flatten(-2))


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Stretches, scale: float | None) -> Tensor:
    """The attention (P, H, D / H) of each stretch to itself."""
    has_kernel = has_kernels(query, Scoring(), None) if query.is_cuda else query.itemsize == 2  # on the CPU: in a plan
    if seen.bounds is not None and has_kernel and query.shape[-1] % 8 == 0:
        from lean_ft.models.attention.varlen import varlen_attn

        longest = max(seen.sizes)
        bounds = seen.bounds, seen.bounds, longest, longest
        attended: Any = varlen_attn(query, key, value, *bounds, scale=scale, window_size=(-1, -1))
        return attended
    stretches = zip(*(x.split(seen.sizes) for x in (query, key, value)), strict=True)
    attend = partial(F.scaled_dot_product_attention, scale=scale)
    return torch.cat([attend(*(x.transpose(0, 1)[None] for x in parts))[0].transpose(0, 1) for parts in stretches])


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.activation, self.is_gated = config.activation, config.is_gated
        sizes = config.hidden_size, config.intermediate_size
        if self.is_gated:
            self.gate = _linear(config, *sizes)
        self.linear_fc1, self.linear_fc2 = _linear(config, *sizes), _linear(config, *sizes[::-1])

    def forward(self, x: Tensor) -> Tensor:
        up = self.linear_fc1(x)
        if self.is_gated:
            return self.linear_fc2(gated(self.gate(x), up, self.activation))
        return self.linear_fc2(ACTIVATIONS[self.activation].value(up))


class VisionBlock(nn.Module):
    """One layer of the tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.attn, self.mlp = VisionAttention(config), VisionMLP(config)
        before, behind = config.norm, config.norm if config.post_norms else None
        self.norm1, self.norm2, self.post_norm1, self.post_norm2 = (
            _norm(kind, config.hidden_size, config.norm_eps) for kind in (before, before, behind, behind)
        )

    def forward(self, hidden: Tensor, seen: Stretches, rotation: Rotation) -> Tensor:
        hidden = hidden + self.post_norm1(self.attn(self.norm1(hidden), seen, rotation))
        return hidden + self.post_norm2(self.mlp(self.norm2(hidden)))


class Merger(nn.Module):
    """The projector: the patches of a square become one embedding of the decoder."""

    def __init__(self, config: VisionConfig, norm_after_merge: bool) -> None:
        super().__init__()
        self.config, self.norm_after_merge = config, norm_after_merge
        merged = config.hidden_size * (1 if config.pools else config.merge**2)
        kind = None if config.projector_norm == "unit" else config.projector_norm
        size = merged if norm_after_merge else config.hidden_size
        self.norm = _norm(kind, size, config.projector_norm_eps, config.projector_norm_offset)
        if config.standardizes:
            self.std_bias, self.std_scale = nn.Buffer(torch.zeros(merged)), nn.Buffer(torch.ones(merged))
        self.initial = {"std_bias": 0.0, "std_scale": 1.0}
        sizes = (merged, *config.projector_sizes, config.out_size)
        self.linears = [f"linear_fc{i}" for i in range(1, len(sizes))]
        for i, (name, bias) in enumerate(zip(self.linears, config.projector_bias, strict=True)):
            shape = (sizes[i + 1], sizes[i]) if config.projector_input_first else (sizes[i], sizes[i + 1])
            self.add_module(name, nn.Linear(*shape, bias=bias))

    def forward(self, hidden: Tensor) -> Tensor:
        """Embeddings (N, out_size) of patches (P, D)."""
        config = self.config
        hidden = hidden if self.norm_after_merge else self._normed(hidden)
        squares = hidden.unflatten(0, (-1, config.merge**2))  # (N, patches of an embedding, D)
        if config.pools:
            pooled = squares.mean(1)
            if config.pooled_multiplier != 1.0:  # in float32, because the products may exceed float16
                pooled = pooled.float() * config.pooled_multiplier
            if config.standardizes:
                pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
            hidden = pooled.to(hidden.dtype)
        else:
            hidden = (squares.transpose(1, 2) if config.features_first else squares).flatten(1)
        hidden = self._normed(hidden) if self.norm_after_merge else hidden
        for i, name in enumerate(self.linears):
            linear = getattr(self, name)
            hidden = F.gelu(hidden) if i >= config.gelu_before else hidden
            hidden = hidden @ linear.weight if config.projector_input_first else linear(hidden)
        return hidden

    def _normed(self, hidden: Tensor) -> Tensor:
        if self.config.projector_norm == "unit":
            return unit_rms(hidden, self.config.projector_norm_eps)
        return self.norm(hidden)


class Patches(nn.Module):
    """The linear projection of patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config, size, side = config, config.hidden_size, config.patch_size
        if config.linear_patches:
            self.proj = nn.Linear(3 * side**2, size, bias=config.patch_bias)
        elif config.frames:
            self.proj = nn.Conv3d(3, size, (config.frames, side, side), bias=config.patch_bias)
        else:
            self.proj = nn.Conv2d(3, size, side, bias=config.patch_bias)
        kind = "layer" if config.patch_norms else None
        self.norm1, self.norm2 = _norm(kind, 3 * side**2, 1e-5), _norm(kind, size, 1e-5)

    def forward(self, patches: Tensor) -> Tensor:
        """The embeddings (P, D) of patches (P, C, p, p), in bytes."""
        config, weight = self.config, self.proj.weight
        mean, std = on_device([config.mean, config.std], patches.device, torch.float32)[..., None, None]
        pixels = (patches / 255 - mean) / std
        pixels = (2 * pixels - 1 if config.centers_colors else pixels).to(weight.dtype)
        if config.linear_patches:
            pixels = pixels.movedim(1, -1)
        elif config.frames:  # all frames of an image are equal
            weight = weight.sum(2)
        return self.norm2(F.linear(self.norm1(pixels.flatten(1)), weight.flatten(1), self.proj.bias))


class Positions(nn.Module):
    """Learned embeddings of a patch's row and column."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        side, self.config = config.table_side, config
        shape = (2, side) if config.axis_first else (side, 2)
        self.weight = nn.Parameter(
            torch.empty(*(shape if config.positions == "sum" else (side**2,)), config.hidden_size)
        )

    def forward(self, grids: tuple[Grid, ...]) -> Tensor:
        """The embeddings (P, D) of all patches, in float32 if they are interpolated."""
        by_grid = {grid: in_blocks(self._of(*grid), self.config.merge) for grid in dict.fromkeys(grids)}
        return torch.cat([by_grid[grid] for grid in grids])

    def _of(self, rows: int, columns: int) -> Tensor:
        """The embeddings (rows, columns, D) of a grid."""
        side, kind = self.config.table_side, self.config.positions
        if kind == "sum":
            if max(rows, columns) > side:
                raise ValueError(
                    f"an image has {rows} x {columns} patches; the model has positions for {side} x {side}."
                )
            of_columns, of_rows = self.weight.unbind(0 if self.config.axis_first else 1)
            return of_rows[:rows, None] + of_columns[:columns]
        table = self.weight.unflatten(0, (side, side)).float()
        down, along = (moved(_shares(n, side, kind), table.device) for n in (rows, columns))
        return torch.einsum("rs,stD,ct->rcD", down, table, along)


def _shares(num_places: int, side: int, kind: str) -> Tensor:
    """The share (places, side) of each entry of a table at each place of an image's side."""
    if kind == "fractions":
        places = torch.arange(num_places, dtype=torch.float32) * (1.0 / torch.tensor(num_places))
        entries = torch.bucketize(places.clamp(max=1 - 1e-6), torch.arange(1 / side, 1.0, 1 / side), right=True)
        return F.one_hot(entries, side).float()
    options = {"align_corners": True} if kind == "corners" else {"align_corners": False, "antialias": True}
    return F.interpolate(torch.eye(side)[None, None], (num_places, side), mode="bilinear", **options)[0, 0]


class VisionTower(nn.Module):
    """Patches of images to embeddings for the decoder."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = Patches(config)
        self.pos_embed = None if config.positions == "none" else Positions(config)
        self.first_norm = _norm(config.first_norm, config.hidden_size, 1e-5)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.last_norm = _norm(config.norm if config.last_norm else None, config.hidden_size, config.norm_eps)
        self.merger = Merger(config, config.norm_after_merge)
        self.deepstack_merger_list = nn.ModuleList(Merger(config, True) for _ in config.deepstack)
        # Whether ranks gather its weights together: then each pass of each rank computes it exactly once.
        self.is_sharded = False

    def forward(self, patches: Tensor, grids: tuple[Grid, ...]) -> list[Tensor]:
        """Embeddings (N, out_size) for the decoder's input, then those to add after each of its first layers.

        patches (P, C, p, p): bytes, in blocks of `merge` x `merge`; grids: rows and columns of each image. A frozen
        tower keeps no graph, and computes `GROUP_PATCHES` at a time.
        """
        is_recorded = self.training or torch.is_grad_enabled()
        is_trained = is_recorded and any(parameter.requires_grad for parameter in self.parameters())
        if self.is_sharded or is_trained:
            return self._embeddings(patches, grids)
        with torch.no_grad():
            groups = list(_groups(grids))
            sizes = [sum(rows * columns for rows, columns in group) for group in groups]
            computed = [self._embeddings(*group) for group in zip(patches.split(sizes), groups, strict=True)]
            return computed[0] if len(computed) == 1 else [torch.cat(parts) for parts in zip(*computed, strict=True)]

    def no_images(self, device: torch.device) -> Images:
        """One image that no token shows, for a rank without images: its gradients are 0."""
        side, nothing = self.config.merge, torch.empty(0, dtype=torch.int64, device=device)
        patches = torch.zeros(side**2, 3, *[self.config.patch_size] * 2, dtype=torch.uint8, device=device)
        return Images(patches, ((side, side),), nothing, nothing)

    def shown_by_first_token(self, device: torch.device) -> dict[str, Any]:
        """The argument of the decoder's forward pass with a black image of one token, in the place of the first
        token."""
        first = torch.zeros(1, dtype=torch.int64, device=device)
        return {"images": self.no_images(device)._replace(places=first, rows=first)}

    def describe(self) -> str:
        """`with its image encoder: 1,234 parameters, frozen`, for the line about the model."""
        parameters = list(self.parameters())
        count, trained = (
            sum(map(whole_numel, some)) for some in (parameters, [p for p in parameters if p.requires_grad])
        )
        return f"with its image encoder: {count:,} parameters, {f'{trained:,} trained' if trained else 'frozen'}"

    def put(self, hidden: Tensor, images: Images) -> tuple[Tensor, list[Tensor]]:
        """Replace the decoder's embeddings (B, T, D) of image tokens. Also return what to add to them after its first
        layers."""
        embedded = images.embedded or self(images.patches, images.grids)
        if images.embedded is not None:
            images.embedded[:] = embedded
        embeddings, *deep = (x.to(hidden.dtype)[images.rows] for x in embedded)
        return hidden.flatten(0, 1).index_copy(0, images.places, embeddings).view_as(hidden), deep

    def _embeddings(self, patches: Tensor, grids: tuple[Grid, ...]) -> list[Tensor]:
        config, device = self.config, patches.device
        hidden = self.patch_embed(patches)
        if self.pos_embed is not None:
            hidden = hidden + self.pos_embed(grids).to(hidden.dtype)
        hidden = self.first_norm(hidden)
        places = places_in_blocks(grids, config.merge)
        windows = images = Stretches.of([rows * columns for rows, columns in grids], device)
        order = None
        if config.window:
            order, sizes = _windows(grids, config.merge, config.window)
            hidden, places = (_reordered(x, order, config.merge**2) for x in (hidden, places))
            windows = Stretches.of(sizes, device)
        rotation, deep = self._rotation(places, device), []
        for i, block in enumerate(self.blocks):
            hidden = block(hidden, images if i in config.whole_layers else windows, rotation)
            if i in config.deepstack:
                deep.append(self.deepstack_merger_list[config.deepstack.index(i)](hidden))
        embeddings = self.merger(self.last_norm(hidden))
        if order is not None:
            embeddings = _reordered(embeddings, order.argsort(), 1)
        return [embeddings, *deep]

    def _rotation(self, places: Tensor, device: torch.device) -> Rotation:
        """Cos and sin (1, P, D / H) of patches at these rows and columns (P, 2)."""
        size, theta, axes = self.config.head_dim, self.config.rope_theta, self.config.rope_axes
        if theta is None:
            return None
        steps = torch.arange(0, size, 2, dtype=torch.float32) / size
        steps = steps.view(-1, 2).T if axes == "alternating" else 2 * steps[: size // 4]
        places = places.flip(1) if axes == "halves" else places
        angles = (places[..., None] * (1.0 / theta**steps)).flatten(1)  # (P, D / H / 2)
        angles = moved(torch.cat((angles, angles), -1)[None], device)
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


def _windows(grids: tuple[Grid, ...], merge: int, window: int) -> tuple[Tensor, list[int]]:
    """The order of embeddings (N,) in which windows of window x window follow each other, and each window's patches."""
    order, sizes, start = [], [], 0
    for rows, columns in grids:
        row, column = places_in_blocks(((rows // merge, columns // merge),), 1).unbind(1)
        number = row // window * (columns // merge) + column // window
        order.append(number.argsort(stable=True) + start)
        sizes += (number.unique(return_counts=True)[1] * merge**2).tolist()
        start += len(number)
    return torch.cat(order), sizes


def _reordered(x: Tensor, order: Tensor, size: int) -> Tensor:
    """The groups of `size` rows of x in this order."""
    return x.unflatten(0, (-1, size))[moved(order, x.device)].flatten(0, 1)
