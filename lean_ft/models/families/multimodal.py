"""Models that also read images or sound: the families of their language models, and where transformers keeps these."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Multimodal:
    """The language model inside a multimodal model."""

    families: Mapping[str, str]  # the model_types that it may have, and transformers' class of each
    # transformers' names of modules: the beginning of a name in the language model, and what replaces it in the whole.
    modules: tuple[str, str] = ("model.", "model.language_model.")
    # Values of text_config's tie_word_embeddings that decide, as in transformers; else the multimodal model's decides.
    tied_by_text: tuple[bool | None, ...] = ()
    # Whether transformers stores one tensor per projection for all experts of a layer, whatever the `Family` has.
    stacks_experts: bool = False
    # Fields of the language model whose values in text_config the multimodal model ignores.
    fixed: Mapping[str, Any] = field(default_factory=dict)


# How names of tensors outside of the language model begin.
OF_TOWER = (
    "vision_",
    "visual.",
    "visual_",
    "image_",
    "video_tower.",
    "embed_vision.",
    "high_res_vision_",
    "vqmodel.",
)
OF_TOWER += ("multi_modal_projector.", "mm_projector.", "projector.", "connector.", "aligner.", "merger.", "mlp1.")
OF_TOWER += ("generation_", "mlp_AR.")
OF_SOUND = ("audio_tower.", "embed_audio.")
OTHER_FIELDS = ("image", "video", "vision", "audio")  # parts of names of fields that the language model does not have
# Sizes that many published multimodal models leave out.
SIZES_7B: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
SIZES_7B = {family: {"vocab_size": 32_000, **sizes} for family, sizes in SIZES_7B.items()}
# Language models of multimodal models that take any. Not Gemma 2, whose logits have a soft cap only outside of these
# models.
_ANY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_ANY |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_ANY |= {"gpt_oss": "GptOssForCausalLM"}
_BY_TEXT: dict[str, Any] = {"tied_by_text": (True,)}
_COHERE2 = Multimodal({"cohere2": "Cohere2ForCausalLM"}, fixed={"logit_scale": 1.0})
_GLM4 = Multimodal({"glm4": "Glm4ForCausalLM"})
_IDEFICS = Multimodal(_ANY, modules=("model.", "model.text_model."))
_LLAMA = Multimodal({"llama": "LlamaForCausalLM"})
_LLAVA = Multimodal(_ANY, **_BY_TEXT)
_QWEN2 = Multimodal({"qwen2": "Qwen2ForCausalLM"})
_QWEN3 = Multimodal({"qwen3": "Qwen3ForCausalLM"})
_QWEN3_5 = Multimodal({"qwen3_5_text": "Qwen3_5ForCausalLM"})

# A table: related fields share a line.
# fmt: off
MULTIMODAL: dict[str, Multimodal] = {
    "aya_vision": _COHERE2,
    "cohere2_vision": replace(
        _COHERE2, families={**_COHERE2.families, "cohere2_moe": "Cohere2MoeForCausalLM"},
    ),
    "deepseek_vl": _LLAMA,
    "deepseek_vl_hybrid": _LLAMA,
    "exaone4_5": Multimodal({"exaone4": "Exaone4ForCausalLM"}),
    "fuyu": Multimodal({"persimmon": "PersimmonForCausalLM"}),
    "gemma3": Multimodal({"gemma3_text": "Gemma3ForCausalLM"}),
    "gemma3n": Multimodal({"gemma3n_text": "Gemma3nForCausalLM"}),
    "gemma4": Multimodal({"gemma4_text": "Gemma4ForCausalLM"}),
    "gemma4_unified": Multimodal({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}),
    "glm46v": _GLM4,
    "glm4v": replace(_GLM4, **_BY_TEXT),
    "glm4v_moe": Multimodal({"glm4_moe": "Glm4MoeForCausalLM"}, **_BY_TEXT),
    "glm_ocr": replace(_GLM4, **_BY_TEXT),
    "glmga": _GLM4,
    "got_ocr2": _QWEN2,
    "granite_docling": Multimodal({"granite": "GraniteForCausalLM"}, modules=_IDEFICS.modules),
    "hyperclovax_vision_v2": Multimodal({"hyperclovax": "HyperCLOVAXForCausalLM"}),
    "idefics2": _IDEFICS,
    "idefics3": _IDEFICS,
    "internvl": Multimodal(_ANY),
    "janus": _LLAMA,
    "kimi_k25": Multimodal({"deepseek_v3": "DeepseekV3ForCausalLM"}),
    "lfm2_vl": Multimodal({"lfm2": "Lfm2ForCausalLM"}),
    "lighton_ocr": _QWEN3,
    "llama4": Multimodal(
        {"llama4_text": "Llama4ForCausalLM"}, modules=("", "language_model."), tied_by_text=(True, False, None),
    ),
    "llava": _LLAVA,
    "llava_next": Multimodal(_ANY),
    "llava_next_video": _LLAVA,
    "llava_onevision": _LLAVA,
    "minicpm_ocr": _QWEN3_5,
    "minicpmv4_6": _QWEN3_5,
    "minicpmv4_7": _QWEN3_5,
    "mistral3": Multimodal({
        "mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM",
    }),
    "ovis2": Multimodal(_ANY),
    "paddleocr_vl": replace(_LLAMA, **_BY_TEXT),
    "pp_chart2table": _QWEN2,
    "qianfan_ocr": _QWEN3,
    "qwen2_vl": replace(_QWEN2, **_BY_TEXT),
    "qwen2_5_omni_thinker": _QWEN2,
    "qwen2_5_vl": replace(_QWEN2, **_BY_TEXT),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": Multimodal({"qwen3_moe": "Qwen3MoeForCausalLM"}, stacks_experts=True),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": Multimodal({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}),
    "smolvlm": _IDEFICS,
    "video_llama_3": replace(_QWEN2, **_BY_TEXT),
    "video_llava": Multimodal(_ANY),
    "vipllava": Multimodal(_ANY),
}
# fmt: on


def not_multimodal(model_type: Any) -> str:
    """Say that a model has no vision tower, for an error behind its folder."""
    return f"is not a model that reads images (its model_type is {model_type!r})"
