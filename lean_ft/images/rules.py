"""Images of a row: read, resized and cut into patches as the model family's processor does, with Pillow and NumPy alone.

The number of an image's tokens depends on its size alone, which its header has. So rows are measured, packed and planned
without decoding an image, and worker processes decode each image when its batch is built.

Shapes: P patches of an image, C = 3 channels, p pixels of a patch's side.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lean_ft.images.reading import Size
from lean_ft.system.whole_files import read_json


@dataclass(frozen=True)
class ImageLayout:
    """What an image of a given size becomes."""

    grids: tuple[tuple[int, int], ...]
    """Rows and columns of patches of the image, or of each of its tiles in order."""
    text: str
    """What replaces the placeholder in a rendered chat."""
    runs: tuple[int, ...]
    """How often each image token in `text` is repeated. Their sum is the number of embeddings."""


@dataclass(frozen=True)
class ImageRules:
    """How a family prepares an image."""

    patch_size: int
    merge: int  # patches of the side of the square that one token of the decoder sees
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int  # a filter of Pillow
    resized: Callable[[Size], Size]
    text: Callable[[int, int], tuple[str, list[int]]]
    placeholder: str  # in a rendered chat
    token: str  # the image token

    def layout(self, size: Size) -> ImageLayout:
        """What an image of this size becomes. Raises ValueError for a size that the family refuses."""
        resized = self.resized(size)
        rows, columns = resized.height // self.patch_size, resized.width // self.patch_size
        text, runs = self.text(rows // self.merge, columns // self.merge)
        return ImageLayout(((rows, columns),), text, tuple(runs))

    def patches(self, image: Image.Image) -> np.ndarray:
        """The patches (P, C, p, p) of an upright RGB image as bytes, in blocks of `merge` x `merge`, tile after tile."""
        side, merge = self.patch_size, self.merge
        pixels = np.asarray(image.resize(self.resized(Size(*image.size)), self.resample))  # (height, width, C)
        rows, columns = (n // (side * merge) for n in pixels.shape[:2])
        blocks = pixels.reshape(rows, merge, side, columns, merge, side, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, side, side)


def image_rules(folder: Path, max_tokens: int | None = None) -> ImageRules:
    """The rules of a model folder, from config.json and preprocessor_config.json or processor_config.json.

    max_tokens: scale larger images down to this number of tokens. Raises ValueError if the model reads no images, or if lean_ft
    does not know how it prepares them.
    """
    model_type = read_json(folder / "config.json").get("model_type")
    processor = read_json(folder / "preprocessor_config.json")
    return _FAMILIES[model_type](processor)


def within_pixels(size: Size, multiple: int, least: int, most: int) -> Size:
    """The size rounded to multiples, scaled so that it has between `least` and `most` pixels (Qwen2-VL)."""
    width, height = size
    if max(size) > 200 * min(size):
        raise ValueError(f"an image has {width} x {height} pixels; expected sides that differ by at most 200 times.")
    wide, high = (round(n / multiple) * multiple for n in size)
    if wide * high > most:
        shrink = math.sqrt(width * height / most)
        wide, high = (max(multiple, math.floor(n / shrink / multiple) * multiple) for n in size)
    elif wide * high < least:
        grow = math.sqrt(least / (width * height))
        wide, high = (math.ceil(n * grow / multiple) * multiple for n in size)
    return Size(wide, high)


def within_longest(size: Size, multiple: int, longest: int) -> Size:
    """The size scaled so that no side exceeds `longest`, rounded up to multiples (Pixtral)."""
    ratio = max(max(size) / longest, 1.0)
    return Size(*(((math.floor(n / ratio) if ratio > 1 else n) - 1) // multiple * multiple + multiple for n in size))


def _qwen(processor: Mapping[str, Any]) -> ImageRules:
    side, merge, size = processor["patch_size"], processor["merge_size"], processor["size"]
    least, most = size["shortest_edge"], size["longest_edge"]
    return ImageRules(
        side, merge, tuple(processor["image_mean"]), tuple(processor["image_std"]), processor["resample"],
        resized=lambda size: within_pixels(size, side * merge, least, most),
        text=lambda rows, columns: ("<|image_pad|>", [rows * columns]),
        placeholder="<|image_pad|>", token="<|image_pad|>",
    )  # fmt: skip


def _gemma3(processor: Mapping[str, Any]) -> ImageRules:
    size = Size(processor["size"]["width"], processor["size"]["height"])
    return ImageRules(
        14, 4, tuple(processor["image_mean"]), tuple(processor["image_std"]), processor["resample"],
        resized=lambda _: size,
        text=lambda rows, columns: ("\n\n<start_of_image><image_soft_token><end_of_image>\n\n", [rows * columns]),
        placeholder="<start_of_image>", token="<image_soft_token>",
    )  # fmt: skip


def _pixtral(processor: Mapping[str, Any]) -> ImageRules:
    side, merge = processor["patch_size"]["height"], processor.get("spatial_merge_size", 2)
    longest = processor["size"]["longest_edge"]
    return ImageRules(
        side, merge, tuple(processor["image_mean"]), tuple(processor["image_std"]), processor["resample"],
        resized=lambda size: within_longest(size, side * merge, longest),
        text=lambda rows, columns: ("[IMG_BREAK]".join(["[IMG]"] * rows) + "[IMG_END]", [columns] * rows),
        placeholder="[IMG]", token="[IMG]",
    )  # fmt: skip


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], ImageRules]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen3_5_moe"), _qwen),
    "gemma3": _gemma3,
    "mistral3": _pixtral,
}
