"""Dense families: attention and a feed-forward layer in every layer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lean_ft.models.families.family import (
    ACTIVATION_NAMES,
    ATTENTION_BIAS,
    QWEN_DEFAULTS,
    Family,
    count,
    every_layer,
    flag,
    has_rope,
    number,
    number_or_null,
    partial_rope,
    upper_layers,
)
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import head_dim_of, rope_config, rope_settings
from lean_ft.system.config_fields import ConfigFields, listed


def _layers_without_rope(fields: ConfigFields, layer: int) -> bool:
    slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    return slides and not has_rope(fields, layer)


def _all_but_every_nth_layer(fields: ConfigFields, layer: int) -> bool:
    return (layer + 1) % fields.count("sliding_window_pattern") != 0


def _unlisted_layers_but_every_nth(fields: ConfigFields, layer: int) -> bool:
    """As `_all_but_every_nth_layer`, for files without `layer_types`; with it the pattern is ignored."""
    fields.get("sliding_window_pattern")
    if fields.get("layer_types") is not None:
        return False
    fields.count("sliding_window")  # without a window, transformers requires `layer_types`
    return _all_but_every_nth_layer(fields, layer)


_LONGEST = "max_position_embeddings"

# Rotary settings by the fields, the layer's number and whether the layer has a window.


def _rope_except_in_some_layers(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    return rope_config(fields) if has_rope(fields, layer) else None


def _interleaved_rope_in_windows(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    return rope_config(fields, interleaved=True, in_float32=True) if is_windowed else None


def _rope_in_windowed_layers(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    """Without windows, all layers have rope."""
    return rope_config(fields) if is_windowed or fields.get("sliding_window") is None else None


def _rope_with_alpha(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """`alpha` only changes the base; the length and other settings have no effect."""
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("alpha"):
        return rope_config(fields)
    own = fields.object(key, rope_theta=fields.get("rope_theta"))
    head_dim = head_dim_of(fields)
    theta = own.positive("rope_theta") * own.positive("alpha") ** (head_dim / (head_dim - 2))
    return rope_config(fields, settings={"rope_theta": theta}, key=key)


def _rope_with_growing_queries(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("llama_4_scaling_beta"):
        return rope_config(fields)
    own = fields.object(key)
    growth = own.positive("llama_4_scaling_beta"), own.positive("original_max_position_embeddings")
    # The settings repeat the longest context.
    known = {name: value for name, value in settings.items() if name not in ("llama_4_scaling_beta", _LONGEST)}
    return rope_config(fields, settings=known, key=key, query_growth=growth[0], query_growth_positions=growth[1])


def _rope_by_window(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """One base for layers with a window; another base and the scaling for full attention."""
    theta = fields.positive("rope_local_base_freq" if is_windowed else "rope_theta")
    if fields.get("rope_parameters") is None:
        scaling = {} if is_windowed else fields.get("rope_scaling") or {}
        return rope_config(fields, settings={"rope_theta": theta, **scaling}, key="rope_scaling")
    kinds = fields.get("rope_parameters")
    if not isinstance(kinds, dict) or set(kinds) - {"full_attention", "sliding_attention"}:
        raise fields.wrong("rope_parameters", "an object with full_attention and sliding_attention")
    kind = "sliding_attention" if is_windowed else "full_attention"
    settings = {"rope_theta": theta, **(kinds.get(kind) or {})}
    return rope_config(fields, settings=settings, key=f"rope_parameters: {kind}")


def _all_but_every_sixth_and_the_last(fields: ConfigFields, layer: int) -> bool:
    last = fields.count("num_hidden_layers") - 1
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and kinds[-1:] == ["sliding_attention"]:
        raise ValueError(
            f"{fields.where}: layer_types ends with sliding_attention; expected full_attention, which transformers always uses "
            "for the last layer."
        )
    return (layer + 1) % 6 != 0 and layer != last


_PER_LAYER_FIELDS = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}


def _gemma4_layer_facts(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    """Layers with full attention have other heads, and the upper layers use keys and values of the last lower layer of the same
    kind. Published files have fields for the heads of full attention; transformers 5 writes heads per layer."""
    facts: dict[str, Any] = {}
    if "per_layer_config" in fields.config:
        by_layer, where = fields.get("per_layer_config"), f"{fields.where}: per_layer_config"
        if not isinstance(by_layer, dict):
            raise ValueError(f"{where} is {by_layer!r}; expected an object of settings by layer number.")
        settings = {str(number).zfill(4): own for number, own in by_layer.items()}.get(f"{layer:04}", {})  # "5" or "05"
        if unknown := set(settings) - _PER_LAYER_FIELDS.keys():
            raise ValueError(f"{where}: {layer} has {listed(unknown)}; expected only {listed(_PER_LAYER_FIELDS)}.")
        own = ConfigFields(settings, {}, f"{where}: {layer}")
        facts |= {_PER_LAYER_FIELDS[name]: own.count(name) for name in settings}
    elif not is_windowed[layer]:
        facts["head_dim"] = fields.count("global_head_dim")
        if fields.flag("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
            facts["num_kv_heads"] = fields.count("num_global_key_value_heads")
    first = len(is_windowed) - fields.count("num_kv_shared_layers", least=0)
    if layer < first:
        facts["values_are_keys"] = fields.flag("attention_k_eq_v") and not is_windowed[layer]
        return facts
    facts["kv_from_layer"] = next((i for i in reversed(range(first)) if is_windowed[i] == is_windowed[layer]), None)
    if facts["kv_from_layer"] is None:
        raise ValueError(
            f"{fields.where}: num_kv_shared_layers leaves no lower layer of the kind of layer {layer} with keys and values."
        )
    if fields.flag("use_double_wide_mlp"):
        facts["intermediate_size"] = 2 * fields.count("intermediate_size")
    return facts


def _layer_input_vocab_size(fields: ConfigFields) -> int:
    if not fields.count("hidden_size_per_layer_input", least=0):
        return 0
    return fields.count("vocab_size_per_layer_input", least=fields.count("vocab_size"))


# A table: related fields share a line.
# fmt: off
_MLP_BIAS = {"mlp_bias": flag("mlp_bias")}
_EVERY_BIAS: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), flag("use_bias"))
_GEMMA_FACTS = {
    **ATTENTION_BIAS, "norm_weight_offset": 1.0,
    "embedding_multiplier": lambda fields: fields.count("hidden_size") ** 0.5,
    "embedding_multiplier_in_weight_dtype": True,
}
_GEMMA_2_FACTS = {  # and 3's
    **_GEMMA_FACTS, "norm_placement": "both",
    "attention_scale": lambda fields: fields.positive("query_pre_attn_scalar") ** -0.5,
    "logits_softcap": number_or_null("final_logit_softcapping"),
}
_GEMMA_DEFAULTS = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}

_GEMMA_4 = Family(
    facts={
        **_GEMMA_FACTS, "norm_weight_offset": 0.0, "norm_placement": "both", "qk_norm": "head", "value_norm": True,
        "attention_scale": 1.0, "logits_softcap": number_or_null("final_logit_softcapping"), "layer_scalars": True,
    },
    has_window=_all_but_every_sixth_and_the_last, reads_layer_types=True, layer_facts=_gemma4_layer_facts,
    rope=_rope_by_window,
    defaults={
        **_GEMMA_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262144,
        "global_head_dim": 512, "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    activation_field="hidden_activation",
)

DENSE: dict[str, Family] = {
    "llama": Family(scores_as="Llama", facts={**ATTENTION_BIAS, **_MLP_BIAS}, defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        scores_as="Mistral", has_window=every_layer,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        scores_as="Qwen2", facts={"qkv_bias": True}, has_window=upper_layers, reads_layer_types=True, defaults=QWEN_DEFAULTS,
    ),
    "qwen3": Family(
        scores_as="Qwen3", facts={**ATTENTION_BIAS, "qk_norm": "head"}, has_window=upper_layers, reads_layer_types=True,
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
    ),
    "gemma": Family(
        scores_as="Gemma", facts=_GEMMA_FACTS, defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16},
        activations={**ACTIVATION_NAMES, "gelu": "gelu_tanh"},  # older files mean gelu_tanh
    ),
    "gemma2": Family(
        scores_as="Gemma2", facts={**_GEMMA_2_FACTS, "attention_softcap": number_or_null("attn_logit_softcapping")},
        has_window=lambda fields, layer: layer % 2 == 0, reads_layer_types=True,
        defaults={
            **_GEMMA_DEFAULTS, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        activation_field="hidden_activation",
    ),
    "gemma3_text": Family(
        scores_as="Gemma3Text", facts={**_GEMMA_2_FACTS, "qk_norm": "head"}, has_window=_all_but_every_nth_layer,
        reads_layer_types=True, rope=_rope_by_window,
        defaults={
            **_GEMMA_DEFAULTS, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
        activation_field="hidden_activation",
    ),
    "gemma4_text": replace(
        _GEMMA_4,
        facts={
            **_GEMMA_4.facts, "layer_input_dim": lambda fields: fields.count("hidden_size_per_layer_input", least=0),
            "layer_input_vocab_size": _layer_input_vocab_size,
        },
        mixture={
            "num_experts": lambda fields: fields.count("num_experts") if fields.flag("enable_moe_block") else 0,
            "experts_per_token": count("top_k_experts"), "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": True, "router_name": "router", "router_norm_eps": number("rms_norm_eps"),
            "beside_mlp": True,
        },
        on_disk={"mixture.": ("",)},
        defaults={
            **_GEMMA_4.defaults, "enable_moe_block": False, "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072, "sliding_window": 512,
        },
    ),
    "gemma4_unified_text": replace(
        _GEMMA_4, defaults={**_GEMMA_4.defaults, "max_position_embeddings": 262144, "sliding_window": 1024}
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
        scores_as="SmolLM3", facts={**ATTENTION_BIAS, **_MLP_BIAS}, has_window=_layers_without_rope, reads_layer_types=True,
        rope=_rope_except_in_some_layers,
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
            "no_rope_layer_interval": 4, "tie_word_embeddings": True,
        },
    ),
    "granite": Family(
        facts={
            **ATTENTION_BIAS, **_MLP_BIAS, "attention_scale": number("attention_multiplier"),
            "embedding_multiplier": number("embedding_multiplier"),
            "residual_multiplier": number("residual_multiplier"), "logits_divisor": number("logits_scaling"),
        },
        defaults={
            "max_position_embeddings": 2048, "attention_multiplier": 1.0, "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
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
        has_window=_all_but_every_nth_layer, reads_layer_types=True, rope=_rope_by_window,
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096,
            "sliding_window_pattern": 4, "rope_theta": 5e5, "rope_local_base_freq": 5e5,
        },
    ),
    "glm4": Family(
        scores_as="Glm4", facts={"qkv_bias": flag("attention_bias"), "norm_placement": "both", "fused_gate_up": True},
        rope=partial(partial_rope, interleaved=True),
        on_disk={
            "post_attention_layernorm": ("post_self_attn_layernorm",),
            "pre_feedforward_layernorm": ("post_attention_layernorm",),
            "post_feedforward_layernorm": ("post_mlp_layernorm",),
        },
        defaults={
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5, "attention_bias": True,
        },
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
        scores_as="Exaone4", facts={"norm_placement": "post", "qk_norm": "head"}, has_window=_unlisted_layers_but_every_nth,
        reads_layer_types=True, rope=_rope_in_windowed_layers,
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
    "cohere2": Family(
        facts={
            **ATTENTION_BIAS, "norm_placement": "parallel", "norm_centered": True,
            "logits_divisor": lambda fields: 1 / fields.positive("logit_scale"),
        },
        has_window=_all_but_every_nth_layer, reads_layer_types=True, rope=_interleaved_rope_in_windows,
        norm_eps_field="layer_norm_eps",
        defaults={
            "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
            "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4,
        },
    ),
}
# fmt: on
