"""Image processors of transformers for one image at a time, and the text that its processors write.

Its image processors for LFM2-VL and Gemma 4 (unified) exist in a torchvision form alone. They run here with Pillow's
resize in place of torchvision's, and PixtralProcessor with an empty torchvision.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TILES: dict[str, Any] = {
    "tile_size": 128, "min_tiles": 2, "max_tiles": 6, "min_image_tokens": 4, "max_image_tokens": 16,
    "encoder_patch_size": 16,
    "downsample_factor": 2, "use_thumbnail": True,
}  # fmt: skip
# By model type: fields of config.json, settings of the image processor, transformers' processor, and its image
# processor.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "qwen3_vl": (
        {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
        {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}, **HALF},
        "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    ),
    "qwen2_5_vl": (
        {"vision_config": {"patch_size": 14}},
        {"min_pixels": 56 * 56, "max_pixels": 448 * 448},
        "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    ),
    "gemma3": (
        {"vision_config": {"patch_size": 14, "image_size": 112}, "mm_tokens_per_image": 4},
        {"size": {"height": 112, "width": 112}, "do_pan_and_scan": None},
        "gemma3.processing_gemma3.Gemma3Processor", "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
    ),
    "mistral3": (
        {"vision_config": {"patch_size": 14}},
        {"size": {"longest_edge": 448}, "patch_size": 28, "do_pad": False},
        "pixtral.processing_pixtral.PixtralProcessor", "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
    ),
    "gemma4": (
        {"vision_config": {}},
        {"max_soft_tokens": 70},
        "gemma4.processing_gemma4.Gemma4Processor", "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
    ),
    "gemma4_unified": (
        {"vision_config": {}},
        {"max_soft_tokens": 70},
        "gemma4_unified.processing_gemma4_unified.Gemma4UnifiedProcessor",
        "gemma4_unified.image_processing_gemma4_unified.Gemma4UnifiedImageProcessor",
    ),
    "smolvlm": (
        {"vision_config": {"patch_size": 14}},
        # As in SmolVLM2, a tile has pixels behind its last patch.
        {"max_image_size": {"longest_edge": 118}, "size": {"longest_edge": 472}, "return_row_col_info": True},
        "smolvlm.processing_smolvlm.SmolVLMProcessor", "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
    ),
    "lfm2_vl": (
        {"vision_config": {}},
        TILES | {"do_resize": False},
        "lfm2_vl.processing_lfm2_vl.Lfm2VlProcessor", "lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor",
    ),
}  # fmt: skip
GEMMA_4 = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
# Attributes of the processors, which they take from their tokenizers and settings.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"image_token": "<|image_pad|>"},
    "qwen2_5_vl": {"image_token": "<|image_pad|>"},
    "gemma3": {"full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"},
    "mistral3": {
        "patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
    "gemma4": GEMMA_4,
    "gemma4_unified": GEMMA_4,
    "smolvlm": {
        "fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "global_image_token": "<global-img>",
        "image_seq_len": 16,
    },
    "lfm2_vl": {
        "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
}  # fmt: skip


def write_folder(folder: Path, family: str, settings: dict[str, Any] | None = None, nested: bool = False) -> Path:
    """A model folder. `nested`: the image settings are inside processor_config.json, as transformers 5 writes them."""
    config, usual, *_ = FAMILIES[family]
    settings = usual if settings is None else settings
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    name, content = (
        ("processor_config.json", {"image_processor": settings}) if nested else ("preprocessor_config.json", settings)
    )
    (folder / name).write_text(json.dumps(content))
    return folder


@contextmanager
def empty_torchvision() -> Iterator[None]:
    """Where torchvision is not installed, make modules of transformers importable that import it."""
    import_module("transformers.image_processing_backends")  # first learns that there is no torchvision
    import_module("transformers.models.auto")
    before, names = set(sys.modules), ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    for name in names:
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules[names[-1]].functional = SimpleNamespace(InterpolationMode=int)  # type: ignore[attr-defined]
    yield
    for name in set(sys.modules) - before:
        if any(part in name for part in ("torchvision", ".pixtral", ".lfm2_vl", ".gemma4_unified")):
            del sys.modules[name]


class TheirProcessor:
    """Prepares an image as transformers does."""

    def __init__(self, family: str, settings: dict[str, Any] | None = None) -> None:
        _, usual, processor, image_processor = FAMILIES[family]
        self.family, self.settings = family, usual if settings is None else settings
        self.images, self.texts = _part(image_processor), object.__new__(_part(processor))
        images = SimpleNamespace(**{"merge_size": 2, **TILES, **self.settings})
        self.texts.__dict__ |= ATTRIBUTES[family] | {"image_processor": images}
        if image_processor.endswith("Pil"):
            self.images = self.images(**self.settings)
        else:
            backend, module = self.images.__mro__[1], sys.modules[self.images.__module__]
            backend.resize = lambda self, images, size, **settings: _resized(images, size, **settings)
            module.tvF = SimpleNamespace(resize=_resized)  # type: ignore[attr-defined]
            self.images = object.__new__(self.images)

    def __call__(self, image: Image.Image) -> tuple[list[np.ndarray], str]:
        """The normalized pixels (3, height, width) of each tile, and the text that replaces the placeholder."""
        found, tiles = getattr(self, f"_{self.family}", self._tiles)(image)
        extra = {"use_image_special_tokens": True} if self.family == "lfm2_vl" else {}
        return tiles, self.texts.replace_image_token(found, 0, **extra)

    def _tiles(self, image: Image.Image) -> Any:
        found = self.images(image, return_tensors="np")
        pixels = np.asarray(found["pixel_values"])
        return found, list(pixels.reshape(-1, *pixels.shape[-3:]))

    def _smolvlm(self, image: Image.Image) -> Any:
        found, tiles = self._tiles(image)
        ends = [n - n % 14 for n in tiles[0].shape[1:]]
        return found, [tile[:, : ends[0], : ends[1]] for tile in tiles]

    def _qwen3_vl(self, image: Image.Image) -> Any:
        found, side = self.images(image, return_tensors="np"), self.images.patch_size
        _, rows, columns = found["image_grid_thw"][0]
        blocks = found["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)
        assert np.array_equal(blocks[:, :, :, :, :, 0], blocks[:, :, :, :, :, 1])  # two equal frames
        return found, [blocks[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)]

    _qwen2_5_vl = _qwen3_vl

    def _gemma4(self, image: Image.Image) -> Any:
        found = self.images(image, return_tensors="np")
        return found, [_from_patches(found, 16)]

    def _gemma4_unified(self, image: Image.Image) -> Any:
        found = self.images._preprocess(
            [_as_tensor(image)], True, 3, False, 1.0, False, None, None, None, 16, self.settings["max_soft_tokens"], 3
        )  # fmt: skip
        return found, [_from_patches(found, 48) / 255]

    def _lfm2_vl(self, image: Image.Image) -> Any:
        names = {name: value for name, value in self.settings.items() if name not in ("tile_size", "do_resize")}
        settings = {**names, "tile_size": self.settings["tile_size"], "max_pixels_tolerance": 2.0, "resample": 2}
        if not settings.pop("do_image_splitting", True):
            settings |= {"min_tiles": 1, "max_tiles": 1}
        found, rows, columns, sizes = self.images.resize_and_split(_as_tensor(image)[None], **settings)
        tiles = [np.asarray(tile).reshape(3, *tile.shape[-2:]) / 127.5 - 1 for tile in found[0]]
        if tiles[-1].size > 3 * 128**2:  # it pads to this number of patches
            raise ValueError("too many patches")
        return {"image_rows": rows, "image_cols": columns, "image_sizes": sizes}, tiles


def _part(place: str) -> Any:
    module, name = place.rsplit(".", 1)
    return getattr(import_module(f"transformers.models.{module}"), name)


def _as_tensor(image: Image.Image) -> torch.Tensor:
    from transformers.image_transforms import convert_to_rgb

    return torch.tensor(convert_to_rgb(image, return_numpy=True)).permute(2, 0, 1)


def _resized(images: torch.Tensor, size: Any, **settings: Any) -> torch.Tensor:
    """Images (..., 3, height, width) of bytes, resized by Pillow."""
    height, width = (size.height, size.width) if hasattr(size, "height") else size
    resample, batch = settings.get("resample", settings.get("interpolation")), images.reshape(-1, *images.shape[-3:])
    resized = [Image.fromarray(image.permute(1, 2, 0).numpy()).resize((width, height), resample) for image in batch]
    return torch.stack([_as_tensor(image) for image in resized]).reshape(*images.shape[:-2], height, width)


def _from_patches(found: Any, side: int) -> np.ndarray:
    """The image of Gemma 4's patches (P, side * side * 3)."""
    places = np.asarray(found["image_position_ids"][0])
    real = places[:, 0] >= 0
    columns, rows = places[real].max(axis=0) + 1
    pixels = np.asarray(found["pixel_values"][0])[real].reshape(rows, columns, side, side, 3)
    return pixels.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)
