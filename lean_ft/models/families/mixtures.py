"""Families with attention in every layer and a mixture of experts in some or all layers."""

import math
from dataclasses import replace

from lean_ft.models.config import LatentConfig
from lean_ft.models.families.family import (
    ATTENTION_BIAS,
    QWEN_DEFAULTS,
    Family,
    all_but_every_nth_layer,
    count,
    every_layer,
    flag,
    has_rope,
    number,
    partial_rope,
    rope_in_windowed_layers,
    upper_layers,
)
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import head_dim_of, rope_config, rope_settings
from lean_ft.system.config_fields import ConfigFields


def _num_experts(fields: ConfigFields) -> int:
    """transformers has written either field for the same family; defaults have the first."""
    names = [name for name in ("num_local_experts", "num_experts") if fields.config.get(name) is not None]
    counts = {name: fields.count(name) for name in names or ["num_local_experts"]}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{fields.where}: {counts}; expected equal numbers. Remove the wrong field.")
    return next(iter(counts.values()))


def _router_aux_loss_coef(fields: ConfigFields) -> float:
    """transformers adds the loss only if it also returns the router's logits."""
    return fields.positive("router_aux_loss_coef", or_0=True) if fields.flag("output_router_logits") else 0.0


def _every_second_of_the_lower_layers(fields: ConfigFields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer % 2 == 0 and not upper_layers(fields, layer)


# Which layers have experts.


def every_nth_layer_but_some(fields: ConfigFields, layer: int) -> bool:
    without, step = fields.layer_numbers("mlp_only_layers") or [], fields.count("decoder_sparse_step")
    return layer not in without and (layer + 1) % step == 0


def _all_layers_but_the_first(fields: ConfigFields, layer: int) -> bool:
    return layer >= fields.count("first_k_dense_replace", least=0)


def _rope_of_rotary_dim(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """Partial rotation; published files have the number of rotated features."""
    if fields.get("rotary_dim") is None:
        return rope_config(fields, may_be_partial=True)
    key, settings = rope_settings(fields)
    share = {"partial_rotary_factor": fields.count("rotary_dim") / head_dim_of(fields)}
    return rope_config(fields, settings={**share, **settings}, key=key, may_be_partial=True)


def _every_nth_layer_between(fields: ConfigFields, layer: int) -> bool:
    first, last = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_end_index", least=-1)
    return first <= layer and (layer <= last or last == -1) and (layer + 1) % fields.count("moe_layer_interval") == 0


def _listed_or_every_nth_layer(fields: ConfigFields, layer: int) -> bool:
    layers, step = fields.layer_numbers("moe_layers"), fields.count("interleave_moe_layer_step")
    return (layer + 1) % step == 0 if layers is None else layer in layers


def _interleaved_rope_or_growing_queries(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    """Layers without rotation may have queries that grow with the position."""
    if has_rope(fields, layer):
        return rope_config(fields, interleaved=True, in_float32=True)
    if not fields.flag("attn_temperature_tuning"):
        return None
    growth = {"query_growth": fields.positive("attn_scale"), "query_growth_positions": fields.count("floor_scale")}
    return RopeConfig(theta=1.0, scaling="proportional", nonzero_fraction=0.0, query_growth_start=1, **growth)


def _latent(fields: ConfigFields) -> LatentConfig:
    query_rank = None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank")
    return LatentConfig(
        fields.count("kv_lora_rank"), query_rank, fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    )


def _between_full_layers(fields: ConfigFields, layer: int) -> bool:
    """Full attention in the first two layers, in every fourth and in the last."""
    return layer > 1 and layer % 4 != 1 and layer != fields.count("num_hidden_layers") - 1


def _yarn_scale(fields: ConfigFields) -> float:
    """The scale of the scores, which grows with `yarn`'s factor."""
    scale = (fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")) ** -0.5
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("mscale_all_dim") or not settings.get("factor"):
        return scale
    own = fields.object(key)
    factor = own.positive("factor")
    return scale * (1.0 if factor <= 1 else 0.1 * own.positive("mscale_all_dim") * math.log(factor) + 1.0) ** 2


def _longrope_with_two_scales(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """`longrope` with separate factors of cos and sin for short and long documents."""
    rope = rope_config(fields, ignored=("short_mscale", "long_mscale"))
    if rope.scaling == "default":
        return rope
    own = fields.object(rope_settings(fields)[0])
    if rope.scaling != "longrope":
        raise ValueError(f"{own.where} has the rope type {rope.scaling!r}; expected longrope in this family.")
    return replace(
        rope, attention_factor=own.positive("short_mscale"), long_attention_factor=own.positive("long_mscale")
    )


def _head_bias(fields: ConfigFields) -> bool:
    if fields.flag("lm_head_bias") and fields.flag("tie_word_embeddings"):
        raise ValueError(f"{fields.where}: lm_head_bias and tie_word_embeddings are both true; expected one at most.")
    return fields.flag("lm_head_bias")


def _two_experts_per_token(fields: ConfigFields) -> int:
    if (number := fields.count("num_experts_per_tok")) != 2:
        raise fields.wrong("num_experts_per_tok", "2, which transformers always uses")
    return number


# A table: related fields share a line.
# fmt: off
MIXTURE = {
    "num_experts": _num_experts, "experts_per_token": count("num_experts_per_tok"),
    "intermediate_size": count("intermediate_size"), "router_aux_loss_coef": _router_aux_loss_coef,
}
MIXTURE_DEFAULTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
EXPERTS_ON_DISK = {
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}

_MIXTRAL_ON_DISK = {
    "mlp.gate.": ("block_sparse_moe.gate.",),
    "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.*.w2.weight",),
}
_MIXTRAL_IN_MEMORY = {"mlp.": "mlp."}  # transformers has renamed the module, not its stored tensors
CORRECTED_MIXTURE = {
    "num_experts": count("n_routed_experts"), "experts_per_token": count("num_experts_per_tok"),
    "intermediate_size": count("moe_intermediate_size"), "weights_sum_to_one": flag("norm_topk_prob"),
    "shared_intermediate_size": lambda fields: (
        fields.count("moe_intermediate_size") * fields.count("n_shared_experts", least=0)
    ),
    "shared_name": "shared_experts", "score": "sigmoid", "has_score_correction": True, "num_groups": count("n_group"),
    "groups_per_token": count("topk_group"), "weights_factor": number("routed_scaling_factor"),
    "router_in_float32": True,
}
CORRECTED_MIXTURE_DEFAULTS = {
    "num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0,
}

MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        scores_as="Mixtral", has_window=every_layer, mixture={**MIXTURE, "weights_sum_to_one": True}, on_disk=_MIXTRAL_ON_DISK,
        in_memory=_MIXTRAL_IN_MEMORY,
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "phimoe": Family(
        scores_as="Phimoe", facts={**ATTENTION_BIAS, "norm_centered": True, "norm_bias": True, "head_bias": _head_bias},
        has_window=every_layer, rope=_longrope_with_two_scales,
        mixture={
            **MIXTURE, "experts_per_token": _two_experts_per_token, "weights_sum_to_one": False, "router_name": "router",
            "sparsemixer_margin": lambda fields: 2 * fields.positive("router_jitter_noise", or_0=True),
        },
        on_disk={**_MIXTRAL_ON_DISK, "mlp.router.": ("block_sparse_moe.gate.",)}, in_memory=_MIXTRAL_IN_MEMORY,
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
            "lm_head_bias": False,
        },
    ),
    "qwen3_moe": Family(
        scores_as="Qwen3Moe", facts={**ATTENTION_BIAS, "qk_norm": "head"},
        has_window=lambda fields, layer: fields.flag("use_sliding_window") and every_layer(fields, layer),
        mixture={
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": flag("norm_topk_prob"),
        },
        has_mixture=every_nth_layer_but_some, on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS, **QWEN_DEFAULTS, "num_key_value_heads": 4, "num_local_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1,
        },
    ),
    "olmoe": Family(
        facts={**ATTENTION_BIAS, "qk_norm": "projection"},
        mixture={**MIXTURE, "weights_sum_to_one": flag("norm_topk_prob")}, on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_local_experts": 64,
            "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
        },
    ),
    "qwen2_moe": Family(
        scores_as="Qwen2Moe", facts={"qkv_bias": flag("qkv_bias")}, has_window=_every_second_of_the_lower_layers,
        reads_layer_types=True,
        mixture={
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": flag("norm_topk_prob"),
            "shared_intermediate_size": count("shared_expert_intermediate_size"), "shared_gate": True,
        },
        has_mixture=every_nth_layer_but_some, on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS, **QWEN_DEFAULTS, "num_key_value_heads": 16, "intermediate_size": 5632,
            "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1,
            "qkv_bias": True,
        },
    ),
    "glm4_moe": Family(
        facts={
            "qkv_bias": flag("attention_bias"),
            "qk_norm": lambda fields: "head" if fields.flag("use_qk_norm") else None,
        },
        rope=partial_rope, mixture=CORRECTED_MIXTURE, has_mixture=_all_layers_but_the_first, on_disk=EXPERTS_ON_DISK,
        defaults={
            **CORRECTED_MIXTURE_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False, "moe_intermediate_size": 1408,
            "n_routed_experts": 128, "first_k_dense_replace": 1,
        },
    ),
    "ernie4_5_moe": Family(
        rope=lambda fields, layer, is_windowed: rope_config(fields, interleaved=True, in_float32=True),
        mixture={
            "num_experts": count("moe_num_experts"), "experts_per_token": count("moe_k"),
            "intermediate_size": count("moe_intermediate_size"), "weights_sum_to_one": True,
            "shared_intermediate_size": lambda fields: (
                fields.count("moe_intermediate_size") * fields.count("moe_num_shared_experts", least=0)
            ),
            "shared_name": "shared_experts", "has_score_correction": True, "correction_is_row": True, "router_in_float32": True,
            "router_weight_in_float32": True, "router_aux_loss_coef": _router_aux_loss_coef,
        },
        has_mixture=_every_nth_layer_between,
        on_disk={"mlp.gate.e_score_correction_bias": ("mlp.moe_statics.e_score_correction_bias",), **EXPERTS_ON_DISK},
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 5e5, "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6,
            "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
    ),
    "minimax_m2": Family(
        facts={"qk_norm": "projection"}, rope=_rope_of_rotary_dim,
        mixture={**MIXTURE, "weights_sum_to_one": True, "score": "sigmoid", "has_score_correction": True},
        on_disk={"mlp.gate.e_score": ("block_sparse_moe.e_score",), **_MIXTRAL_ON_DISK}, in_memory=_MIXTRAL_IN_MEMORY,
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
            "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536,
        },
    ),
    "deepseek_v3": Family(
        scores_as="DeepseekV3", facts={
            **ATTENTION_BIAS, "num_kv_heads": count("num_attention_heads"), "attention_scale": _yarn_scale,
            "latent": _latent,
        },
        rope=lambda fields, layer, is_windowed: rope_config(fields, interleaved=fields.flag("rope_interleave")),
        mixture=CORRECTED_MIXTURE, has_mixture=_all_layers_but_the_first, on_disk=EXPERTS_ON_DISK,
        defaults={
            **CORRECTED_MIXTURE_DEFAULTS, "max_position_embeddings": 4096, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_interleave": True,
        },
    ),
    "llama4_text": Family(
        facts={**ATTENTION_BIAS, "intermediate_size": count("intermediate_size_mlp")}, has_window=has_rope,
        window_kind="chunked_attention", reads_layer_types=True,
        layer_facts=lambda fields, _, layer: {"unit_qk": fields.flag("use_qk_norm") and has_rope(fields, layer)},
        # An empty list is none.
        preprocessed=lambda config: {k: v for k, v in config.items() if k != "no_rope_layers" or v},
        rope=_interleaved_rope_or_growing_queries,
        mixture={
            "num_experts": _num_experts, "experts_per_token": count("num_experts_per_tok"),
            "intermediate_size": count("intermediate_size"), "weights_sum_to_one": False, "router_name": "router",
            "score": "sigmoid", "scales_input": True, "input_first": True, "peft_expects_input_first": False,
            "shared_intermediate_size": count("intermediate_size"),
        },
        has_mixture=_listed_or_every_nth_layer, on_disk={"mlp.": ("feed_forward.",)},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 5e5, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
            "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
            "floor_scale": 8192, "attn_scale": 0.1,
        },
    ),
    "gpt_oss": Family(
        scores_as="GptOss", facts={**ATTENTION_BIAS, "attention_sinks": True},
        has_window=lambda fields, layer: layer % 2 == 0, reads_layer_types=True,
        mixture={
            **MIXTURE, "weights_sum_to_one": True, "router_name": "router", "router_bias": True, "expert_bias": True,
            "input_first": True, "gates_interleaved": True, "gate_scale": number("swiglu_alpha"), "up_offset": 1.0,
            "limit": number("swiglu_limit"),
        },
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "num_local_experts": 128,
            "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "flint": Family(
        facts={**ATTENTION_BIAS, "qk_norm": "head", "attention_sinks": True, "sinks_in_float32": True},
        has_window=_between_full_layers, reads_layer_types=True, rope=rope_in_windowed_layers, has_mixture=every_nth_layer_but_some,
        # null is the default.
        preprocessed=lambda config: {k: v for k, v in config.items() if k != "mlp_only_layers" or v is not None},
        mixture={
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"), "weights_sum_to_one": flag("norm_topk_prob"),
            "shared_intermediate_size": count("shared_expert_intermediate_size"), "score": "sigmoid",
            "router_in_float32": True, "router_weight_in_float32": True,
        },
        on_disk={"self_attn.sinks": ("self_attn.softmax_offset",), **EXPERTS_ON_DISK},
        in_memory={"self_attn.sinks": "self_attn.sinks"},
        defaults={
            **MIXTURE_DEFAULTS, "intermediate_size": 6144, "num_key_value_heads": 4, "max_position_embeddings": 262144,
            "sliding_window": 513, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024, "num_experts_per_tok": 6, "num_local_experts": 256,
            "norm_topk_prob": True, "mlp_only_layers": [0, 1], "head_dim": 128, "router_aux_loss_coef": 0.0005,
        },
    ),
    "kolibri1": Family(
        facts={"qk_norm": "head", "norm_placement": "both"}, has_window=all_but_every_nth_layer,
        reads_layer_types=True, rope=rope_in_windowed_layers,
        mixture={
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"), "weights_sum_to_one": flag("norm_topk_prob"),
            "shared_intermediate_size": count("shared_expert_intermediate_size"), "shared_name": "shared_experts",
            "score": "sigmoid", "has_score_correction": True, "corrects_logits": True, "router_in_float32": True,
        },
        on_disk={
            "post_feedforward_layernorm": ("post_ffn_norm",), "post_attention_layernorm": ("post_attn_norm",),
            "pre_feedforward_layernorm": ("post_attention_layernorm",),
            "mlp.gate.e_score_correction_bias": ("moe.router.expert_bias",), **EXPERTS_ON_DISK,
        },
        in_memory={
            "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            "post_attention_layernorm": "post_self_attn_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 262144, "sliding_window": 513,
            "moe_intermediate_size": 512, "num_experts_per_tok": 6, "num_local_experts": 384, "norm_topk_prob": False,
            "head_dim": 128, "shared_expert_intermediate_size": 512, "sliding_window_pattern": 5,
            "intermediate_size": 512,  # read by no layer
        },
    ),
}
# fmt: on
