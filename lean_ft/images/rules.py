"""Images of a row: resized and cut into patches as the model family's processor does, with Pillow and NumPy alone.

The number of an image's tokens depends on its size alone, which its header has. So rows are measured, packed and planned
without decoding an image, and each image is decoded when its batch is built.

Pixels equal those of the processors of transformers that use Pillow; its processors that use torchvision round differently. A
setting that changes pixels and is not implemented is refused.

Shapes: P patches of an image, p pixels of a patch's side.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lean_ft.images.cuts import Tiling, always, tiled, tiled_by_shape, within_longest, within_pixels, within_tokens
from lean_ft.images.reading import MAX_PIXELS, Size
from lean_ft.system.whole_files import read_json

_MAX_TILES = 1 << 10
_MAX_RESIZED = 1 << 26  # pixels, 4 times what Qwen3-VL allows
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # mean and standard deviation
_HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_PLAIN = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # filters of Pillow


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


@dataclass(frozen=True)
class ImageRules:
    """How a family prepares an image. Cheap to pickle."""

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

    def layout(self, size: Size) -> ImageLayout:
        """What an image of this size becomes. Raises ValueError for a size that the family refuses."""
        cut = self._cut(size)
        tokens = self._tokens(cut)
        grids = tuple((rows * self.merge, columns * self.merge) for rows, columns in tokens)
        return ImageLayout(grids, *self.text(cut, tokens))

    def limited(self, max_tokens: int | None) -> "ImageRules":
        """These rules with larger images scaled down to `max_tokens`. Raises ValueError if images cannot have so few tokens."""
        limited = replace(self, max_tokens=max_tokens)
        limited.layout(Size(1, 1))
        return limited

    def patches(self, image: Image.Image) -> np.ndarray:
        """The patches (P, 3, p, p) of an upright RGB image as bytes, in blocks of `merge` x `merge`, tile after tile."""
        cut, resized = self._cut(Size(*image.size)), image
        for size in cut.sizes:
            resized = resized.resize(size, self.resample)
        width, height = resized.width // cut.columns, resized.height // cut.rows
        corners = [(x * width, y * height) for y in range(cut.rows) for x in range(cut.columns)]
        tiles = [resized.crop((x, y, x + width, y + height)) for x, y in corners]
        if cut.thumbnail is not None:
            tiles.append((resized if cut.thumbnail_of_resized else image).resize(cut.thumbnail, self.resample))
        return np.concatenate([self._blocks(np.asarray(tile)) for tile in tiles])

    def _blocks(self, pixels: np.ndarray) -> np.ndarray:
        """The patches of one tile (height, width, 3)."""
        side, merge = self.patch_size, self.merge
        rows, columns = (n // (side * merge) for n in pixels.shape[:2])
        pixels = pixels[: rows * merge * side, : columns * merge * side]  # a tile may have pixels behind its last patch
        blocks = pixels.reshape(rows, merge, side, columns, merge, side, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, side, side)

    def _tokens(self, cut: Tiling) -> list[tuple[int, int]]:
        """Rows and columns of tokens of each tile."""
        side, last = self.patch_size * self.merge, cut.sizes[-1]
        tile = last.height // cut.rows // side, last.width // cut.columns // side
        thumbnail = [] if cut.thumbnail is None else [(cut.thumbnail.height // side, cut.thumbnail.width // side)]
        return [tile] * (cut.rows * cut.columns) + thumbnail

    def _cut(self, size: Size) -> Tiling:
        """The cut at the largest limit at which the image has at most `max_tokens` tokens."""

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


def framed(
    cut: Tiling, tokens: list[tuple[int, int]], *, token: str, start: str = "", end: str = "", single: str = "", tile: str = "",
    row_end: str = "", thumbnail: str = "",
) -> tuple[str, tuple[int, ...]]:  # fmt: skip
    """Text around the tokens of an image, or around those of each tile and of the thumbnail."""
    runs = tuple(rows * columns for rows, columns in tokens)
    if len(tokens) == 1:
        return f"{start}{single}{token}{end}", runs
    names = [[tile.format(row + 1, column + 1) for column in range(cut.columns)] for row in range(cut.rows)]
    last = "" if cut.thumbnail is None else thumbnail + token
    return start + "".join("".join(name + token for name in row) + row_end for row in names) + last + end, runs


def by_rows(cut: Tiling, tokens: list[tuple[int, int]]) -> tuple[str, tuple[int, ...]]:
    """A run for each row of tokens (Pixtral)."""
    ((rows, columns),) = tokens
    return "[IMG_BREAK]".join(["[IMG]"] * rows) + "[IMG_END]", (columns,) * rows


class _Fields:
    """The fields of a JSON file. As in transformers, null means absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        return default if (value := self.values.get(name)) is None else value

    def object(self, name: str, **default: int) -> "_Fields":
        value = self.get(name, default)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return _Fields(value, f"{self.where}: {name}")

    def count(self, name: str, default: int | None = None, most: int = MAX_PIXELS, multiple_of: int = 1) -> int:
        value = self.get(name, default)
        if type(value) is not int or not 0 < value <= most or value % multiple_of:
            multiple = "a positive integer" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
            raise self.wrong(name, f"{multiple}, at most {most}")
        return value

    def one_of(self, name: str, default: Any, values: Sequence[Any]) -> Any:
        value = self.get(name, default)
        if type(value) is not type(default) or value not in values:
            raise self.wrong(name, f"one of {', '.join(map(str, values))}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self.one_of(name, default, (True, False))

    def numbers(self, name: str, default: tuple[float, ...], least: float) -> tuple[float, ...]:
        value = self.get(name, default)
        colors = value if isinstance(value, list | tuple) else ()
        if len(colors) != 3 or not all(type(x) in (int, float) and least <= x <= 1 for x in colors):
            raise self.wrong(name, f"a list of 3 numbers from {least} to 1")
        return tuple(map(float, colors))

    def expect(self, because: str, **expected: Any) -> None:
        for name, value in expected.items():
            if self.get(name, value) != value:
                raise self.wrong(name, f"{value}, {because}")

    def wrong(self, name: str, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {repr(self.values.get(name))[:100]}; expected {expected}.")


# A function per processor: patch_size, merge, cut and limit, by its settings, the fields of config.json and its vision_config.
# Sides of patches and tokens are the tower's, by config.json. Absent settings have the processor's own defaults.
_Facts = tuple[int, int, Callable[[Size, int], Tiling], int]
_AS_IN_CONFIG = "as in config.json"


def _qwen(settings: _Fields, config: _Fields, vision: _Fields, patch_size: int = 16) -> _Facts:
    side, merge = vision.count("patch_size", patch_size, 1024), vision.count("spatial_merge_size", 2, 64)
    settings.expect(_AS_IN_CONFIG, patch_size=side, merge_size=merge)
    size = settings.object("size", shortest_edge=56 * 56, longest_edge=28 * 28 * 1280)  # numbers of pixels
    least = settings.count("min_pixels", size.get("shortest_edge"))
    most = settings.count("max_pixels", size.get("longest_edge"))
    return side, merge, partial(within_pixels, multiple=side * merge, least=least, ratio=200), most


def _gemma3(settings: _Fields, config: _Fields, vision: _Fields) -> _Facts:
    side, tokens = vision.count("patch_size", 16, 1024), math.isqrt(config.count("mm_tokens_per_image", 256))
    pixels = vision.count("image_size", 224, multiple_of=side * tokens)
    settings.object("size", height=224, width=224).expect(_AS_IN_CONFIG, height=pixels, width=pixels)
    return side, pixels // side // tokens, partial(always, target=Size(pixels, pixels)), 1


def _pixtral(settings: _Fields, config: _Fields, vision: _Fields) -> _Facts:
    side, merge = vision.count("patch_size", 16, 1024), config.count("spatial_merge_size", 2, 64)
    longest = settings.object("size", longest_edge=1024).count("longest_edge")
    return side, merge, partial(within_longest, multiple=side * merge), longest


def _gemma4(settings: _Fields, config: _Fields, vision: _Fields, has_tower: bool = True) -> _Facts:
    side, merge = vision.count("patch_size", 16, 1024), vision.count("pooling_kernel_size", 3, 64)
    settings.expect(_AS_IN_CONFIG, patch_size=side, pooling_kernel_size=merge)
    cut, limit = partial(within_tokens, multiple=side * merge), settings.count("max_soft_tokens", 280, 10_000)
    return (side, merge, cut, limit) if has_tower else (side * merge, 1, cut, limit)


def _smolvlm(settings: _Fields, config: _Fields, vision: _Fields) -> _Facts:
    side, merge = vision.count("patch_size", 32, 1024), config.count("scale_factor", 2, 64)
    sizes = settings.object("max_image_size", longest_edge=364)
    if (tile := sizes.count("longest_edge")) // side % merge or tile < side:
        raise sizes.wrong("longest_edge", f"a multiple of {merge} patches of {side} pixels, and less than a patch more")
    longest = settings.object("size", longest_edge=4 * 364).count("longest_edge")
    return side, merge, partial(tiled, tile=tile, split=settings.flag("do_image_splitting", True)), longest


def _lfm2(settings: _Fields, config: _Fields, vision: _Fields) -> _Facts:
    side, merge = vision.count("patch_size", 16, 1024), config.count("downsample_factor", 2, 64)
    settings.expect(_AS_IN_CONFIG, encoder_patch_size=side, downsample_factor=merge)
    settings.expect("the only value implemented", max_pixels_tolerance=2.0)
    least, most = settings.count("min_image_tokens", 64), settings.count("max_image_tokens", 256, 10_000)
    tile = settings.count("tile_size", 512, multiple_of=side * merge)
    max_tiles = settings.count("max_tiles", 10, 64) if settings.flag("do_image_splitting", True) else 1
    cut = partial(
        tiled_by_shape, patch_size=side, multiple=side * merge, least=least, most=most, tile=tile, max_tiles=max_tiles,
        min_tiles=settings.count("min_tiles", 2), thumbnail=settings.flag("use_thumbnail", True),
    )  # fmt: skip
    return side, merge, cut, most + max_tiles * (tile // side // merge) ** 2


@dataclass(frozen=True)
class _Family:
    """A family's row, with its processor's defaults."""

    facts: Callable[[_Fields, _Fields, _Fields], _Facts]
    token: str
    resample: int
    colors: tuple[tuple[float, ...], tuple[float, ...]]
    placeholder: str | None = None  # None: the token
    text: Text | None = None  # None: the token
    shifts_positions: bool = False


def _frame(token: str, **around: str) -> Text:
    return partial(framed, token=token, **around)


_FAKE = "<fake_token_around_image>"
_GEMMA_4 = _frame("<|image|>", start="<|image>", end="<image|>")
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        _Family(_qwen, "<|image_pad|>", _BICUBIC, _CLIP, shifts_positions=True),
    ),
    "qwen2_5_vl": _Family(partial(_qwen, patch_size=14), "<|image_pad|>", _BICUBIC, _CLIP, shifts_positions=True),
    "gemma3": _Family(
        _gemma3, "<image_soft_token>", _BILINEAR, _HALF, "<start_of_image>",
        _frame("<image_soft_token>", start="\n\n<start_of_image>", end="<end_of_image>\n\n"),
    ),
    "mistral3": _Family(_pixtral, "[IMG]", _BICUBIC, _CLIP, text=by_rows),
    "gemma4": _Family(_gemma4, "<|image|>", _BICUBIC, _PLAIN, text=_GEMMA_4),
    "gemma4_unified": _Family(partial(_gemma4, has_tower=False), "<|image|>", _BICUBIC, _PLAIN, text=_GEMMA_4),
    "smolvlm": _Family(
        _smolvlm, "<image>", _LANCZOS, _HALF,
        text=_frame(
            "<image>", single=f"{_FAKE}<global-img>", tile=_FAKE + "<row_{}_col_{}>", row_end="\n",
            thumbnail=f"\n{_FAKE}<global-img>", end=_FAKE,
        ),
    ),
    "lfm2_vl": _Family(
        _lfm2, "<image>", _BILINEAR, _HALF,
        text=_frame(
            "<image>", start="<|image_start|>", tile="<|img_row_{}_col_{}|>", thumbnail="<|img_thumbnail|>", end="<|image_end|>",
        ),
    ),
}  # fmt: skip


def image_rules(folder: Path, max_tokens: int | None = None) -> ImageRules:
    """The rules of a model folder, from config.json and preprocessor_config.json or processor_config.json.

    max_tokens: scale larger images down to this number of tokens. Raises ValueError if lean_ft does not know how the model
    prepares images, for a setting that is not implemented, or if images cannot have so few tokens.
    """
    purpose = "it is needed to read images."
    config = _Fields(read_json(folder / "config.json", purpose), str(folder / "config.json"))
    if (model_type := config.get("model_type")) not in list(_FAMILIES):
        raise config.wrong("model_type", f"a model that reads images: {', '.join(sorted(_FAMILIES))}")
    family, processor = _FAMILIES[model_type], folder / "processor_config.json"
    settings = _Fields(read_json(processor), str(processor))
    settings.expect("the only value implemented", use_image_special_tokens=True)
    settings = settings.object("image_processor")
    if not settings.values:  # transformers 5 nests the settings; older folders have a file for them
        path = folder / "preprocessor_config.json"
        settings = _Fields(read_json(path, purpose), str(path))
    if family.facts is not _lfm2:  # its processor always resizes, and its folders say that it does not
        settings.expect("the only value implemented", do_resize=True)
    settings.expect(
        "the only value implemented", do_rescale=True, rescale_factor=1 / 255, do_center_crop=False, do_pan_and_scan=False
    )  # fmt: skip
    mean, std = _PLAIN
    if settings.flag("do_normalize", family.colors != _PLAIN):
        mean = settings.numbers("image_mean", family.colors[0], 0)
        std = settings.numbers("image_std", family.colors[1], 1e-3)
    rules = ImageRules(
        *family.facts(settings, config, config.object("vision_config")), mean, std,
        resample=settings.one_of("resample", family.resample, range(6)),
        token=family.token,
        placeholder=family.placeholder or family.token,
        text=family.text or _frame(family.token),
        shifts_positions=family.shifts_positions,
        max_tokens=None,
    )  # fmt: skip
    return rules.limited(max_tokens)
