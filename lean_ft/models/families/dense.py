"""Dense families: attention and a feed-forward layer in every layer."""

from dataclasses import replace
from functools import partial
from typing import Any

from lean_ft.models.families.family import (
    ATTENTION_BIAS,
    QWEN_DEFAULTS,
    UNGATED_ACTIVATION_NAMES,
    Family,
    all_but_every_nth_layer,
    every_layer,
    flag,
    has_rope,
    number,
    partial_rope,
    rope_by_layer,
    rope_by_window,
    rope_in_windowed_layers,
    upper_layers,
)
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import head_dim_of, rope_config, rope_settings
from lean_ft.system.config_fields import ConfigFields


def _layers_without_rope(fields: ConfigFields, layer: int) -> bool:
    slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    return slides and not has_rope(fields, layer)


def _unlisted_layers_but_every_nth(fields: ConfigFields, layer: int) -> bool:
    """As `all_but_every_nth_layer`, for files without `layer_types`; with it the pattern is ignored."""
    fields.get("sliding_window_pattern")
    if fields.get("layer_types") is not None:
        return False
    fields.count("sliding_window")  # without a window, transformers requires `layer_types`
    return all_but_every_nth_layer(fields, layer)


def _all_but_the_first_of_four(fields: ConfigFields, layer: int) -> bool:
    return layer % 4 != 0


def _attention_multiplier(fields: ConfigFields) -> float:
    return fields.positive_or_null("attention_multiplier") or head_dim_of(fields) ** -0.5


def _norms_on_both_sides(fields: ConfigFields) -> str:
    if not fields.flag("use_post_norm"):
        raise fields.wrong("use_post_norm", "true, as in the published models")
    return "both"


_LONGEST = "max_position_embeddings"

# Rotary settings by the fields, the layer's number and whether the layer has a window.


def _rope_except_in_some_layers(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    return rope_config(fields) if has_rope(fields, layer) else None


def _rope_with_alpha(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """`alpha` only changes the base; the length and other settings have no effect."""
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("alpha"):
        return rope_config(fields)
    rope_fields = fields.object(key, rope_theta=fields.get("rope_theta"))
    head_dim = head_dim_of(fields)
    theta = rope_fields.positive("rope_theta") * rope_fields.positive("alpha") ** (head_dim / (head_dim - 2))
    return rope_config(fields, settings={"rope_theta": theta}, key=key)


def _rope_with_growing_queries(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("llama_4_scaling_beta"):
        return rope_config(fields)
    rope_fields = fields.object(key)
    growth = rope_fields.positive("llama_4_scaling_beta"), rope_fields.positive("original_max_position_embeddings")
    # The settings repeat the longest context.
    kept = {name: value for name, value in settings.items() if name not in ("llama_4_scaling_beta", _LONGEST)}
    return rope_config(fields, settings=kept, key=key, query_growth=growth[0], query_growth_positions=growth[1])


# A table: related fields share a line.
# fmt: off
_MLP_BIAS = {"mlp_bias": flag("mlp_bias")}
_EVERY_BIAS: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), flag("use_bias"))

_GLM = Family(
    scores_as="Glm", facts={"qkv_bias": flag("attention_bias"), "fused_gate_up": True},
    rope=partial(partial_rope, interleaved=True),
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5, "attention_bias": True,
    },
)
_GRANITE = Family(
    facts={
        **ATTENTION_BIAS, **_MLP_BIAS, "attention_scale": number("attention_multiplier"),
        "embedding_multiplier": number("embedding_multiplier"),
        "residual_multiplier": number("residual_multiplier"), "logits_divisor": number("logits_scaling"),
    },
    defaults={
        "max_position_embeddings": 2048, "attention_multiplier": 1.0, "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0, "logits_scaling": 1.0,
    },
)

DENSE: dict[str, Family] = {
    "llama": Family(scores_as="Llama", facts={**ATTENTION_BIAS, **_MLP_BIAS},
        defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        scores_as="Mistral", has_window=every_layer,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        scores_as="Qwen2", facts={"qkv_bias": True}, has_window=upper_layers, reads_layer_types=True,
        defaults=QWEN_DEFAULTS,
    ),
    "qwen3": Family(
        scores_as="Qwen3", facts={**ATTENTION_BIAS, "qk_norm": "head"}, has_window=upper_layers, reads_layer_types=True,
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
    ),
    "phi3": Family(
        scores_as="Phi3", facts={"fused_qkv": True, "fused_gate_up": True}, has_window=every_layer,
        rope=lambda fields, layer, is_windowed: rope_config(fields, may_be_partial=True),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    ),
    "olmo2": Family(
        scores_as="Olmo2", facts={**ATTENTION_BIAS, "norm_placement": "post", "qk_norm": "projection"},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "smollm3": Family(
        scores_as="SmolLM3", facts={**ATTENTION_BIAS, **_MLP_BIAS}, has_window=_layers_without_rope,
        reads_layer_types=True,
        rope=_rope_except_in_some_layers,
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
            "no_rope_layer_interval": 4, "tie_word_embeddings": True,
        },
    ),
    "granite": _GRANITE,
    "granite_swa": replace(
        _GRANITE, facts={**_GRANITE.facts, "attention_sinks": True}, has_window=_all_but_the_first_of_four,
        reads_layer_types=True, rope=rope_by_layer,
        defaults={
            **_GRANITE.defaults, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "sliding_window": 128,
        },
    ),
    "hyperclovax": replace(
        _GRANITE,
        facts={
            **_GRANITE.facts, "norm_placement": _norms_on_both_sides,
            "attention_scale": _attention_multiplier,
            "logits_divisor": lambda fields: 1 / fields.positive("logits_scaling"),
        },
        on_disk={
            "post_attention_layernorm": ("post_norm1",), "pre_feedforward_layernorm": ("post_attention_layernorm",),
            "post_feedforward_layernorm": ("post_norm2",),
        },
        defaults={**_GRANITE.defaults, "attention_multiplier": None, "use_post_norm": True},
    ),
    "ministral": Family(
        scores_as="Ministral", has_window=every_layer, reads_layer_types=True,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "ministral3": Family(
        scores_as="Ministral3", has_window=every_layer, rope=_rope_with_growing_queries,
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "olmo3": Family(
        scores_as="Olmo3", facts={**ATTENTION_BIAS, "norm_placement": "post", "qk_norm": "projection"},
        has_window=all_but_every_nth_layer, reads_layer_types=True, rope=rope_by_window,
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096,
            "sliding_window_pattern": 4, "rope_theta": 5e5, "rope_local_base_freq": 5e5,
        },
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM, scores_as="Glm4", facts={**_GLM.facts, "norm_placement": "both"},
        on_disk={
            "post_attention_layernorm": ("post_self_attn_layernorm",),
            "pre_feedforward_layernorm": ("post_attention_layernorm",),
            "post_feedforward_layernorm": ("post_mlp_layernorm",),
        },
    ),
    "cwm": Family(
        facts=_MLP_BIAS, has_window=_all_but_the_first_of_four, reads_layer_types=True,
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
            "sliding_window": 8192, "rope_theta": 1e6,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        },
    ),
    "arcee": Family(
        scores_as="Arcee", facts={**ATTENTION_BIAS, **_MLP_BIAS, "gated": False}, activations=UNGATED_ACTIVATION_NAMES,
        defaults={"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "seed_oss": Family(
        scores_as="SeedOss",
        facts={"qkv_bias": flag("attention_bias"), "output_bias": flag("attention_out_bias"), **_MLP_BIAS},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
            "attention_out_bias": False,
        },
    ),
    "ernie4_5": Family(
        facts=_EVERY_BIAS,
        rope=lambda fields, layer, is_windowed: rope_config(fields, interleaved=True, in_float32=True),
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "rope_theta": 5e5, "use_bias": False,
        },
    ),
    "hunyuan_v1_dense": Family(
        scores_as="HunYuanDenseV1", facts={**ATTENTION_BIAS, "qk_norm": "turned_head"}, rope=_rope_with_alpha,
        on_disk={"self_attn.q_norm": ("self_attn.query_layernorm",), "self_attn.k_norm": ("self_attn.key_layernorm",)},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "exaone4": Family(
        scores_as="Exaone4", facts={"norm_placement": "post", "qk_norm": "head"},
        has_window=_unlisted_layers_but_every_nth,
        reads_layer_types=True, rope=rope_in_windowed_layers,
        defaults={
            "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "apertus": Family(
        facts={**ATTENTION_BIAS, "qk_norm": "head", "gated": False}, activations={"xielu": "xielu"},
        on_disk={"input_layernorm": ("attention_layernorm",), "post_attention_layernorm": ("feedforward_layernorm",)},
        defaults={
            "hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "rope_theta": 12e6,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        },
    ),
}
# fmt: on
