"""Model folders, rows with images, and runs on them, for tests of training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from tests.data.image_folders import WRITTEN, make_folder
from tests.images.their_processors import FAMILIES, HALF
from tests.models.vision import documents

# Width and height that the processor keeps.
SIZES = {"qwen3_vl": [(96, 64), (64, 64), (64, 128), (96, 96)], "gemma3": [(112, 112)]}
QUESTIONS = ["What is this?", "Name the color.", "Is it red?", "And here?"]
ANSWERS = ["A cat.", "Blue, I think.", "No.", "A dog on a mat."]


def model_folder(family: str, folder: Path, **vision: Any) -> Path:
    """A random model of transformers with the tokenizer of `make_folder`, whose tokens are bytes."""
    tokenizer = make_folder(folder, family)
    case, (written, processor, *_), (_, control) = documents.CASES[family], FAMILIES[family], WRITTEN[family]
    image_id = tokenizer.convert_tokens_to_ids(image_token(family))
    ids = {"image_token_id": image_id, "image_token_index": image_id}
    if family.startswith("qwen"):
        start, end, _ = tokenizer.convert_tokens_to_ids(control)
        ids |= {"vision_start_token_id": start, "vision_end_token_id": end, "video_token_id": len(tokenizer)}
    vision = {"patch_size": processor.get("patch_size")} | written.get("vision_config", {}) | vision
    others = {"mm_tokens_per_image": written["mm_tokens_per_image"]} if "mm_tokens_per_image" in written else {}
    text = case.text | {"vocab_size": len(tokenizer)}
    case = replace(case, text=text, vision=case.vision | vision, others=case.others | others | ids)
    documents.reference(case).save_pretrained(folder)
    return folder


def image_token(family: str) -> str:
    return {"qwen3_vl": "<|image_pad|>", "qwen3_5": "<|image_pad|>", "gemma3": "<image_soft_token>"}[family]


def image_inputs(family: str, folder: Path, images: list[Image.Image], ids: Tensor) -> dict[str, Any]:
    """Arguments of transformers' model for images that need no resizing."""
    processor = HALF | json.loads((folder / "preprocessor_config.json").read_text())
    case = replace(documents.CASES[family], patch=processor.get("patch_size", 14), processor=processor)
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    kwargs = case.inputs(case, pixels, ids)
    image_id = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(image_token(family))
    is_image = (ids == image_id).int()
    return kwargs | {name: is_image for name in ("mm_token_type_ids", "token_type_ids") if name in kwargs}


def picture(family: str, number: int) -> Image.Image:
    width, height = SIZES[family][number % len(SIZES[family])]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_rows(family: str, folder: Path, images: list[list[int]] | None = None) -> Path:
    """Chats with these pictures each, and the pictures."""
    folder.mkdir(exist_ok=True)
    rows = []
    for i, numbers in enumerate([[0], [1], [2, 3], []] if images is None else images):
        for number in numbers:
            picture(family, number).save(folder / f"{number}.png")
        asked, answered = QUESTIONS[i % 4], ANSWERS[i % 4]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        rows.append({"messages": messages, "images": [f"{number}.png" for number in numbers]})
    file = folder / "photos.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
