"""Sizes, texts and pixels equal those of the processors of transformers.

Its image processors for LFM2-VL and Gemma 4 (unified) exist in a torchvision form alone: they run here with Pillow's resize in
place of torchvision's.
"""

import io
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from lean_ft.images.reading import Size, decoded, open_image, reference, size_of
from lean_ft.images.rules import ImageLayout, ImageRules, image_rules
from tests.images.pictures import odd_picture

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN_SIZE = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}
TILES = {
    "tile_size": 128, "min_tiles": 2, "max_tiles": 6, "min_image_tokens": 4, "max_image_tokens": 16, "encoder_patch_size": 16,
    "downsample_factor": 2, "use_thumbnail": True, "max_pixels_tolerance": 2.0,
}  # fmt: skip
# By model type: fields of config.json, and the settings of the processor.
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
        {"patch_size": 16, "merge_size": 2, "size": QWEN_SIZE, **HALF},
    ),
    "qwen2_5_vl": ({"vision_config": {"patch_size": 14}}, {"min_pixels": 56 * 56, "max_pixels": 448 * 448}),
    "gemma3": (
        {"vision_config": {"patch_size": 14}, "mm_tokens_per_image": 4},
        {"size": {"height": 112, "width": 112}, "do_pan_and_scan": None},
    ),
    "mistral3": (
        {"vision_config": {"patch_size": 14}},
        {"size": {"longest_edge": 448}, "patch_size": 28, "do_pad": False},
    ),
    "gemma4": ({"vision_config": {}}, {"max_soft_tokens": 70}),
    "gemma4_unified": ({"vision_config": {}}, {"max_soft_tokens": 70}),
    "smolvlm": (
        {"vision_config": {"patch_size": 14}},
        {"max_image_size": {"longest_edge": 112}, "size": {"longest_edge": 448}, "return_row_col_info": True},
    ),
    "lfm2_vl": ({"vision_config": {}}, TILES | {"do_resize": False}),
}
# Where transformers' processors and their image processors for Pillow are.
PROCESSORS = {
    "qwen3_vl": ("qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor", "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VL"),
    "qwen2_5_vl": (
        "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VL",
    ),
    "gemma3": ("gemma3.processing_gemma3.Gemma3Processor", "gemma3.image_processing_pil_gemma3.Gemma3"),
    "mistral3": ("pixtral.processing_pixtral.PixtralProcessor", "pixtral.image_processing_pil_pixtral.Pixtral"),
    "gemma4": ("gemma4.processing_gemma4.Gemma4Processor", "gemma4.image_processing_pil_gemma4.Gemma4"),
    "gemma4_unified": ("gemma4_unified.processing_gemma4_unified.Gemma4UnifiedProcessor", None),
    "smolvlm": ("smolvlm.processing_smolvlm.SmolVLMProcessor", "smolvlm.image_processing_pil_smolvlm.SmolVLM"),
    "lfm2_vl": ("lfm2_vl.processing_lfm2_vl.Lfm2VlProcessor", None),
}
# Attributes that the processors take from their tokenizers and settings.
NAMES = {
    "gemma3": {"full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"},
    "mistral3": {
        "patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
    "gemma4": {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    "gemma4_unified": {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    "smolvlm": {
        "fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "global_image_token": "<global-img>",
        "image_seq_len": 16,
    },
    "lfm2_vl": {
        "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
    "qwen3_vl": {"image_token": "<|image_pad|>"}, "qwen2_5_vl": {"image_token": "<|image_pad|>"},
}  # fmt: skip


def write_folder(folder: Path, family: str, nested: bool = False, **changes: Any) -> Path:
    config, settings = FOLDERS[family]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    settings = {**settings, **changes}
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (folder / name).write_text(json.dumps({"image_processor": settings} if nested else settings))
    return folder


@pytest.fixture(scope="module")
def torchvision() -> Iterator[None]:
    """An empty torchvision, where there is none, so that transformers' modules can be imported; and Pillow's resize."""
    import_module("transformers.image_processing_backends")  # first learns that there is no torchvision
    import_module("transformers.models.auto")
    before, names = set(sys.modules), ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    for name in names:
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=int)  # type: ignore[attr-defined]
    yield
    for name in set(sys.modules) - before:
        if name.startswith("torchvision") or ".pixtral" in name or ".lfm2_vl" in name or ".gemma4_unified" in name:
            del sys.modules[name]


def resized_by_pillow(images: torch.Tensor, size: Any, **settings: Any) -> torch.Tensor:
    """Resize (..., 3, height, width) bytes."""
    height, width = (size.height, size.width) if hasattr(size, "height") else size
    resample = settings.get("resample", settings.get("interpolation"))
    batch = images.reshape(-1, *images.shape[-3:])
    pictures = [
        Image.fromarray(np.asarray(image.permute(1, 2, 0))).resize((width, height), resample) for image in batch
    ]
    stacked = torch.stack([torch.tensor(np.asarray(picture)).permute(2, 0, 1) for picture in pictures])
    return stacked.reshape(*images.shape[:-2], height, width)


def part(place: str) -> Any:
    module, name = place.rsplit(".", 1)
    return getattr(import_module(f"transformers.models.{module}"), name)


def their_processor(family: str) -> Callable[[Image.Image], tuple[dict[str, Any], list[np.ndarray]]]:
    """The processor of transformers: what its image processor returns, and the pixels (3, height, width) of each tile."""
    settings = FOLDERS[family][1]
    if family == "lfm2_vl":
        processor = object.__new__(part("lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor"))
        base = type(processor).__mro__[1]
        base.resize = lambda self, image, size, **settings: resized_by_pillow(image, size, **settings)

        def split(image: Image.Image) -> Any:
            pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None]
            names = set(TILES) & {"min_tiles", "max_tiles", *TILES}
            found, rows, columns, sizes = processor.resize_and_split(pixels, **{k: TILES[k] for k in names}, resample=2)
            tiles = [np.asarray(tile).reshape(3, *tile.shape[-2:]) / 127.5 - 1 for tile in found[0]]
            if sum(tile[0].size for tile in tiles[-1:]) > 16 * 32**2:
                raise ValueError("more patches than the model has room for")
            return {"image_rows": rows, "image_cols": columns, "image_sizes": sizes}, tiles

        return split
    if family == "gemma4_unified":
        module = import_module("transformers.models.gemma4_unified.image_processing_gemma4_unified")
        module.tvF = SimpleNamespace(resize=resized_by_pillow)  # type: ignore[attr-defined]
        processor = object.__new__(module.Gemma4UnifiedImageProcessor)

        def merge(image: Image.Image) -> Any:
            pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)
            found = processor._preprocess(
                [pixels], True, 3, False, 1.0, False, None, None, None, patch_size=16, max_soft_tokens=70, pooling_kernel_size=3
            )  # fmt: skip
            return found, [_from_patches(found, 48)]

        return merge
    processor = part(f"{PROCESSORS[family][1]}ImageProcessorPil")(**settings)

    def process(image: Image.Image) -> Any:
        found = processor(image, return_tensors="np")
        pixels = found["pixel_values"]
        if family.startswith("qwen"):
            side, (_, rows, columns) = processor.patch_size, found["image_grid_thw"][0]
            blocks = pixels.reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)[:, :, :, :, :, 0]
            return found, [blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)]
        if family == "gemma4":
            return found, [_from_patches(found, 16)]
        return found, list(pixels.reshape(-1, *pixels.shape[-3:]))

    return process


def _from_patches(found: Any, side: int) -> np.ndarray:
    """The image of Gemma 4's patches (P, side * side * 3) in reading order."""
    places = np.asarray(found["image_position_ids"][0])
    real = places[:, 0] >= 0
    columns, rows = places[real].max(axis=0) + 1
    pixels = np.asarray(found["pixel_values"][0])[real].reshape(rows, columns, side, side, 3)
    pixels = pixels / 255 if pixels.max() > 1 else pixels
    return pixels.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)


def expanded(layout: ImageLayout, token: str) -> str:
    pieces = layout.text.split(token)
    assert len(pieces) == len(layout.runs) + 1
    return pieces[0] + "".join(token * run + piece for run, piece in zip(layout.runs, pieces[1:], strict=True))


def images_of(rules: ImageRules, patches: np.ndarray, layout: ImageLayout) -> list[np.ndarray]:
    """The normalized pixels (3, height, width) of each tile."""
    tiles, side, merge = [], rules.patch_size, rules.merge
    colors = (patches / 255 - np.reshape(rules.mean, (3, 1, 1))) / np.reshape(rules.std, (3, 1, 1))
    for rows, columns in layout.grids:
        tile, colors = colors[: rows * columns], colors[rows * columns :]
        tile = tile.reshape(rows // merge, columns // merge, merge, merge, 3, side, side)
        tiles.append(tile.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side))
    assert not len(colors)
    return tiles


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("family", FOLDERS)
@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_images_equal_those_of_transformers(tmp_path, family, number):
    rules, theirs = image_rules(write_folder(tmp_path, family)), their_processor(family)
    text_processor = part(PROCESSORS[family][0])
    names = SimpleNamespace(
        **NAMES[family], image_processor=SimpleNamespace(merge_size=2, use_thumbnail=True, **TILES_ONLY)
    )
    for name in (
        "_get_image_num_tokens",
        "_build_image_tokens",
        "_compute_tokens_per_tile",
        "_compute_tokens_for_image",
    ):
        if hasattr(text_processor, name):
            setattr(names, name, getattr(text_processor, name).__get__(names))
    refused = 0
    for i in range(number):
        encoded = odd_picture(i)
        with open_image(reference(encoded, tmp_path)) as image:
            size = size_of(image)
            upright = decoded(image)
        assert upright.size == size
        with Image.open(io.BytesIO(encoded)) as image:
            their_image = ImageOps.exif_transpose(image)
        if family in ("lfm2_vl", "gemma4_unified"):  # torchvision forms convert with the same function
            their_image = Image.fromarray(part_of_conversion(their_image))
        try:
            found, tiles = theirs(their_image)
        except Exception as error:
            refused += 1
            if family == "mistral3":  # a very flat image gets a height of 0 in transformers, and one patch here
                assert re.search(r"(height|width)=0|must be > 0", str(error))
                assert min(rules.layout(size).grids[0]) == rules.merge
            else:
                with pytest.raises(ValueError, match="differ by at most 200|too flat"):
                    rules.layout(size)
            continue
        layout = rules.layout(size)
        ours = images_of(rules, rules.patches(upright), layout)
        assert [tile.shape for tile in ours] == [tile.shape for tile in tiles], (i, size)
        assert max(np.abs(a - b).max() for a, b in zip(ours, tiles, strict=True)) < 1e-6, (i, size)
        arguments = {"use_image_special_tokens": True} if family == "lfm2_vl" else {}
        assert expanded(layout, rules.token) == text_processor.replace_image_token(names, found, 0, **arguments)
    assert refused <= number / 4


TILES_ONLY = {name: TILES[name] for name in ("tile_size", "downsample_factor", "encoder_patch_size")}


def part_of_conversion(image: Image.Image) -> np.ndarray:
    from transformers.image_transforms import convert_to_rgb

    return convert_to_rgb(image, return_numpy=True)
