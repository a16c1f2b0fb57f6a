"""Models that also read images or sound: the families of their language models, and where transformers keeps these."""

from collections.abc import Mapping
from dataclasses import dataclass


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


# A table: related fields share a line.
# fmt: off
MULTIMODAL: dict[str, Multimodal] = {
    "gemma3": Multimodal({"gemma3_text": "Gemma3ForCausalLM"}),
    "gemma3n": Multimodal({"gemma3n_text": "Gemma3nForCausalLM"}),
    "gemma4": Multimodal({"gemma4_text": "Gemma4ForCausalLM"}),
    "gemma4_unified": Multimodal({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}),
    "lfm2_vl": Multimodal({"lfm2": "Lfm2ForCausalLM"}),
    "llama4": Multimodal(
        {"llama4_text": "Llama4ForCausalLM"}, modules=("", "language_model."), tied_by_text=(True, False, None),
    ),
    "mistral3": Multimodal({"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}),
    "smolvlm": Multimodal({"llama": "LlamaForCausalLM"}, modules=("model.", "model.text_model.")),
    "qwen2_vl": Multimodal({"qwen2": "Qwen2ForCausalLM"}, tied_by_text=(True,)),
    "qwen2_5_vl": Multimodal({"qwen2": "Qwen2ForCausalLM"}, tied_by_text=(True,)),
    "qwen3_vl": Multimodal({"qwen3": "Qwen3ForCausalLM"}),
    "qwen3_vl_moe": Multimodal({"qwen3_moe": "Qwen3MoeForCausalLM"}, stacks_experts=True),
    "qwen3_5": Multimodal({"qwen3_5_text": "Qwen3_5ForCausalLM"}),
    "qwen3_5_moe": Multimodal({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}),
}
# fmt: on
