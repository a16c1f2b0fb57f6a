"""Images of a row: resized and cut into patches as the model family's processor does, with Pillow and NumPy alone.

The number of an image's tokens depends on its size alone, which its header has. So rows are measured, packed and
planned without decoding an image, and each image is decoded when its batch is built.

Pixels equal those of the processors of transformers that use Pillow; its processors that use torchvision round
differently. A setting that changes pixels and is not implemented is refused.

Shapes: P patches of an image, p pixels of a patch's side.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lean_ft.images import cuts, limits
from lean_ft.images.cuts import Size, Tiling
from lean_ft.system.config_fields import ConfigFields
from lean_ft.system.whole_files import read_json

if TYPE_CHECKING:  # models and tokenizers load this file, and texts do not need Pillow
    from lean_ft.images.pixels import Upright

_MAX_TILES = 1 << 10
_TOKEN = re.compile(r"<[^<>\s]+>|\[\w+\]")
_MAX_RESIZED = 1 << 26  # pixels, 4 times what Qwen3-VL allows
_ROWS_PIXELS = 1 << 18  # cut at a time


@dataclass(frozen=True)
class ImageLayout:
    """What an image of a given size becomes."""

    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of the image, or of each of its tiles in order."""
    text: str
    """What replaces the placeholder in a rendered chat."""
    runs: tuple[int, ...]
    """How often each image token in `text` is repeated. Their sum is the number of embeddings."""


# The text of an image and the repeats of each of its image tokens, by the rows and columns of tokens of each tile.
Text = Callable[[Tiling, list[tuple[int, int]]], tuple[str, tuple[int, ...]]]


def _resizing_pixels(size: Size, target: Size) -> int:
    """The most pixels that Pillow holds while it resizes one axis after the other. The shape decides which axis is
    first."""
    if target == size:
        return math.prod(size)
    between = max(target.width * size.height, size.width * target.height)
    return math.prod(size) + between + math.prod(target)


@dataclass(frozen=True)
class ImageRules:
    """How a family prepares an image. Cheap to pickle."""

    family: str  # the model type
    patch_size: int
    merge: int  # patches of the side of the square that one token of the decoder sees
    cut: Callable[[Size, int], Tiling]  # for a size and a limit
    limit: int  # of an image's pixels, of its longest side, or of its tokens, as its family limits images
    mean: tuple[float, ...]  # of each color, for values from 0 to 1
    std: tuple[float, ...]
    resample: int
    token: str  # the image token
    placeholder: str  # in a rendered chat, one per image
    text: Text
    shifts_positions: bool  # rotary positions have three axes, and text behind an image continues at a shifted position
    max_tokens: int | None
    usual_limit: int | None = None  # `limit` before `limited`; None: they are equal
    window: int | None = None  # tokens of the attention window, if programs differ for longer images
    marks: frozenset[int] = frozenset()  # ids of the tokens in and around an image, which are never trained
    states_colors: bool = True  # the folder names `mean` and `std`; else they are the processor's defaults

    unit: ClassVar[str] = "image"
    files: ClassVar[Sequence[str]] = ("config.json", "preprocessor_config.json", "processor_config.json")
    """Of a model's folder: they decide the rules."""

    def layout(self, size: Size) -> ImageLayout:
        """What an image of this size becomes. Raises ValueError for a size that the family refuses."""
        cut = self._cut(size)
        tokens = self._tokens(cut)
        grids = tuple((rows * self.merge, columns * self.merge) for rows, columns in tokens)
        return ImageLayout(grids, *self.text(cut, tokens))

    def keeps(self, size: Size) -> bool:
        """Whether the family's own processor, without `max_tokens`, leaves an image of this size as it is."""
        cut = self.limited(None)._cut(size)
        return {*cut.sizes} == {size} and cut.rows * cut.columns == 1 and cut.thumbnail is None

    def limited(self, max_tokens: int | None) -> "ImageRules":
        """These rules with images scaled down to at most `max_tokens` tokens. Raises ValueError if images cannot have
        so few."""
        usual = self.limit if self.usual_limit is None else self.usual_limit
        rules = replace(self, max_tokens=None, limit=usual, usual_limit=usual)
        if max_tokens is not None:
            rules = replace(rules, max_tokens=max_tokens, limit=limits.limit_of(rules, max_tokens))
        rules.layout(Size(1, 1))
        return rules

    def of_run(self, settings: Mapping[str, Any]) -> "ImageRules":
        """`limited` as in a run with these settings, by dotted key."""
        return self.limited(settings.get("data.image_tokens"))

    def write_limits(self, folder: Path) -> None:
        """Write the limit of `data.image_tokens` into the processor's files in `folder`."""
        limits.write_limit(folder, self)

    def remark(self) -> str:
        """A sentence about a limit that those files cannot hold; empty if they hold it."""
        difference = limits.difference(self)
        return difference and f"the run scaled images down to data.image_tokens={self.max_tokens}; {difference}"

    def check(self) -> None:
        """Raise ValueError if images may be longer than the attention window, beyond which programs differ."""
        if self.window is not None and self.limit > self.window:
            raise ValueError(
                f"images have up to {self.limit} tokens, and this model's attention has windows of {self.window}. "
                "Programs differ for longer images: beyond the window, an image attends to itself in transformers' "
                f"training, but not in its generation or in vLLM. Set data.image_tokens={self.window}, or "
                "max_soft_tokens in the model's folder."
            )

    def patches(self, image: "Upright", into: np.ndarray | None = None) -> np.ndarray:
        """The patches (P, 3, p, p) of an image as bytes, in blocks of `merge` x `merge`, tile after tile. into: an
        array for them."""
        cut, small = self._cut(image.size), None
        if cut.thumbnail is not None and not cut.thumbnail_of_resized:
            small = image.resized(cut.thumbnail, self.resample)
        for size in cut.sizes:
            image = image.resized(size, self.resample)
        if cut.thumbnail is not None and cut.thumbnail_of_resized:
            small = image.resized(cut.thumbnail, self.resample)
        width, height = image.size.width // cut.columns, image.size.height // cut.rows
        corners = [(x * width, y * height) for y in range(cut.rows) for x in range(cut.columns)]
        tiles = [(image, (x, y, x + width, y + height)) for x, y in corners]
        if small is not None:
            tiles.append((small, (0, 0, small.size.width, small.size.height)))
        blocks = (part for tile, box in tiles for part in self._blocks(tile, box))
        if into is None:
            return np.concatenate(list(blocks))
        start = 0
        for part in blocks:
            into[start : start + len(part)] = part
            start += len(part)
        return into

    def _blocks(self, image: "Upright", box: tuple[int, int, int, int]) -> Iterator[np.ndarray]:
        """The patches of one tile, some rows of blocks at a time. A tile may have pixels behind its last patch."""
        side, merge = self.patch_size, self.merge
        block, (left, top, right, bottom) = side * merge, box
        columns, height = (right - left) // block, max(1, _ROWS_PIXELS // (right - left) // block) * block
        bottom -= (bottom - top) % block
        for first in range(top, bottom, height):
            part = image.crop((left, first, left + columns * block, min(first + height, bottom)))
            pixels = np.asarray(part).reshape(-1, merge, side, columns, merge, side, 3)
            yield pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, side, side)

    def working_bytes(self, size: Size, pixel_bytes: int) -> int:
        """Peak memory of an image and its resized copies in `patches`. pixel_bytes: bytes of a pixel, 1 in gray and 4
        in RGB."""
        cut = self._cut(size)
        steps = [(size, cut.thumbnail)] if cut.thumbnail is not None and not cut.thumbnail_of_resized else []
        for target in cut.sizes:
            steps.append((size, target))
            size = target
        return pixel_bytes * max(_resizing_pixels(*step) for step in steps)

    def _tokens(self, cut: Tiling) -> list[tuple[int, int]]:
        """Rows and columns of tokens of each tile."""
        side, last = self.patch_size * self.merge, cut.sizes[-1]
        tile = last.height // cut.rows // side, last.width // cut.columns // side
        thumbnail = [] if cut.thumbnail is None else [(cut.thumbnail.height // side, cut.thumbnail.width // side)]
        return [tile] * (cut.rows * cut.columns) + thumbnail

    def _cut(self, size: Size) -> Tiling:
        """The cut at the limit. If it has more than `max_tokens` tokens, the cut at the largest limit that does not."""

        def num_tokens(limit: int) -> int:
            return sum(rows * columns for rows, columns in self._tokens(self.cut(size, limit)))

        cut = self.cut(size, self.limit)
        if cut.rows * cut.columns > _MAX_TILES or max(math.prod(resized) for resized in cut.sizes) > _MAX_RESIZED:
            raise ValueError(f"an image of {size.width} x {size.height} pixels: this model would enlarge it too much.")
        if self.max_tokens is None or num_tokens(self.limit) <= self.max_tokens:
            return cut
        fits, exceeds = 0, self.limit
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (middle, exceeds) if num_tokens(middle) <= self.max_tokens else (fits, middle)
        if not fits:
            found = f"an image of {size.width} x {size.height} pixels has at least {num_tokens(1)} tokens"
            raise ValueError(f"data.image_tokens is {self.max_tokens}, but {found}. Set a larger number, or null.")
        return self.cut(size, fits)


@dataclass(frozen=True)
class Frame:
    """Text around the tokens of an image, or around those of each tile and of the thumbnail."""

    token: str
    start: str = ""
    end: str = ""
    single: str = ""
    tile: str = ""
    row_end: str = ""
    thumbnail: str = ""

    def __call__(self, cut: Tiling, tokens: list[tuple[int, int]]) -> tuple[str, tuple[int, ...]]:
        runs = tuple(rows * columns for rows, columns in tokens)
        if len(tokens) == 1:
            return f"{self.start}{self.single}{self.token}{self.end}", runs
        places = [[(row + 1, column + 1) for column in range(cut.columns)] for row in range(cut.rows)]
        rows = ["".join(self.tile.format(*place) + self.token for place in row) + self.row_end for row in places]
        last = "" if cut.thumbnail is None else self.thumbnail + self.token
        return f"{self.start}{''.join(rows)}{last}{self.end}", runs


def by_rows(cut: Tiling, tokens: list[tuple[int, int]]) -> tuple[str, tuple[int, ...]]:
    """A run for each row of tokens (Pixtral)."""
    ((rows, columns),) = tokens
    return "[IMG_BREAK]".join(["[IMG]"] * rows) + "[IMG_END]", (columns,) * rows


# A function per processor: patch_size, merge, cut and limit, by its settings, the fields of config.json and its
# vision_config. Sides of patches and tokens are the tower's, by config.json.
_Facts = tuple[int, int, Callable[[Size, int], Tiling], int]
_AS_IN_CONFIG = "as in config.json"
_MAX_LIMIT = 1 << 28  # pixels of an image, or of a side


def _qwen(settings: ConfigFields, config: ConfigFields, vision: ConfigFields) -> _Facts:
    side, merge = vision.count("patch_size", most=1024), vision.count("spatial_merge_size", most=64)
    settings.expect(_AS_IN_CONFIG, patch_size=side, merge_size=merge)
    size = settings.object("size")  # numbers of pixels
    sizes = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")} | settings.values
    least, most = (
        ConfigFields(sizes, {}, settings.where).count(name, most=_MAX_LIMIT) for name in ("min_pixels", "max_pixels")
    )
    return side, merge, partial(cuts.within_pixels, multiple=side * merge, least=least, ratio=200), most


def _gemma3(settings: ConfigFields, config: ConfigFields, vision: ConfigFields) -> _Facts:
    side, tokens = vision.count("patch_size", most=1024), math.isqrt(config.count("mm_tokens_per_image"))
    pixels = vision.count("image_size", multiple_of=side * tokens)
    settings.object("size").expect(_AS_IN_CONFIG, height=pixels, width=pixels)
    return side, pixels // side // tokens, partial(cuts.always, target=Size(pixels, pixels)), 1


def _pixtral(settings: ConfigFields, config: ConfigFields, vision: ConfigFields) -> _Facts:
    side, merge = vision.count("patch_size", most=1024), config.count("spatial_merge_size", most=64)
    longest = settings.object("size").count("longest_edge", most=_MAX_LIMIT)
    return side, merge, partial(cuts.within_longest, multiple=side * merge), longest


def _gemma4(settings: ConfigFields, config: ConfigFields, vision: ConfigFields, has_tower: bool = True) -> _Facts:
    side, merge = vision.count("patch_size", most=1024), vision.count("pooling_kernel_size", most=64)
    settings.expect(_AS_IN_CONFIG, patch_size=side, pooling_kernel_size=merge)
    cut, limit = partial(cuts.within_tokens, multiple=side * merge), settings.count("max_soft_tokens", most=10_000)
    return (side, merge, cut, limit) if has_tower else (side * merge, 1, cut, limit)


def _smolvlm(settings: ConfigFields, config: ConfigFields, vision: ConfigFields) -> _Facts:
    side, merge = vision.count("patch_size", most=1024), config.count("scale_factor", most=64)
    sizes = settings.object("max_image_size")
    if (tile := sizes.count("longest_edge", most=_MAX_LIMIT)) // side % merge or tile < side:
        raise sizes.wrong("longest_edge", f"a multiple of {merge} patches of {side} pixels, and less than a patch more")
    longest = settings.object("size").count("longest_edge", most=_MAX_LIMIT)
    return side, merge, partial(cuts.tiled, tile=tile, split=settings.flag("do_image_splitting")), longest


def _lfm2(settings: ConfigFields, config: ConfigFields, vision: ConfigFields) -> _Facts:
    side, merge = vision.count("patch_size", most=1024), config.count("downsample_factor", most=64)
    settings.expect(_AS_IN_CONFIG, encoder_patch_size=side, downsample_factor=merge)
    settings.expect(max_pixels_tolerance=2.0)
    least, most = settings.count("min_image_tokens"), settings.count("max_image_tokens", most=10_000)
    tile = settings.count("tile_size", multiple_of=side * merge)
    max_tiles = settings.count("max_tiles", most=64) if settings.flag("do_image_splitting") else 1
    min_tiles, thumbnail = settings.count("min_tiles"), settings.flag("use_thumbnail")
    tiles = cuts.Tiles(side, side * merge, least, most, tile, min_tiles, max_tiles, thumbnail)
    return side, merge, partial(cuts.tiled_by_shape, tiles=tiles), most + max_tiles * (tile // side // merge) ** 2


@dataclass(frozen=True)
class _Family:
    """A family's row."""

    facts: Callable[[ConfigFields, ConfigFields, ConfigFields], _Facts]
    token: str
    defaults: Mapping[str, Any]  # values of absent settings of its processor
    patch_size: int = 16  # of its tower, if absent
    placeholder: str | None = None  # None: the token
    around: Mapping[str, str] = field(default_factory=dict)  # texts of its `Frame`
    text: Text | None = None  # None: its `Frame`
    beside: tuple[str, ...] = ()  # further tokens around an image, which the chat template or `text` writes
    shifts_positions: bool = False

    def marks(self, added_tokens: Mapping[str, int]) -> frozenset[int]:
        """The ids of the tokens in and around an image."""
        written = (self.token, self.placeholder or "", *self.around.values(), *self.beside)
        names = {name for text in written for name in _TOKEN.findall(text)}
        pattern = re.compile("|".join(re.escape(name).replace(r"\{\}", r"\d+") for name in names))
        return frozenset(number for token, number in added_tokens.items() if pattern.fullmatch(token))


# fmt: off
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # filters of Pillow
_PLAIN = {"do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "resample": _BICUBIC}
_HALF = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": _BILINEAR}
_CLIP = {
    "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": _BICUBIC,
}
_OF_QWEN = _CLIP | {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
_OF_GEMMA_4 = _PLAIN | {"max_soft_tokens": 280}
_OF_SMOLVLM = _HALF | {
    "resample": _LANCZOS, "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
}
_OF_LFM2 = _HALF | {
    "min_image_tokens": 64, "max_image_tokens": 256, "tile_size": 512, "min_tiles": 2, "max_tiles": 10,
    "do_image_splitting": True, "use_thumbnail": True,
}
_IN_CONFIG = {"mm_tokens_per_image": 256, "spatial_merge_size": 2, "scale_factor": 2, "downsample_factor": 2}
_IN_VISION = {"image_size": 224, "spatial_merge_size": 2, "pooling_kernel_size": 3}

_FAKE = "<fake_token_around_image>"
_GEMMA_4 = {"start": "<|image>", "end": "<image|>"}
_QWEN = _Family(
    _qwen, "<|image_pad|>", _OF_QWEN, shifts_positions=True, beside=("<|vision_start|>", "<|vision_end|>"),
)
_FAMILIES: dict[str, _Family] = {
    "qwen3_vl": _QWEN, "qwen3_vl_moe": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN,
    "qwen2_5_vl": replace(_QWEN, patch_size=14),
    "gemma3": _Family(
        _gemma3, "<image_soft_token>", _HALF | {"size": {"height": 224, "width": 224}}, placeholder="<start_of_image>",
        around={"start": "\n\n<start_of_image>", "end": "<end_of_image>\n\n"},
    ),
    "mistral3": _Family(_pixtral, "[IMG]", _CLIP | {"size": {"longest_edge": 1024}}, text=by_rows,
                        beside=("[IMG_BREAK]", "[IMG_END]")),
    "gemma4": _Family(_gemma4, "<|image|>", _OF_GEMMA_4, around=_GEMMA_4),
    "gemma4_unified": _Family(partial(_gemma4, has_tower=False), "<|image|>", _OF_GEMMA_4, around=_GEMMA_4),
    "smolvlm": _Family(
        _smolvlm, "<image>", _OF_SMOLVLM, patch_size=32,
        around={"single": f"{_FAKE}<global-img>", "tile": _FAKE + "<row_{}_col_{}>", "row_end": "\n",
                "thumbnail": f"\n{_FAKE}<global-img>", "end": _FAKE},
    ),
    "lfm2_vl": _Family(
        _lfm2, "<image>", _OF_LFM2,
        around={"start": "<|image_start|>", "tile": "<|img_row_{}_col_{}|>", "thumbnail": "<|img_thumbnail|>",
                "end": "<|image_end|>"},
    ),
}
# fmt: on


def image_rules(
    folder: Path, max_tokens: int | None = None, added_tokens: Mapping[str, int] | None = None
) -> ImageRules:
    """The rules of a model folder, from config.json and preprocessor_config.json or processor_config.json.

    max_tokens: scale larger images down to this number of tokens. added_tokens: of the tokenizer, with their ids.
    Raises ValueError if lean_ft does not know how the model prepares images, for a setting that is not implemented, or
    if images cannot have so few tokens.
    """

    def read(
        name: str, defaults: Mapping[str, Any], purpose: str | None = "it is needed to read images."
    ) -> ConfigFields:
        return ConfigFields(read_json(folder / name, purpose), defaults, str(folder / name), null_is_absent=True)

    config = read("config.json", _IN_CONFIG)
    if (model_type := config.get("model_type")) not in list(_FAMILIES):
        families = ", ".join(sorted(_FAMILIES))
        raise config.wrong("model_type", f"a model that reads images: {families}. The embedded one is tiny-images")
    family, processor = _FAMILIES[model_type], read("processor_config.json", {}, None)
    processor.expect(use_image_special_tokens=True)
    settings = processor.object("image_processor", **family.defaults)
    if not settings.config:  # transformers 5 nests the settings; older folders have a file for them
        settings = read("preprocessor_config.json", family.defaults)
    if family.facts is not _lfm2:  # its processor always resizes, and its folders say that it does not
        settings.expect(do_resize=True)
    settings.expect(do_rescale=True, rescale_factor=1 / 255, do_center_crop=False, do_pan_and_scan=False)
    vision = config.object("vision_config", patch_size=family.patch_size, **_IN_VISION)
    is_normalized = settings.flag("do_normalize")
    return ImageRules(
        model_type,
        *family.facts(settings, config, vision),
        mean=_colors(settings, "image_mean", 0) if is_normalized else (0.0, 0.0, 0.0),
        std=_colors(settings, "image_std", 1e-3) if is_normalized else (1.0, 1.0, 1.0),
        resample=settings.one_of("resample", range(6)),
        token=family.token,
        placeholder=family.placeholder or family.token,
        text=family.text or Frame(family.token, **family.around),
        shifts_positions=family.shifts_positions,
        max_tokens=None,
        window=_window(config) if model_type == "gemma4_unified" else None,
        marks=family.marks(added_tokens or {}),
        states_colors={"image_mean", "image_std"} <= settings.config.keys(),
    ).limited(max_tokens)


def _window(config: ConfigFields) -> int | None:
    """The window in which the tokens of an image see each other; None if they do not."""
    text = config.object("text_config").config  # null differs from an absent field
    window = text.get("sliding_window", 1024)  # the model's own reader refuses other values
    sees_images = text.get("use_bidirectional_attention", "vision") == "vision"
    return window if sees_images and type(window) is int else None


def _colors(settings: ConfigFields, name: str, least: float) -> tuple[float, ...]:
    colors = settings.get(name)
    is_valid = isinstance(colors, list) and len(colors) == 3 and all(type(x) in (int, float) for x in colors)
    if not is_valid or not all(least <= x <= 1 for x in colors):
        raise settings.wrong(name, f"a list of 3 numbers from {least} to 1")
    return tuple(map(float, colors))
