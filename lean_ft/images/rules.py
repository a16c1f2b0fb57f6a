"""Images of a row: read, resized and cut into patches as the model family's processor does, with Pillow and NumPy alone.

The number of an image's tokens depends on its size alone, which its header has. So rows are measured, packed and planned
without decoding an image, and each image is decoded when its batch is built.

Pixels equal those of the processors of transformers that use Pillow. Its processors that use torchvision differ from these by
rounding. A setting of a processor that changes pixels and is not implemented is refused.

Shapes: P patches of an image, p pixels of a patch's side.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from lean_ft.images.reading import MAX_PIXELS, Size
from lean_ft.system.whole_files import read_json

_MAX_TILES = 1 << 10
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # mean and standard deviation
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_PLAIN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_NEAREST, _LANCZOS, _BILINEAR, _BICUBIC, _HAMMING = 0, 1, 2, 3, 5


@dataclass(frozen=True)
class ImageLayout:
    """What an image of a given size becomes."""

    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of the image, or of each of its tiles in order."""
    text: str
    """What replaces the placeholder in a rendered chat."""
    runs: tuple[int, ...]
    """How often each image token in `text` is repeated. Their sum is the number of embeddings."""


class Cut(NamedTuple):
    """How an image becomes tiles: it is resized to each of `sizes` in turn, then cut into rows and columns of equal tiles."""

    sizes: tuple[Size, ...]
    rows: int = 1
    columns: int = 1
    thumbnail: Size | None = None  # one more tile: the whole image in this size
    thumbnail_of_resized: bool = False  # the thumbnail is made from the resized image


# The text of an image and the repeats of each of its image tokens, by the rows and columns of tokens of each tile.
Text = Callable[[Cut, list[tuple[int, int]]], tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class ImageRules:
    """How a family prepares an image. Cheap to pickle."""

    patch_size: int
    merge: int  # patches of the side of the square that one token of the decoder sees
    mean: tuple[float, ...]  # of each color, for values from 0 to 1
    std: tuple[float, ...]
    resample: int  # a filter of Pillow
    placeholder: str  # in a rendered chat, one per image
    token: str  # the image token
    text: Text
    cut: Callable[[Size, int], Cut]  # for a size and a limit
    limit: int  # of an image's pixels, of its longest side, or of its tokens, as its family limits images
    max_tokens: int | None = None
    shifts_positions: bool = (
        False  # rotary positions have three axes, and text behind an image continues at a shifted position
    )

    def layout(self, size: Size) -> ImageLayout:
        """What an image of this size becomes. Raises ValueError for a size that the family refuses."""
        cut = self._cut(size)
        tokens = self._tokens(cut)
        grids = tuple((rows * self.merge, columns * self.merge) for rows, columns in tokens)
        return ImageLayout(grids, *self.text(cut, tokens))

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
        blocks = pixels.reshape(rows, merge, side, columns, merge, side, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, side, side)

    def _tokens(self, cut: Cut) -> list[tuple[int, int]]:
        """Rows and columns of tokens of each tile."""
        side, last = self.patch_size * self.merge, cut.sizes[-1]
        tile = last.height // cut.rows // side, last.width // cut.columns // side
        thumbnail = [] if cut.thumbnail is None else [(cut.thumbnail.height // side, cut.thumbnail.width // side)]
        return [tile] * (cut.rows * cut.columns) + thumbnail

    def _cut(self, size: Size) -> Cut:
        """How an image of this size is cut: by the largest limit at which it has at most `max_tokens` tokens."""
        cut = self._within_memory(size, self.limit)
        if self.max_tokens is None or self._count(cut) <= self.max_tokens:
            return cut
        fits, exceeds = 0, self.limit
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self._count(self.cut(size, middle)) <= self.max_tokens:
                fits = middle
            else:
                exceeds = middle
        if fits == 0:
            least = self._count(self.cut(size, 1))
            found = f"an image of {size.width} x {size.height} pixels has at least {least} tokens"
            raise ValueError(
                f"data.image_tokens is {self.max_tokens}, but {found}. Set data.image_tokens={least} or null."
            )
        return self.cut(size, fits)

    def _within_memory(self, size: Size, limit: int) -> Cut:
        cut = self.cut(size, limit)
        if cut.rows * cut.columns > _MAX_TILES or max(wide * high for wide, high in cut.sizes) > MAX_PIXELS:
            raise ValueError(
                f"an image of {size.width} x {size.height} pixels would be enlarged to {cut.sizes[-1]} pixels."
            )
        return cut

    def _count(self, cut: Cut) -> int:
        return sum(rows * columns for rows, columns in self._tokens(cut))


def image_rules(folder: Path, max_tokens: int | None = None) -> ImageRules:
    """The rules of a model folder, from config.json and preprocessor_config.json or processor_config.json.

    max_tokens: scale larger images down to this number of tokens. Raises ValueError if the model reads no images, if lean_ft does
    not know how it prepares them, or if its images cannot have so few tokens.
    """
    config = read_json(folder / "config.json", "it is needed to read images.")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        families = ", ".join(sorted(_FAMILIES))
        raise ValueError(f"{folder / 'config.json'}: model_type is {model_type!r}; images need one of {families}.")
    family = _FAMILIES[model_type]
    processor = _Fields(read_json(folder / "processor_config.json"), str(folder / "processor_config.json"))
    processor.expect("use_image_special_tokens", True, "other values are not implemented")
    settings = processor.object("image_processor")
    if not settings.values:  # transformers 5 nests the settings; older folders have a file for them
        path = folder / "preprocessor_config.json"
        settings = _Fields(read_json(path, "it is needed to read images."), str(path))
    for name, expected in _ONLY.items():
        if name not in family.ignored:
            settings.expect(name, expected, "lean_ft implements nothing else")
    whole = _Fields(config, str(folder / "config.json"))
    facts = family.facts(settings, whole, whole.object("vision_config"))
    mean, std = family.colors
    if not settings.get("do_normalize", family.colors != _PLAIN):
        mean, std = _PLAIN
    else:
        mean, std = settings.colors("image_mean", mean, least=0), settings.colors("image_std", std, least=1e-3)
    rules = ImageRules(
        mean=mean,
        std=std,
        resample=settings.count("resample", family.resample, least=_NEAREST, most=_HAMMING),
        placeholder=family.placeholder or family.token,
        token=family.token,
        text=family.text,
        max_tokens=max_tokens,
        shifts_positions=family.shifts_positions,
        **facts,
    )
    rules.layout(Size(1, 1))  # raises if images cannot have so few tokens
    return rules


# Texts


def framed(
    cut: Cut, tokens: list[tuple[int, int]], *, token: str, start: str = "", end: str = "", single: str = "", tile: str = "",
    row_end: str = "", thumbnail: str = "",
) -> tuple[str, tuple[int, ...]]:  # fmt: skip
    """Text around the tokens of an image, or around those of each tile and of the thumbnail."""
    runs = tuple(rows * columns for rows, columns in tokens)
    if len(tokens) == 1:
        return f"{start}{single}{token}{end}", runs
    rows = (
        "".join(tile.format(row, column) + token for column in range(1, cut.columns + 1))
        for row in range(1, cut.rows + 1)
    )
    last = "" if cut.thumbnail is None else thumbnail + token
    return start + "".join(row + row_end for row in rows) + last + end, runs


def by_rows(cut: Cut, tokens: list[tuple[int, int]]) -> tuple[str, tuple[int, ...]]:
    """A run for each row of tokens (Pixtral)."""
    ((rows, columns),) = tokens
    return "[IMG_BREAK]".join(["[IMG]"] * rows) + "[IMG_END]", (columns,) * rows


# Sizes


def within_pixels(
    size: Size, limit: int, *, multiple: int, least: int, smallest: int = 0, ratio: float = math.inf
) -> Cut:
    """Round sides to multiples, then scale so that the image has between `least` and `limit` pixels (Qwen2-VL, LFM2-VL)."""
    width, height = size
    if max(size) > ratio * min(size):
        raise ValueError(
            f"an image has {width} x {height} pixels; expected sides that differ by at most {ratio:.0f} times."
        )
    wide, high = (max(smallest, round(n / multiple)) * multiple for n in size)
    if wide * high > limit:
        shrink = math.sqrt(width * height / limit)
        wide, high = (max(1, math.floor(n / shrink / multiple)) * multiple for n in size)
    elif wide * high < (least := min(least, limit)):
        grow = math.sqrt(least / (width * height))
        wide, high = (math.ceil(n * grow / multiple) * multiple for n in size)
    return Cut((Size(wide, high),))


def within_longest(size: Size, limit: int, *, multiple: int) -> Cut:
    """Scale down so that no side exceeds `limit`, then round sides up to multiples (Pixtral)."""
    ratio = max(size) / limit
    if ratio > 1:
        size = Size(*(max(1, math.floor(n / ratio)) for n in size))
    return Cut((Size(*(math.ceil(n / multiple) * multiple for n in size)),))


def always(size: Size, limit: int, *, target: Size) -> Cut:
    """Every image has the same size (Gemma 3)."""
    return Cut((target,))


def within_tokens(size: Size, limit: int, *, multiple: int) -> Cut:
    """Scale to the largest size of at most `limit` tokens, in multiples (Gemma 4)."""
    width, height = size
    scale = math.sqrt(limit * multiple**2 / (width * height))
    columns, rows = (math.floor(scale * n / multiple) for n in size)
    if rows == 0:
        rows, columns = 1, max(1, min(width // height, limit))
    elif columns == 0:
        rows, columns = max(1, min(height // width, limit)), 1
    return Cut((Size(columns * multiple, rows * multiple),))


def tiled(size: Size, limit: int, *, tile: int, split: bool) -> Cut:
    """Scale the longest side to `limit`, enlarge to multiples of `tile`, and cut; the thumbnail is one tile (SmolVLM)."""
    width, height = _longest_side(size, limit)
    sizes = Size(width, height), Size(tile, tile)
    if not split:
        return Cut(sizes)
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    if rows == columns == 1:
        return Cut(sizes)
    return Cut((sizes[0], Size(columns * tile, rows * tile)), rows, columns, sizes[1], thumbnail_of_resized=True)


def _longest_side(size: Size, longest: int) -> Size:
    """The size whose longest side is `longest`, at most 4,096, and whose other side is even."""
    wide = size.width >= size.height
    ratio = size.width / size.height
    short = int(longest / ratio if wide else longest * ratio)
    short = max(short + short % 2, 1)
    size = Size(longest, short) if wide else Size(short, longest)
    if longest > 4096:
        ratio = size.width / size.height
        size = Size(4096, max(int(4096 / ratio), 1)) if wide else Size(max(int(4096 * ratio), 1), 4096)
    return size


def tiled_by_shape(
    size: Size, limit: int, *, multiple: int, least: int, most: int, tile: int, min_tiles: int, max_tiles: int, tolerance: float,
    thumbnail: bool,
) -> Cut:  # fmt: skip
    """One tile of `least` to `most` tokens; a larger image becomes tiles in the closest shape (LFM2-VL)."""
    area, tile_tokens, whole_tokens = multiple**2, (tile // multiple) ** 2, min(most, limit)
    whole = within_pixels(size, whole_tokens * area, multiple=multiple, least=least * area, smallest=1)
    if math.prod(whole.sizes[0]) > max(most * area, tile**2):
        raise ValueError(f"an image has {size.width} x {size.height} pixels, which is too flat for this model.")
    max_tiles = min(max_tiles, (limit - most * thumbnail) // tile_tokens)
    wide, high = (max(multiple // 2, round(n / multiple) * multiple) for n in size)
    if wide * high <= most * area * tolerance or max_tiles < max(2, min_tiles):
        return whole
    best, difference = (1, 1), math.inf
    for shape in _shapes(min_tiles, max_tiles):
        new = abs(size.width / size.height - shape[0] / shape[1])
        if new < difference or (new == difference and math.prod(size) > 0.5 * tile**2 * math.prod(shape)):
            best, difference = shape, new
    columns, rows = best
    return Cut((Size(columns * tile, rows * tile),), rows, columns, whole.sizes[0] if thumbnail else None)


@cache
def _shapes(least: int, most: int) -> list[tuple[int, int]]:
    """Columns and rows of tiles. Ties are broken by the order of Python's sets, as in transformers."""
    every = range(least, most + 1)
    shapes = {(w, h) for n in every for w in range(1, n + 1) for h in range(1, n + 1) if least <= w * h <= most}
    return sorted(shapes, key=math.prod)


# Families


class _Fields:
    """The fields of a JSON file. As in transformers, null means absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, name: str, default: Any) -> Any:
        return default if (value := self.values.get(name)) is None else value

    def object(self, name: str, default: Mapping[str, Any] | None = None) -> "_Fields":
        value = self.get(name, default or {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return _Fields(value, f"{self.where}: {name}")

    def count(self, name: str, default: int | None, least: int = 1, most: int = MAX_PIXELS) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"an integer from {least} to {most}")
        return value

    def colors(self, name: str, default: tuple[float, ...], least: float) -> tuple[float, ...]:
        value = self.get(name, list(default))
        if not isinstance(value, list) or len(value) != 3 or not all(_is_number(x) and least <= x <= 1 for x in value):
            raise self.wrong(name, value, f"3 numbers from {least} to 1")
        return tuple(map(float, value))

    def expect(self, name: str, expected: Any, reason: str) -> None:
        if (found := self.get(name, expected)) != expected:
            raise self.wrong(name, found, f"{expected!r}: {reason}")

    def wrong(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {str(value)[:100]!r}; expected {expected}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Settings of processors that change pixels or sizes: the one value that is implemented.
_ONLY = {
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_center_crop": False, "do_pan_and_scan": False,
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """A family's row: fields of ImageRules, and defaults of its processor."""

    facts: Callable[
        [_Fields, _Fields, _Fields], dict[str, Any]
    ]  # by the processor's settings, config.json and vision_config
    token: str
    text: Text
    resample: int
    colors: tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation
    placeholder: str | None = None  # None: the token
    shifts_positions: bool = False
    ignored: tuple[str, ...] = ()  # settings that the family's processor does not look at


def _sides(
    settings: _Fields, patch: tuple[_Fields, str, int], merge: tuple[_Fields, str, int], names: tuple[str, ...] = ()
) -> dict[str, int]:
    """Pixels of a patch's side and patches of a token's side, from config.json; the processor's settings agree."""
    sides = {"patch_size": patch[0].count(*patch[1:], most=1024), "merge": merge[0].count(*merge[1:], most=64)}
    for name, value in zip(names, sides.values(), strict=False):
        settings.expect(name, value, "config.json has this value")
    return sides


def _divided(fields: _Fields, name: str, by: int) -> int:
    """A field that is a multiple of the pixels of a token's side."""
    if (value := fields.count(name, None)) % by:
        raise fields.wrong(name, value, f"a multiple of {by}")
    return value


def _qwen(settings: _Fields, config: _Fields, vision: _Fields, patch_size: int = 16) -> dict[str, Any]:
    sides = _sides(
        settings, (vision, "patch_size", patch_size), (vision, "spatial_merge_size", 2), ("patch_size", "merge_size")
    )
    size = settings.object("size", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})  # pixels
    least = (
        size.count("shortest_edge", None)
        if settings.get("min_pixels", None) is None
        else settings.count("min_pixels", None)
    )
    most = (
        size.count("longest_edge", None)
        if settings.get("max_pixels", None) is None
        else settings.count("max_pixels", None)
    )
    return sides | {
        "cut": partial(within_pixels, multiple=math.prod(sides.values()), least=least, ratio=200),
        "limit": most,
    }


def _gemma3(settings: _Fields, config: _Fields, vision: _Fields) -> dict[str, Any]:
    size, patch_size = settings.object("size", {"height": 224, "width": 224}), vision.count("patch_size", 16, most=1024)
    tokens = math.isqrt(config.count("mm_tokens_per_image", 256))  # of a side
    side = _divided(size, "height", patch_size * tokens)
    size.expect("width", side, "an image is a square")
    cut = partial(always, target=Size(side, side))
    return {"patch_size": patch_size, "merge": side // patch_size // tokens, "cut": cut, "limit": 1}


def _pixtral(settings: _Fields, config: _Fields, vision: _Fields) -> dict[str, Any]:
    sides = _sides(settings, (vision, "patch_size", 16), (config, "spatial_merge_size", 2))
    longest = settings.object("size", {"longest_edge": 1024}).count("longest_edge", None)
    return sides | {"cut": partial(within_longest, multiple=math.prod(sides.values())), "limit": longest}


def _gemma4(settings: _Fields, config: _Fields, vision: _Fields, whole_tokens: bool = False) -> dict[str, Any]:
    names = "patch_size", "pooling_kernel_size"
    sides = _sides(settings, (vision, names[0], 16), (vision, names[1], 3), names)
    multiple = math.prod(sides.values())
    if whole_tokens:  # no tower: a patch is a token
        sides = {"patch_size": multiple, "merge": 1}
    limit = settings.count("max_soft_tokens", 280, most=10_000)
    return sides | {"cut": partial(within_tokens, multiple=multiple), "limit": limit}


def _smolvlm(settings: _Fields, config: _Fields, vision: _Fields) -> dict[str, Any]:
    sides = _sides(settings, (vision, "patch_size", 32), (config, "scale_factor", 2))
    tile = _divided(settings.object("max_image_size", {"longest_edge": 364}), "longest_edge", math.prod(sides.values()))
    longest = settings.object("size", {"longest_edge": 4 * 364}).count("longest_edge", None)
    split = bool(settings.get("do_image_splitting", True))
    return sides | {"cut": partial(tiled, tile=tile, split=split), "limit": longest}


def _lfm2(settings: _Fields, config: _Fields, vision: _Fields) -> dict[str, Any]:
    names = "encoder_patch_size", "downsample_factor"
    sides = _sides(settings, (vision, "patch_size", 16), (config, names[1], 2), names)
    multiple = math.prod(sides.values())
    tile = _divided(_Fields({"tile_size": settings.get("tile_size", 512)}, settings.where), "tile_size", multiple)
    least, most = settings.count("min_image_tokens", 64), settings.count("max_image_tokens", 256, most=10_000)
    max_tiles = settings.count("max_tiles", 10, most=64) if settings.get("do_image_splitting", True) else 1
    thumbnail, tolerance = bool(settings.get("use_thumbnail", True)), settings.get("max_pixels_tolerance", 2.0)
    if not _is_number(tolerance):
        raise settings.wrong("max_pixels_tolerance", tolerance, "a number")
    cut = partial(
        tiled_by_shape, multiple=multiple, least=least, most=most, tile=tile, min_tiles=settings.count("min_tiles", 2),
        max_tiles=max_tiles, tolerance=tolerance, thumbnail=thumbnail,
    )  # fmt: skip
    return sides | {"cut": cut, "limit": most + max_tiles * (tile // multiple) ** 2}


_PAD = partial(framed, token="<|image_pad|>")
_QWEN = _Family(_qwen, "<|image_pad|>", _PAD, _BICUBIC, _CLIP, shifts_positions=True)
_GEMMA_4_TEXT = partial(framed, token="<|image|>", start="<|image>", end="<image|>")
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "qwen2_5_vl": replace(_QWEN, facts=partial(_qwen, patch_size=14)),
    "gemma3": _Family(
        _gemma3, "<image_soft_token>",
        partial(framed, token="<image_soft_token>", start="\n\n<start_of_image>", end="<end_of_image>\n\n"),
        _BILINEAR, _HALF, placeholder="<start_of_image>",
    ),
    "mistral3": _Family(_pixtral, "[IMG]", by_rows, _BICUBIC, _CLIP),
    "gemma4": _Family(_gemma4, "<|image|>", _GEMMA_4_TEXT, _BICUBIC, _PLAIN),
    "gemma4_unified": _Family(partial(_gemma4, whole_tokens=True), "<|image|>", _GEMMA_4_TEXT, _BICUBIC, _PLAIN),
    "smolvlm": _Family(
        _smolvlm, "<image>",
        partial(
            framed, token="<image>", single="<fake_token_around_image><global-img>", end="<fake_token_around_image>",
            tile="<fake_token_around_image><row_{}_col_{}>", row_end="\n", thumbnail="\n<fake_token_around_image><global-img>",
        ),
        _LANCZOS, _HALF,
    ),
    "lfm2_vl": _Family(
        _lfm2, "<image>",
        partial(
            framed, token="<image>", start="<|image_start|>", end="<|image_end|>", tile="<|img_row_{}_col_{}|>",
            thumbnail="<|img_thumbnail|>",
        ),
        _BILINEAR, _HALF, ignored=("do_resize",),
    ),
}  # fmt: skip
