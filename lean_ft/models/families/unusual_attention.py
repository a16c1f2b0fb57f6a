"""Families whose attention has a gate projection, or other numbers of heads in layers with a window."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lean_ft.models.families.corrected_mixtures import CORRECTED_MIXTURE, CORRECTED_MIXTURE_DEFAULTS
from lean_ft.models.families.family import (
    ATTENTION_BIAS,
    Family,
    count,
    flag,
    number,
    rope_by_window,
    rope_in_windowed_layers,
)
from lean_ft.models.families.mixtures import EXPERTS_ON_DISK, sparse_layers
from lean_ft.models.rope import RopeConfig
from lean_ft.system.config_fields import ConfigFields


def _all_but_every_nth(fields: ConfigFields, layer: int) -> bool:
    return (layer + 1) % fields.count("global_attn_every_n_layers") != 0


def _all_but_the_first_and_every_sixth(fields: ConfigFields, layer: int) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


def _partial_rope_by_window(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """The share of a head that is rotated, rounded down to whole features."""
    rope, size = rope_by_window(fields, layer, is_windowed, may_be_partial=True), fields.count("head_dim")
    return replace(rope, rotary_fraction=int(size * rope.rotary_fraction) / size)


def _value_dim(fields: ConfigFields) -> int:
    return fields.count("v_head_dim", most=fields.count("head_dim"))


def _window_heads(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    """Only layers with a window have sinks, and twice the keys."""
    factor = 2 if is_windowed[layer] else 1
    return {"num_kv_heads": factor * fields.count("num_key_value_heads"), "has_sinks": is_windowed[layer]}


# The layers have kinds, and each kind has its own rotation.
_WITHOUT_EFFECT = ("first_k_dense_replace", "rope_theta", "partial_rotary_factor", "rope_scaling")


def _with_window_and_own_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Null factors are 1. `sliding_window_size` counts the positions before a query, and rope without a share has a third."""
    own = {name: value for name, value in config.items() if name not in _WITHOUT_EFFECT}
    own |= {name: 1.0 for name in ("routed_scaling_factor", "attention_value_scale") if own.get(name, 0) is None}
    if type(size := own.pop("sliding_window_size", None)) is int:
        own["sliding_window"] = size + 1
    if isinstance(kinds := own.get("rope_parameters"), dict):
        share = {"partial_rotary_factor": 0.334}
        own["rope_parameters"] = {
            kind: share | rope if isinstance(rope, dict) and rope.get("rope_type", "default") == "default" else rope
            for kind, rope in kinds.items()
        }
    return own


# A table: related fields share a line.
# fmt: off
UNUSUAL_ATTENTION: dict[str, Family] = {
    "afmoe": Family(
        facts={
            **ATTENTION_BIAS, "norm_placement": "both", "qk_norm": "head", "attention_gate": "own",
            "embedding_multiplier": lambda fields: fields.count("hidden_size") ** 0.5 if fields.flag("mup_enabled") else 1.0,
        },
        has_window=_all_but_every_nth, reads_layer_types=True, rope=rope_in_windowed_layers,
        mixture={
            "num_experts": count("num_experts"), "experts_per_token": count("num_experts_per_tok"),
            "intermediate_size": count("moe_intermediate_size"), "weights_sum_to_one": True, "router_name": "router",
            "shared_intermediate_size": lambda fields: (
                fields.count("moe_intermediate_size") * fields.count("num_shared_experts")
            ),
            "shared_name": "shared_experts", "score": "sigmoid", "has_score_correction": True,
            "weights_factor": number("route_scale"),
        },
        has_mixture=lambda fields, layer: layer >= fields.count("num_dense_layers", least=0),
        on_disk={
            "pre_feedforward_layernorm": ("pre_mlp_layernorm",), "post_feedforward_layernorm": ("post_mlp_layernorm",),
            "mlp.router.e_score_correction_bias": ("mlp.expert_bias",), "mlp.router": ("mlp.router.gate",),
            **EXPERTS_ON_DISK,
        },
        defaults={
            "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408,
            "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
            "route_scale": 1.0, "global_attn_every_n_layers": 4, "sliding_window": 1024, "mup_enabled": False,
        },
    ),
    "mimo_v2_flash": Family(
        facts={
            "qkv_bias": flag("attention_bias"), "attention_sinks": True, "value_dim": _value_dim,
            "value_multiplier": number("attention_value_scale"),
        },
        has_window=_all_but_the_first_and_every_sixth, reads_layer_types=True, layer_facts=_window_heads,
        rope=_partial_rope_by_window, preprocessed=_with_window_and_own_rope,
        mixture={**CORRECTED_MIXTURE, "shared_intermediate_size": 0}, has_mixture=sparse_layers,
        on_disk={"self_attn.sinks": ("self_attn.attention_sink_bias",), **EXPERTS_ON_DISK},
        in_memory={"self_attn.sinks": "self_attn.sinks"},
        defaults={
            **CORRECTED_MIXTURE_DEFAULTS, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
            "attention_value_scale": 0.707, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "sliding_window": 129, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "rope_local_base_freq": 1e4, "first_k_dense_replace": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
        },
    ),
}
# fmt: on
