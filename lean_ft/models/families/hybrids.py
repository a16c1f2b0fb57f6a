"""Families in which some layers have a delta rule or a short convolution instead of attention."""

from functools import partial
from typing import Any

from lean_ft.models.config import DeltaRuleConfig, FamilyParts, ShortConvolutionConfig
from lean_ft.models.families.family import ATTENTION_BIAS, Family, count, flag, number, partial_rope
from lean_ft.models.families.mixtures import EXPERTS_ON_DISK, MIXTURE, MIXTURE_DEFAULTS, every_nth_layer_but_some
from lean_ft.models.moe import Router
from lean_ft.system.config_fields import ConfigFields

# Layer types if config.json does not list them.


def _attention_in_every_nth_layer(fields: ConfigFields, layer: int) -> str:
    return "linear_attention" if (layer + 1) % fields.count("full_attention_interval") else "full_attention"


def _attention_in_full_attn_idxs(fields: ConfigFields, layer: int) -> str:
    with_attention = fields.layer_numbers("full_attn_idxs")
    return "full_attention" if with_attention is None or layer in with_attention else "conv"


def _delta_rule(fields: ConfigFields, fused_projections: bool) -> DeltaRuleConfig:
    num_key_heads, num_heads = (fields.count(f"linear_num_{of}_heads") for of in ("key", "value"))
    if num_heads % num_key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {num_key_heads}")
    key_dim, value_dim = (fields.count(f"linear_{of}_head_dim") for of in ("key", "value"))
    num_taps = fields.count("linear_conv_kernel_dim")
    return DeltaRuleConfig(num_key_heads, num_heads, key_dim, value_dim, num_taps, fused_projections)


def _listed_type(fields: ConfigFields, layer: int) -> str:
    return fields.of_each_layer("layer_types")[layer]


def _short_convolution(fields: ConfigFields) -> ShortConvolutionConfig:
    return ShortConvolutionConfig(fields.count("hidden_size"), fields.count("conv_L_cache"), fields.flag("conv_bias"))


def _adjusted_intermediate_size(fields: ConfigFields) -> int:
    """Two thirds of the configured size times a factor, rounded up to a multiple, unless adjustment is off."""
    size = fields.count("intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim")
    if fields.flag("block_auto_adjust_ff_dim"):
        size = int(2 * size / 3)
        if fields.get("block_ffn_dim_multiplier") is not None:
            multiple = fields.count("block_multiple_of")
            size = -(-int(fields.positive("block_ffn_dim_multiplier") * size) // multiple) * multiple
    return size


class Lfm2Router(Router):
    weights_sum_offset = 1e-6


# A table: related fields share a line.
# fmt: off
_QWEN_HYBRID: dict[str, Any] = {  # of qwen3_next and 3.5
    "facts": {**ATTENTION_BIAS, "norm_weight_offset": 1.0, "qk_norm": "head", "attention_gate": "in_query"},
    "layer_type": _attention_in_every_nth_layer, "rope": partial_rope,
}
_QWEN_HYBRID_DEFAULTS = {
    "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_HYBRID_MIXTURE = {
    **MIXTURE, "intermediate_size": count("moe_intermediate_size"),
    "shared_intermediate_size": count("shared_expert_intermediate_size"), "shared_gate": True,
}
_DELTA_RULE = {"linear_attention": partial(_delta_rule, fused_projections=False)}

_LFM2_FACTS = {
    "qk_norm": "head", "activation": "silu", "tied_embeddings": lambda fields: fields.flag(
        "tie_word_embeddings" if fields.get("tie_embedding") is None else "tie_embedding"
    ),
}
_LFM2_ON_DISK = {
    "input_layernorm": ("operator_norm",), "post_attention_layernorm": ("ffn_norm",),
    "model.norm": ("model.embedding_norm",), "self_attn.o_proj": ("self_attn.out_proj",),
    "self_attn.q_norm": ("self_attn.q_layernorm",), "self_attn.k_norm": ("self_attn.k_layernorm",),
    "mlp.gate_proj": ("feed_forward.w1",), "mlp.up_proj": ("feed_forward.w3",), "mlp.down_proj": ("feed_forward.w2",),
}
_LFM2_DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": True, "conv_L_cache": 3, "conv_bias": False,
}

HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family(
        scores_as="Qwen3Next", **_QWEN_HYBRID,
        mixers={"linear_attention": partial(_delta_rule, fused_projections=True)},
        mixture={**_QWEN_HYBRID_MIXTURE, "weights_sum_to_one": flag("norm_topk_prob")},
        has_mixture=every_nth_layer_but_some, on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS, **_QWEN_HYBRID_DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 5632,
            "num_local_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        },
    ),
    "qwen3_5_text": Family(
        scores_as="Qwen3_5Text", **_QWEN_HYBRID, mixers=_DELTA_RULE,
        defaults={**_QWEN_HYBRID_DEFAULTS, "num_key_value_heads": 4},
    ),
    "qwen3_5_moe_text": Family(
        **_QWEN_HYBRID, mixers=_DELTA_RULE, mixture={**_QWEN_HYBRID_MIXTURE, "weights_sum_to_one": True},
        on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS, **_QWEN_HYBRID_DEFAULTS, "num_key_value_heads": 2,
            "intermediate_size": 512,  # no layer has it
            "num_local_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "lfm2": Family(
        facts={**_LFM2_FACTS, "intermediate_size": _adjusted_intermediate_size}, mixers={"conv": _short_convolution},
        layer_type=_attention_in_full_attn_idxs, norm_eps_field="norm_eps", on_disk=_LFM2_ON_DISK,
        defaults={
            **_LFM2_DEFAULTS, "intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
    ),
    "lfm2_moe": Family(
        facts=_LFM2_FACTS, mixers={"conv": _short_convolution}, layer_type=_listed_type, norm_eps_field="norm_eps",
        mixture={
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"), "activation": "silu",
            "weights_sum_to_one": flag("norm_topk_prob"), "score": "sigmoid",
            "has_score_correction": flag("use_expert_bias"), "weights_factor": number("routed_scaling_factor"),
            "router_aux_loss_coef": 0.0,
        },
        parts=FamilyParts(router=Lfm2Router, splits=True),
        has_mixture=lambda fields, layer: layer >= fields.count("num_dense_layers", least=0),
        on_disk={
            "mlp.gate.e_score_correction_bias": ("feed_forward.expert_bias",),
            "mlp.experts.gate_up_proj": ("feed_forward.experts.*.w1.weight", "feed_forward.experts.*.w3.weight"),
            "mlp.experts.down_proj": ("feed_forward.experts.*.w2.weight",), **_LFM2_ON_DISK,
            "mlp.gate": ("feed_forward.gate",),
        },
        in_memory={"mlp.experts": "feed_forward.experts"},
        defaults={
            **_LFM2_DEFAULTS, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
            "num_experts_per_tok": 4, "num_local_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
    ),
}
# fmt: on
