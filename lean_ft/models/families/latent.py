"""Families with multi-head latent attention."""

import math
from typing import Any

from lean_ft.models.config import FamilyParts, LatentConfig
from lean_ft.models.families.corrected_mixtures import CORRECTED_MIXTURE, CORRECTED_MIXTURE_DEFAULTS
from lean_ft.models.families.family import ATTENTION_BIAS, Family, count, flag, number
from lean_ft.models.families.mixtures import EXPERTS_ON_DISK, all_layers_but_the_first
from lean_ft.models.moe import Router
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import rope_config, rope_settings
from lean_ft.system.config_fields import ConfigFields


def _latent(fields: ConfigFields, value_dim: int | None = None) -> LatentConfig:
    query_rank = None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank")
    value_dim = value_dim or fields.count("v_head_dim")
    return LatentConfig(fields.count("kv_lora_rank"), query_rank, fields.count("qk_nope_head_dim"), value_dim)


def _latent_of_hidden_heads(fields: ConfigFields) -> LatentConfig:
    """Without `v_head_dim`, the heads' values divide the hidden size."""
    if fields.get("v_head_dim") is not None:
        return _latent(fields)
    num_heads = fields.count("num_attention_heads")
    return _latent(fields, fields.count("hidden_size", multiple_of=num_heads) // num_heads)


def _yarn_scale(fields: ConfigFields) -> float:
    """The scale of the scores, which grows with `yarn`'s factor."""
    scale = (fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")) ** -0.5
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("mscale_all_dim") or not settings.get("factor"):
        return scale
    rope_fields = fields.object(key)
    factor = rope_fields.positive("factor")
    return scale * (1.0 if factor <= 1 else 0.1 * rope_fields.positive("mscale_all_dim") * math.log(factor) + 1.0) ** 2


def _rope(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    return rope_config(fields, interleaved=fields.flag("rope_interleave"))


def _rope_with_growing_queries(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """`partial_rotary_factor` says again which features of a head are rotated."""
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict):
        return rope_config(fields)
    rotated, plain = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    if fields.get("head_dim") is not None:
        fields.expect("the sum of qk_nope_head_dim and qk_rope_head_dim", head_dim=plain + rotated)
    rope_fields = fields.object(key, partial_rotary_factor=rotated / (plain + rotated), llama_4_scaling_beta=0.0)
    if abs(rope_fields.positive("partial_rotary_factor") * (plain + rotated) - rotated) > 1e-3:
        raise rope_fields.wrong("partial_rotary_factor", "the share of qk_rope_head_dim in all features of a head")
    growth = rope_fields.positive("llama_4_scaling_beta", or_0=True)
    facts: dict[str, Any] = (
        {"query_growth": growth, "query_growth_positions": rope_fields.positive(_ORIGINAL)} if growth else {}
    )
    dropped = ("partial_rotary_factor", "llama_4_scaling_beta", "max_position_embeddings")
    kept = {name: value for name, value in settings.items() if name not in dropped}
    return rope_config(fields, settings=kept, key=key, interleaved=fields.flag("rope_interleave"), **facts)


def _num_groups(fields: ConfigFields) -> int:
    """Without a limit of groups, the fields of groups have no effect."""
    method = fields.one_of("topk_method", ["greedy", "group_limited_greedy"])
    return fields.count("n_group") if method == "group_limited_greedy" else 1


def _never_normalized(fields: ConfigFields) -> bool:
    fields.expect("as transformers never normalizes weights here", norm_topk_prob=False)
    return False


def _initializer_range(fields: ConfigFields) -> float:
    """By default, it falls with the hidden size."""
    if fields.config.get("initializer_range") is None:
        return 2.0 / (5.0 * fields.count("hidden_size")) ** 0.5
    return fields.positive("initializer_range")


class DeepseekV2Router(Router):
    scores_per_group = 1


_ORIGINAL = "original_max_position_embeddings"


def _depth_multiplier(fields: ConfigFields) -> float:
    depth, num_layers = fields.positive_or_null("scale_depth"), fields.count("num_hidden_layers")
    return (math.sqrt(num_layers) if depth is None else depth) / math.sqrt(num_layers)


def _width_divisor(fields: ConfigFields) -> float:
    base = fields.positive_or_null("dim_model_base")
    return 1.0 if base is None else fields.count("hidden_size") / base


# A table: related fields share a line.
# fmt: off
_LATENT: dict[str, Any] = {
    **ATTENTION_BIAS, "num_kv_heads": count("num_attention_heads"), "attention_scale": _yarn_scale, "latent": _latent,
}
_LATENT_DEFAULTS = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "rope_interleave": True,
}

LATENT: dict[str, Family] = {
    "deepseek_v3": Family(
        scores_as="DeepseekV3", facts=_LATENT, rope=_rope,
        mixture=CORRECTED_MIXTURE, has_mixture=all_layers_but_the_first, on_disk=EXPERTS_ON_DISK,
        defaults={
            **_LATENT_DEFAULTS, **CORRECTED_MIXTURE_DEFAULTS, "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3,
        },
    ),
    "deepseek_v2": Family(
        scores_as="DeepseekV2", facts=_LATENT, parts=FamilyParts(router=DeepseekV2Router, splits=True),
        rope=lambda fields, layer, is_windowed: rope_config(fields, interleaved=True, in_float32=True),
        mixture={
            **CORRECTED_MIXTURE, "weights_sum_to_one": _never_normalized, "score": "softmax",
            "has_score_correction": False, "num_groups": _num_groups,
            "groups_per_token": lambda fields: fields.count("topk_group") if _num_groups(fields) > 1 else 1,
        },
        has_mixture=all_layers_but_the_first, on_disk=EXPERTS_ON_DISK,
        defaults={
            **_LATENT_DEFAULTS, "max_position_embeddings": 2048, "moe_intermediate_size": 1407,
            "n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
            "topk_method": "greedy", "first_k_dense_replace": 0,
        },
    ),
    "mistral4": Family(
        scores_as="Mistral4", facts=_LATENT, rope=_rope_with_growing_queries,
        mixture={
            **CORRECTED_MIXTURE, "score": "softmax", "has_score_correction": False, "router_in_float32": False,
        },
        has_mixture=all_layers_but_the_first,
        defaults={
            **_LATENT_DEFAULTS, **CORRECTED_MIXTURE_DEFAULTS, "max_position_embeddings": 1048576,
            "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4,
            "first_k_dense_replace": 0, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, _ORIGINAL: 8192, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "minicpm3": Family(
        scores_as="MiniCPM3",
        facts={
            **_LATENT, "mlp_bias": flag("mlp_bias"), "latent": _latent_of_hidden_heads,
            "embedding_multiplier": number("scale_emb"), "embedding_multiplier_in_weight_dtype": True,
            "residual_multiplier": _depth_multiplier, "logits_divisor": _width_divisor,
        },
        defaults={
            "max_position_embeddings": 32768, "initializer_range": 0.1, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12,
            "scale_depth": 1.4, "dim_model_base": 256,
        },
    ),
    "youtu": Family(
        facts={**_LATENT, "initializer_range": _initializer_range}, rope=_rope,
        defaults={**_LATENT_DEFAULTS, "max_position_embeddings": 131072, "tie_word_embeddings": True},
    ),
}
# fmt: on
