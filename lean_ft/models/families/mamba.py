"""Families with Mamba-2: instead of attention in most layers, or as a layer of its own."""

import math
from collections.abc import Mapping
from typing import Any

from lean_ft.models.config import Mamba2Config
from lean_ft.models.families.corrected_mixtures import CORRECTED_MIXTURE, CORRECTED_MIXTURE_DEFAULTS
from lean_ft.models.families.dense import DENSE
from lean_ft.models.families.family import ACTIVATION_NAMES, ATTENTION_BIAS, Family, count, flag, partial_rope
from lean_ft.models.families.mixtures import GRANITE_IN_MEMORY, GRANITE_MIXTURE, GRANITE_ON_DISK, MIXTURE_DEFAULTS
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import rope_config
from lean_ft.system.config_fields import ConfigFields


def mamba2(fields: ConfigFields, **facts: Any) -> Mamba2Config:
    """Read the fields that these families share; `facts` override them."""
    num_heads, num_groups = fields.count("mamba_n_heads"), fields.count("mamba_n_groups")
    size = fields.count("mamba_expand") * fields.count("hidden_size")
    if fields.get("mamba_d_ssm") is not None:
        size = fields.count("mamba_d_ssm")
    value_dim = size // num_heads if fields.get("mamba_d_head") == "auto" else fields.count("mamba_d_head")
    if num_heads * value_dim != size or num_heads % num_groups:
        raise ValueError(
            f"{fields.where}: mamba_n_heads is {num_heads}, mamba_d_head {value_dim} and mamba_n_groups {num_groups}; "
            f"expected heads with {size} features in total, and groups of equal size."
        )
    bias = fields.flag("mamba_proj_bias")
    read = {
        "num_key_heads": num_groups,
        "num_heads": num_heads,
        "key_dim": fields.count("mamba_d_state"),
        "value_dim": value_dim,
        "num_taps": fields.count("mamba_d_conv"),
        "activation": ACTIVATION_NAMES.get(str(fields.get("hidden_act"))),
        "convolution_bias": fields.flag("mamba_conv_bias"),
        "in_bias": bias,
        "out_bias": bias,
        "norm": "after_gate",
        "step_limits": _step_limits(fields),
    }
    return Mamba2Config(**{**read, **facts})


def _step_limits(fields: ConfigFields) -> tuple[float, float]:
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    # JSON has no infinity; transformers writes it as an object.
    limits = limits if isinstance(limits, list | tuple) else [limits]
    limits = [math.inf if x == {"__float__": "Infinity"} else x for x in limits]
    if len(limits) != 2 or not all(isinstance(x, int | float) for x in limits) or not 0 <= limits[0] < limits[1]:
        raise ValueError(f"{fields.where}: time_step_limit is {limits!r}; expected two rising numbers of at least 0.")
    return limits[0], limits[1]


def _optional_rope(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    positions = fields.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise fields.wrong("position_embedding_type", "rope, nope or null")
    return rope_config(fields) if positions == "rope" else None


def _attention_in_listed_layers(fields: ConfigFields, layer: int) -> str:
    return "full_attention" if layer in (fields.layer_numbers("attn_layer_indices") or []) else "linear_attention"


def _with_nemotron_layer_types(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace older files' pattern of letters by layer types, whose number is the number of layers."""
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    layer_types, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if layer_types is None and isinstance(pattern, str):
        layer_types = [letters.get(letter, letter) for letter in pattern]
    if layer_types is None and pattern is None:  # transformers' default, whatever num_hidden_layers is
        layer_types = ["linear_attention", "moe", "full_attention", "mlp"]
    if not isinstance(layer_types, list):
        return config
    return {**config, "layer_types": layer_types, "num_hidden_layers": len(layer_types)}


def _nemotron_mamba2(fields: ConfigFields) -> Mamba2Config:
    num_heads, num_groups = fields.count("mamba_num_heads"), fields.count("n_groups")
    if num_heads % num_groups:
        raise fields.wrong("mamba_num_heads", f"a multiple of n_groups, {num_groups}")
    activation, bias = fields.one_of("mamba_hidden_act", sorted(ACTIVATION_NAMES)), fields.flag("use_bias")
    sizes = fields.count("ssm_state_size"), fields.count("mamba_head_dim"), fields.count("conv_kernel")
    usual_name: Any = ACTIVATION_NAMES[activation]
    biases = fields.flag("use_conv_bias"), bias, bias
    return Mamba2Config(num_groups, num_heads, *sizes, usual_name, *biases, "after_gate", _step_limits(fields))


# A table: related fields share a line.
# fmt: off
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}
FEED_FORWARD_ON_DISK = {
    "post_attention_layernorm": ("pre_ff_layernorm",), "model.norm": ("model.final_layernorm",),
    "mlp.": ("feed_forward.",),
}

MAMBA: dict[str, Family] = {
    "granitemoehybrid": Family(
        facts={
            **DENSE["granite"].facts, "mlp_bias": False, "fused_gate_up": True,
            "intermediate_size": lambda fields: fields.count("shared_intermediate_size"),
        },
        mixers={"linear_attention": mamba2}, layer_type=lambda fields, layer: "linear_attention",
        rope=_optional_rope,
        mixture={
            **GRANITE_MIXTURE, "num_experts": lambda fields: fields.count("num_local_experts", least=0),
            "shared_intermediate_size": lambda fields: fields.count("shared_intermediate_size"),
        },
        on_disk={
            **GRANITE_ON_DISK, "mlp.gate_up_proj": ("shared_mlp.input_linear",),
            "mlp.down_proj": ("shared_mlp.output_linear",),
        },
        in_memory=GRANITE_IN_MEMORY,
        defaults={
            **MIXTURE_DEFAULTS, **MAMBA_DEFAULTS, **DENSE["granite"].defaults, "num_local_experts": 8,
            "num_experts_per_tok": 2, "intermediate_size": 11008, "shared_intermediate_size": 1024,
        },
    ),
    "bamba": Family(
        facts={**ATTENTION_BIAS, "mlp_bias": flag("mlp_bias")}, mixers={"linear_attention": mamba2},
        layer_type=_attention_in_listed_layers, rope=partial_rope, on_disk=FEED_FORWARD_ON_DISK,
        defaults={
            **MAMBA_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "nemotron_h": Family(
        # As in transformers, which ties nothing here.
        facts={"tied_embeddings": False, "mlp_bias": flag("mlp_bias"), "gated": False},
        preprocessed=_with_nemotron_layer_types, mixers={"linear_attention": _nemotron_mamba2}, one_part_per_layer=True,
        rope=lambda fields, layer, is_windowed: None, activation_field="mlp_hidden_act",
        activations={"relu2": "relu2"}, norm_eps_field="layer_norm_epsilon",
        mixture={
            **CORRECTED_MIXTURE, "shared_intermediate_size": count("moe_shared_expert_intermediate_size"),
        },
        on_disk={
            "mlp.experts.gate_up_proj": ("mixer.experts.*.up_proj.weight",),
            "mlp.experts.down_proj": ("mixer.experts.*.down_proj.weight",), "input_layernorm": ("norm",),
            "post_attention_layernorm": ("norm",), "self_attn.": ("mixer.",), "mamba.": ("mixer.",),
            "mlp.": ("mixer.",), "model.embed_tokens": ("model.embeddings",), "model.norm": ("model.norm_f",),
        },
        prefix_on_disk="backbone.", in_memory={"mlp.experts.gate_up_proj": "mixer.experts.up_proj"},
        defaults={
            **CORRECTED_MIXTURE_DEFAULTS, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 4096, "intermediate_size": 21504, "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5, "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
            "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False,
        },
    ),
}
# fmt: on
