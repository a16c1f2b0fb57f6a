"""Gemma 1 to 3, and EmbeddingGemma, a Gemma 3 whose tokens see later ones. The scores of Gemma 2 and VaultGemma have a
soft cap."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lean_ft.models.attention.attention import Attention
from lean_ft.models.config import DecoderConfig, FamilyParts
from lean_ft.models.families.family import (
    ACTIVATION_NAMES,
    ATTENTION_BIAS,
    Family,
    all_but_every_nth_layer,
    number_or_null,
    root_of_hidden_size,
    rope_by_window,
)
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class Gemma2:
    attention_softcap: float | None  # scores become cap * tanh(score / cap)


class CappedAttention(Attention):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.scoring = replace(self.scoring, softcap=config.own.attention_softcap)


def _gemma2(fields: ConfigFields) -> Gemma2:
    return Gemma2(fields.positive_or_null("attn_logit_softcapping"))


def _is_encoder(fields: ConfigFields) -> bool:
    """Whether tokens see later ones. `vision`: only those of images do."""
    value = fields.get("use_bidirectional_attention")
    if value is not None and not isinstance(value, bool) and value != "vision":
        raise fields.wrong("use_bidirectional_attention", "true, false or vision")
    return value is True


def _with_half_windows(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The window of an encoder counts both sides. transformers reads half of it as one side, and writes the whole."""
    size = config.get("sliding_window", _GEMMA_3_WINDOW)
    if config.get("use_bidirectional_attention") is not True or not isinstance(size, int) or isinstance(size, bool):
        return config
    return {**config, "sliding_window": size // 2 + 1}


_GEMMA_3_WINDOW = 4096

# A table: related fields share a line.
# fmt: off
GEMMA_FACTS = {
    **ATTENTION_BIAS, "norm_weight_offset": 1.0,
    "embedding_multiplier": root_of_hidden_size,
    "embedding_multiplier_in_weight_dtype": True,
}
_GEMMA_2_FACTS = {  # and 3's
    **GEMMA_FACTS, "norm_placement": "both",
    "attention_scale": lambda fields: fields.positive("query_pre_attn_scalar") ** -0.5,
    "logits_softcap": number_or_null("final_logit_softcapping"),
}
GEMMA_DEFAULTS = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}
_GEMMA_2_DEFAULTS = {
    **GEMMA_DEFAULTS, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}

_CAPPED = FamilyParts(attention=CappedAttention, splits=True)

GEMMA: dict[str, Family] = {
    "gemma": Family(
        scores_as="Gemma", facts=GEMMA_FACTS, defaults={**GEMMA_DEFAULTS, "num_key_value_heads": 16},
        activations={**ACTIVATION_NAMES, "gelu": "gelu_tanh"},  # older files mean gelu_tanh
    ),
    "gemma2": Family(
        scores_as="Gemma2", facts=_GEMMA_2_FACTS, parts=_CAPPED, own=_gemma2,
        has_window=lambda fields, layer: layer % 2 == 0, reads_layer_types=True,
        defaults=_GEMMA_2_DEFAULTS,
        activation_field="hidden_activation",
    ),
    "vaultgemma": Family(
        facts={**_GEMMA_2_FACTS, "norm_placement": "pre"}, parts=_CAPPED, own=_gemma2,
        has_window=lambda fields, layer: layer % 2 == 0, reads_layer_types=True,
        on_disk={"post_attention_layernorm": ("pre_feedforward_layernorm",)}, defaults=_GEMMA_2_DEFAULTS,
        activation_field="hidden_activation",
    ),
    "gemma3_text": Family(
        scores_as="Gemma3Text", facts={**_GEMMA_2_FACTS, "qk_norm": "head", "bidirectional": _is_encoder},
        has_window=all_but_every_nth_layer, reads_layer_types=True, rope=rope_by_window,
        preprocessed=_with_half_windows,
        defaults={
            **GEMMA_DEFAULTS, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 131072, "sliding_window": _GEMMA_3_WINDOW, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
        activation_field="hidden_activation",
    ),
}
# fmt: on
