"""How images are resized and cut: one function per rule of a family's processor, by an image's size and a limit.

A lower limit gives an image fewer tokens. Left out: pan-and-scan (Gemma 3).

Source: `image_processing_*.py` of each family in transformers 5.23.
"""

import math
from functools import cache
from typing import NamedTuple


class Size(NamedTuple):
    width: int
    height: int


class Tiling(NamedTuple):
    """An image is resized to each of `sizes` in turn, then cut into rows and columns of equal tiles."""

    sizes: tuple[Size, ...]
    rows: int = 1
    columns: int = 1
    thumbnail: Size | None = None  # one more tile: the whole image in this size
    thumbnail_of_resized: bool = False  # the thumbnail is made from the resized image


def always(size: Size, limit: int, *, target: Size) -> Tiling:
    """Every image has the same size (Gemma 3)."""
    return Tiling((target,))


def within_pixels(
    size: Size, limit: int, *, multiple: int, least: int, smallest: int = 0, ratio: float = math.inf
) -> Tiling:
    """Round sides to multiples, then scale to between `least` and `limit` pixels (Qwen-VL).

    Raises ValueError if the sides differ by more than `ratio` times.
    """
    width, height = size
    if max(size) > ratio * min(size):
        raise ValueError(
            f"an image has {width} x {height} pixels; expected sides that differ by at most {ratio} times."
        )
    wide, high = (max(smallest, round(n / multiple)) * multiple for n in size)
    if wide * high > limit:
        shrink = math.sqrt(width * height / limit)
        wide, high = (max(1, math.floor(n / shrink / multiple)) * multiple for n in size)
    elif wide * high < (least := min(least, limit)):
        grow = math.sqrt(least / (width * height))
        wide, high = (math.ceil(n * grow / multiple) * multiple for n in size)
    return Tiling((Size(wide, high),))


def within_longest(size: Size, limit: int, *, multiple: int) -> Tiling:
    """Scale down so that no side exceeds `limit`, then round sides up to multiples (Pixtral)."""
    ratio = max(size) / limit
    sides = (max(1, math.floor(n / ratio)) if ratio > 1 else n for n in size)
    return Tiling((Size(*(math.ceil(n / multiple) * multiple for n in sides)),))


def within_tokens(size: Size, limit: int, *, multiple: int) -> Tiling:
    """Scale to the largest multiples that have at most `limit` tokens (Gemma 4)."""
    width, height = size
    scale = math.sqrt(limit * multiple**2 / (width * height))
    columns, rows = (math.floor(scale * n / multiple) for n in size)
    if rows == 0:
        rows, columns = 1, max(1, min(width // height, limit))
    elif columns == 0:
        rows, columns = max(1, min(height // width, limit)), 1
    return Tiling((Size(columns * multiple, rows * multiple),))


def tiled(size: Size, limit: int, *, tile: int, split: bool) -> Tiling:
    """Scale the longest side to `limit`, enlarge to multiples of a tile, and cut; the thumbnail is one tile
    (SmolVLM)."""
    width, height = scaled = _with_longest(size, limit)
    ratio, one = width / height, Size(tile, tile)
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    if not split or rows == columns == 1:
        return Tiling((scaled, one))
    return Tiling((scaled, Size(columns * tile, rows * tile)), rows, columns, one, thumbnail_of_resized=True)


def _with_longest(size: Size, longest: int) -> Size:
    """The size whose longest side is `longest` and whose other side is even; 4,096 is the most."""
    width, height = size
    ratio = width / height
    short = int(longest / ratio if width >= height else longest * ratio)
    short = max(1, short + short % 2)
    width, height = (longest, short) if width >= height else (short, longest)
    if max(width, height) > 4096:
        ratio = width / height
        width, height = (4096, int(4096 / ratio)) if width >= height else (int(4096 * ratio), 4096)
    return Size(max(1, width), max(1, height))


class Tiles(NamedTuple):
    """Tiles of `tiled_by_shape`."""

    patch_size: int
    multiple: int  # pixels of a token's side
    least: int  # tokens of an image that is one tile
    most: int
    tile: int  # pixels of a tile's side
    min_tiles: int
    max_tiles: int
    thumbnail: bool


def tiled_by_shape(size: Size, limit: int, *, tiles: Tiles) -> Tiling:
    """One tile of `least` to `most` tokens; a larger image becomes tiles, in the shape closest to its own (LFM2-VL).

    `limit` is a number of tokens. Raises ValueError for an image so flat that its tile has too many tokens.
    """
    patch_size, multiple, least, most, tile, min_tiles, max_tiles, thumbnail = tiles
    area, ratio = multiple**2, size.width / size.height
    whole = within_pixels(size, min(most, limit) * area, multiple=multiple, least=least * area, smallest=1)
    if math.prod(whole.sizes[0]) > max(most * area, tile**2):
        raise ValueError(f"an image has {size.width} x {size.height} pixels, which is too flat for this model.")
    max_tiles = min(max_tiles, (limit - most * thumbnail) * area // tile**2)
    rounded = (max(patch_size, round(n / multiple) * multiple) for n in size)
    if math.prod(rounded) <= 2 * most * area or max_tiles < max(2, min_tiles):
        return whole
    best, difference = (1, 1), math.inf
    for shape in _shapes(min_tiles, max_tiles):
        new = abs(ratio - shape[0] / shape[1])
        if new < difference or (new == difference and math.prod(size) > 0.5 * tile**2 * math.prod(shape)):
            best, difference = shape, new
    columns, rows = best
    small = whole.sizes[0] if thumbnail and rows * columns > 1 else None
    return Tiling((Size(columns * tile, rows * tile),), rows, columns, small)


@cache
def _shapes(least: int, most: int) -> list[tuple[int, int]]:
    """Columns and rows of tiles. As in transformers, the order of Python's sets breaks ties."""
    every = range(least, most + 1)
    shapes = {(w, h) for n in every for w in range(1, n + 1) for h in range(1, n + 1) if least <= w * h <= most}
    return sorted(shapes, key=math.prod)
