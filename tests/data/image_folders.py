"""Small model folders of three families that read images, with the files of a tokenizer and a processor alone."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MEAN_AND_STD = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CHATML = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}
{%- endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], str]] = {
    # config.json, preprocessor_config.json, control tokens, what the template writes for an image
    "qwen3_vl": (
        {"image_token_id": 5},
        {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "resample": 3, **MEAN_AND_STD}
        | {"size": {"shortest_edge": 4 * 1024, "longest_edge": 64 * 1024}, "image_processor_type": "Qwen2VLImageProcessor"},
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "gemma3": (
        {"mm_tokens_per_image": 4, "vision_config": {"patch_size": 14, "image_size": 112}},
        {"size": {"height": 112, "width": 112}, "resample": 2, "image_seq_length": 4, **MEAN_AND_STD}
        | {"image_processor_type": "Gemma3ImageProcessor"},
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        "<start_of_image>",
    ),
    "mistral3": (
        {"spatial_merge_size": 2, "vision_config": {"patch_size": 14, "image_size": 1540}},
        {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 140}, "resample": 3, **MEAN_AND_STD}
        | {"image_processor_type": "PixtralImageProcessor"},
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "[IMG]",
    ),
}  # fmt: skip


def write_folder(family: str, folder: Path) -> Path:
    """Write the folder of a family and return it. Bytes are tokens, and line breaks merge with their neighbors."""
    config, processor, control, image = FAMILIES[family]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *control]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *dict.fromkeys(map("".join, merges))])}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
    )
    tokenizer.chat_template = CHATML.replace("IMAGE", image)
    tokenizer.save_pretrained(folder)
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in zip(("image_token",), control[-1:], strict=True)
    }
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config, **ids}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
