"""A random tiny model of any multimodal type: transformers' default config, with small sizes wherever a field has a
known name."""

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.models.family_cases import CASES, SIZES

_TOWER = {"hidden_size": 16, "d_model": 16, "intermediate_size": 16, "encoder_ffn_dim": 16, "head_dim": 8}
_TOWER |= {"num_hidden_layers": 1, "encoder_layers": 1, "depth": 4, "global_attn_indexes": [0], "image_size": 28}
_TOWER |= {"num_attention_heads": 2, "encoder_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2}
_TOWER |= {
    "embed_dim": 16,
    "output_channels": 16,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0, 1, 2, 3],
}
_TOWER |= {"mlp_dim": 16, "projection_dim": 16, "init_pos_emb_height": 4, "init_pos_emb_width": 4}
_IDS = {f"{kind}_{end}": 98 for kind in ("image", "video", "audio") for end in ("token_id", "token_index")}
_IDS |= {f"{kind}_{end}_token_id": 98 for kind in ("image", "video", "vision") for end in ("start", "end")}
# Positions with three axes; the sizes of the axes add up to half of the rotated features.
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_PARTIAL_ROPE = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [0, 1, 1]}
_TEXT: dict[str, dict[str, Any]] = {
    **{f"{name}_text": {"rope_parameters": _ROPE} for name in ("glm_ocr", "qwen2_5_omni", "qwen2_vl")},
    **{f"{name}_text": {"rope_parameters": _PARTIAL_ROPE} for name in ("glm4v", "glm4v_moe")},
    "granite_docling_text": {"logits_scaling": 0.5},  # so that a wrong logit shows
    "paddleocr_vl_text": {"rope_parameters": _ROPE, "head_dim": 8},
}
# Their language model's layers get a name in transformers' folders that published folders do not have.
RENAMED_LAYERS = ("kimi_k25", "qianfan_ocr")


def tiny_whole(
    model_type: str, text_type: str | None = None, text: dict[str, Any] | None = None
) -> transformers.PreTrainedModel:
    """A random tiny multimodal model with a language model of this type, or of the type's own; ids up to 95 are text.

    text: the language model's settings."""
    kind = transformers.CONFIG_MAPPING[model_type]
    default = kind()
    text_type = text_type or default.text_config.model_type
    own = next((settings for family, settings in CASES.values() if family == text_type), {}) | _TEXT.get(text_type, {})
    text = {**SIZES, **own} if text is None else text
    parts: dict[str, Any] = {"text_config": {**text, "model_type": text_type}}
    for name in set(kind.sub_configs) - {"text_config"}:
        if (part := getattr(default, name)) is not None:
            sizes = {**_TOWER, "out_hidden_size": text["hidden_size"]}
            small = {field: value for field, value in sizes.items() if field in part.to_dict()}
            parts[name] = {**small, "model_type": part.model_type}
    sizes = {**_IDS, "hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"]}
    config = kind(**parts, **{field: value for field, value in sizes.items() if field in default.to_dict()})
    config.tie_word_embeddings = getattr(config.text_config, "tie_word_embeddings", False)
    config.text_config._experts_implementation = "eager"
    whole = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return whole
