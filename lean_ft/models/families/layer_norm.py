"""Families with LayerNorm on the residual stream."""

from typing import Any

from lean_ft.models.families.family import (
    ATTENTION_BIAS,
    UNGATED_ACTIVATION_NAMES,
    Family,
    all_but_every_nth_layer,
    flag,
    partial_rope,
)
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import rope_config
from lean_ft.system.config_fields import ConfigFields


def _interleaved_rope_in_windows(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    return rope_config(fields, interleaved=True, in_float32=True) if is_windowed else None


def _head_norms_if(field: str) -> Any:
    return lambda fields: "centered_by_head" if fields.flag(field) else None


# A table: related fields share a line.
# fmt: off
COHERE = {
    **ATTENTION_BIAS, "norm_placement": "parallel", "norm_centered": True,
    "logits_divisor": lambda fields: 1 / fields.positive("logit_scale"),
}
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True,
}
COHERE2_DEFAULTS = {**_COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4}
_WITHOUT_GATE = {
    **ATTENTION_BIAS, "mlp_bias": flag("mlp_bias"), "norm_centered": True, "norm_parameters": "weight_and_bias",
    "gated": False,
}

LAYER_NORM: dict[str, Family] = {
    "cohere": Family(
        facts={**COHERE, "qk_norm": _head_norms_if("use_qk_norm")},
        rope=lambda fields, layer, is_windowed: rope_config(fields, interleaved=True, in_float32=True),
        norm_eps_field="layer_norm_eps",
        defaults={**_COHERE_DEFAULTS, "rope_theta": 5e5, "use_qk_norm": False},
    ),
    "cohere2": Family(
        facts=COHERE, has_window=all_but_every_nth_layer, reads_layer_types=True, rope=_interleaved_rope_in_windows,
        norm_eps_field="layer_norm_eps", defaults=COHERE2_DEFAULTS,
    ),
    "olmo": Family(
        scores_as="Olmo", facts={**ATTENTION_BIAS, "norm_centered": True, "norm_parameters": "none", "norm_eps": 1e-5},
        rope=lambda fields, layer, is_windowed: rope_config(fields, in_float32=True),
        defaults={"max_position_embeddings": 2048},
    ),
    "stablelm": Family(
        scores_as="StableLm",
        facts={
            "qkv_bias": flag("use_qkv_bias"), "norm_centered": True, "norm_parameters": "weight_and_bias",
            "norm_placement": lambda fields: "parallel" if fields.flag("use_parallel_residual") else "pre",
            "qk_norm": _head_norms_if("qk_layernorm"),
        },
        rope=partial_rope, norm_eps_field="layer_norm_eps",
        on_disk={
            "self_attn.q_norm": ("self_attn.q_layernorm.norms.*",),
            "self_attn.k_norm": ("self_attn.k_layernorm.norms.*",),
        },
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
        },
    ),
    "nemotron": Family(
        scores_as="Nemotron", facts={**_WITHOUT_GATE, "norm_weight_offset": 1.0}, activations=UNGATED_ACTIVATION_NAMES,
        rope=partial_rope, norm_eps_field="norm_eps",
        defaults={
            "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5, "initializer_range": 0.0134,
            "partial_rotary_factor": 0.5,
        },
    ),
    "jais2": Family(
        facts=_WITHOUT_GATE, activations=UNGATED_ACTIVATION_NAMES, norm_eps_field="layer_norm_eps",
        defaults={
            "hidden_act": "relu2", "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}
# fmt: on
