"""Gemma's families."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lean_ft.models.config import StreamsConfig
from lean_ft.models.families.family import (
    ACTIVATION_NAMES,
    ATTENTION_BIAS,
    Family,
    all_but_every_nth_layer,
    count,
    number,
    number_or_null,
    rope_by_window,
)
from lean_ft.system.config_fields import ConfigFields, listed


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
    facts["kv_from_layer"] = _kv_from_layer(fields, is_windowed, layer)
    if facts["kv_from_layer"] is None:
        facts["values_are_keys"] = fields.flag("attention_k_eq_v") and not is_windowed[layer]
    elif fields.flag("use_double_wide_mlp"):
        facts["intermediate_size"] = 2 * fields.count("intermediate_size")
    return facts


def _kv_from_layer(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> int | None:
    first = len(is_windowed) - fields.count("num_kv_shared_layers", least=0)
    if layer < first:
        return None
    lower = [i for i in range(first) if is_windowed[i] == is_windowed[layer]]
    if not lower:
        raise ValueError(
            f"{fields.where}: num_kv_shared_layers leaves no lower layer of the kind of layer {layer} with keys and values."
        )
    return lower[-1]


def _gemma3n_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One size of feed-forward layers, and a list beside it where config.json has a list. Without query_pre_attn_scalar, which
    published files have and transformers ignores."""
    config = {name: value for name, value in config.items() if name != "query_pre_attn_scalar"}
    sizes = config.get("intermediate_size")
    if isinstance(sizes, list) and sizes:
        config |= {"intermediate_size": max(sizes), "intermediate_sizes": sizes}
    return config


def _gemma3n_layer_facts(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"kv_from_layer": _kv_from_layer(fields, is_windowed, layer)}
    if fields.get("intermediate_sizes") is not None:
        size = fields.of_each_layer("intermediate_sizes")[layer]
        facts["intermediate_size"] = None if size == fields.count("intermediate_size") else size
    name = "activation_sparsity_pattern"
    if fields.get(name) is None:  # the first ten of more than ten layers
        return {**facts, "gate_sparsity": 0.95 if layer < 10 < len(is_windowed) else 0.0}
    sparsity = fields.of_each_layer(name)[layer]
    if not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
        raise fields.wrong(name, "numbers from 0 to below 1")
    return {**facts, "gate_sparsity": float(sparsity)}


def _gemma3n_streams(fields: ConfigFields) -> StreamsConfig:
    number = fields.count("altup_num_inputs")
    active = fields.count("altup_active_idx", least=0, most=number - 1)
    limit = fields.positive_or_null("altup_coef_clip")
    return StreamsConfig(number, active, limit, scales_input=fields.flag("altup_correct_scale"))


def _layer_input_vocab_size(fields: ConfigFields) -> int:
    if not fields.count("hidden_size_per_layer_input", least=0):
        return 0
    return fields.count("vocab_size_per_layer_input", least=fields.count("vocab_size"))


# A table: related fields share a line.
# fmt: off
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
_GEMMA_2_DEFAULTS = {
    **_GEMMA_DEFAULTS, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}

_GEMMA_4 = Family(
    facts={
        **_GEMMA_FACTS, "norm_weight_offset": 0.0, "norm_placement": "both", "qk_norm": "head", "value_norm": True,
        "attention_scale": 1.0, "logits_softcap": number_or_null("final_logit_softcapping"), "layer_scalars": True,
    },
    has_window=_all_but_every_sixth_and_the_last, reads_layer_types=True, layer_facts=_gemma4_layer_facts,
    rope=rope_by_window,
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

GEMMA: dict[str, Family] = {
    "gemma": Family(
        scores_as="Gemma", facts=_GEMMA_FACTS, defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16},
        activations={**ACTIVATION_NAMES, "gelu": "gelu_tanh"},  # older files mean gelu_tanh
    ),
    "gemma2": Family(
        scores_as="Gemma2", facts={**_GEMMA_2_FACTS, "attention_softcap": number_or_null("attn_logit_softcapping")},
        has_window=lambda fields, layer: layer % 2 == 0, reads_layer_types=True,
        defaults=_GEMMA_2_DEFAULTS,
        activation_field="hidden_activation",
    ),
    "vaultgemma": Family(
        facts={
            **_GEMMA_2_FACTS, "norm_placement": "pre", "attention_softcap": number_or_null("attn_logit_softcapping"),
        },
        has_window=lambda fields, layer: layer % 2 == 0, reads_layer_types=True,
        on_disk={"post_attention_layernorm": ("pre_feedforward_layernorm",)}, defaults=_GEMMA_2_DEFAULTS,
        activation_field="hidden_activation",
    ),
    "gemma3_text": Family(
        scores_as="Gemma3Text", facts={**_GEMMA_2_FACTS, "qk_norm": "head"}, has_window=all_but_every_nth_layer,
        reads_layer_types=True, rope=rope_by_window,
        defaults={
            **_GEMMA_DEFAULTS, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
        activation_field="hidden_activation",
    ),
    "gemma3n_text": Family(
        facts={
            **_GEMMA_FACTS, "norm_weight_offset": 0.0, "norm_placement": "both", "qk_norm": "head", "value_norm": True,
            "attention_scale": 1.0, "logits_softcap": number_or_null("final_logit_softcapping"),
            "layer_input_dim": count("hidden_size_per_layer_input"), "streams": _gemma3n_streams,
            "layer_input_vocab_size": count("vocab_size_per_layer_input"), "branch_rank": count("laurel_rank"),
        },
        has_window=lambda fields, layer: (layer + 1) % 5 != 0, reads_layer_types=True, rope=rope_by_window,
        layer_facts=_gemma3n_layer_facts, preprocessed=_gemma3n_fields,
        defaults={
            **_GEMMA_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 512,
            "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "num_kv_shared_layers": 15, "laurel_rank": 64, "altup_num_inputs": 4, "altup_active_idx": 0,
            "altup_coef_clip": 120.0, "altup_correct_scale": True,
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
}
# fmt: on
