"""Families with attention in every layer and a mixture of experts in some or all layers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lean_ft.models.config import FamilyParts, MixtureConfig
from lean_ft.models.families.dense import DENSE
from lean_ft.models.families.family import (
    ATTENTION_BIAS,
    QWEN_DEFAULTS,
    Family,
    all_but_every_nth_layer,
    count,
    every_layer,
    flag,
    rope_by_layer,
    rope_by_window,
    rope_in_windowed_layers,
    upper_layers,
)
from lean_ft.models.moe import Router
from lean_ft.system.config_fields import ConfigFields


def num_experts_of(fields: ConfigFields) -> int:
    """transformers has written either field for the same family; defaults have the first."""
    names = [name for name in ("num_local_experts", "num_experts") if fields.config.get(name) is not None]
    counts = {name: fields.count(name) for name in names or ["num_local_experts"]}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{fields.where}: {counts}; expected equal numbers. Remove the wrong field.")
    return next(iter(counts.values()))


def router_aux_loss_coef(fields: ConfigFields) -> float:
    """transformers adds the loss only if it also returns the router's logits."""
    return fields.positive("router_aux_loss_coef", or_0=True) if fields.flag("output_router_logits") else 0.0


def _every_second_of_the_lower_layers(fields: ConfigFields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer % 2 == 0 and not upper_layers(fields, layer)


# Which layers have experts.


def every_nth_layer_but_some(fields: ConfigFields, layer: int) -> bool:
    without, step = fields.layer_numbers("mlp_only_layers") or [], fields.count("decoder_sparse_step")
    return layer not in without and (layer + 1) % step == 0


def all_layers_but_the_first(fields: ConfigFields, layer: int) -> bool:
    return layer >= fields.count("first_k_dense_replace", least=0)


def sparse_layers(fields: ConfigFields, layer: int) -> bool:
    """Those that `mlp_layer_types` lists; without it, all but the first."""
    if fields.get("mlp_layer_types") is None:
        return all_layers_but_the_first(fields, layer)
    layer_type = fields.of_each_layer("mlp_layer_types")[layer]
    if layer_type not in ("dense", "sparse"):
        raise fields.wrong("mlp_layer_types", "dense or sparse for each layer")
    return layer_type == "sparse"


def _between_full_layers(fields: ConfigFields, layer: int) -> bool:
    """Full attention in the first two layers, in every fourth and in the last."""
    return layer > 1 and layer % 4 != 1 and layer != fields.count("num_hidden_layers") - 1


def _always_normed(fields: ConfigFields) -> str:
    fields.expect("which transformers always computes", use_qk_norm=True)
    return "turned_head"


def _with_one_number_of_experts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Published files list `moe_topk` for each layer."""
    number = config.get("moe_topk", config.get("num_experts_per_tok"))
    is_same = isinstance(number, list) and len(set(map(str, number))) == 1
    return config if number is None else {**config, "moe_topk": number[0] if is_same else number}


class LogitCorrectedRouter(Router):
    """The correction is added to logits, not to their sigmoids (Kolibri 1)."""

    def ranks(self, logits: Tensor, scores: Tensor, config: MixtureConfig) -> Tensor:
        return logits.detach() + self.e_score_correction_bias


# A table: related fields share a line.
# fmt: off
MIXTURE = {
    "num_experts": num_experts_of, "experts_per_token": count("num_experts_per_tok"),
    "intermediate_size": count("intermediate_size"), "router_aux_loss_coef": router_aux_loss_coef,
}
MIXTURE_DEFAULTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
EXPERTS_ON_DISK = {
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}

MIXTRAL_ON_DISK = {
    "mlp.gate.": ("block_sparse_moe.gate.",),
    "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.*.w2.weight",),
}
MIXTRAL_IN_MEMORY = {"mlp.": "mlp."}  # transformers has renamed the module, not its stored tensors
_GRANITE: dict[str, Any] = {**DENSE["granite"].facts, "mlp_bias": False}
GRANITE_MIXTURE = {**MIXTURE, "weights_sum_to_one": True, "router_name": "router", "shared_is_fused": True}
_GRANITE_SHARED_MIXTURE = {**GRANITE_MIXTURE, "shared_intermediate_size": count("shared_intermediate_size", least=0)}
_GRANITE_SHARED_ON_DISK = {
    "mlp.shared_expert.gate_up_proj": ("shared_mlp.input_linear",),
    "mlp.shared_expert.down_proj": ("shared_mlp.output_linear",),
}
GRANITE_ON_DISK = {
    "mlp.router.": ("block_sparse_moe.router.layer.",),
    "mlp.experts.gate_up_proj": ("block_sparse_moe.input_linear.weight",),
    "mlp.experts.down_proj": ("block_sparse_moe.output_linear.weight",), **_GRANITE_SHARED_ON_DISK,
}
GRANITE_IN_MEMORY = {"mlp.router": "block_sparse_moe.router", "mlp.experts": "block_sparse_moe.experts"}
_GRANITE_DEFAULTS = {
    **MIXTURE_DEFAULTS, **DENSE["granite"].defaults, "num_local_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 11008, "shared_intermediate_size": 0,
}

MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        scores_as="Mixtral", has_window=every_layer, mixture={**MIXTURE, "weights_sum_to_one": True},
        on_disk=MIXTRAL_ON_DISK,
        in_memory=MIXTRAL_IN_MEMORY,
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
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
    "granitemoe": Family(
        facts=_GRANITE, mixture=GRANITE_MIXTURE, on_disk=GRANITE_ON_DISK, in_memory=GRANITE_IN_MEMORY,
        defaults=_GRANITE_DEFAULTS,
    ),
    "granitemoeshared": Family(
        facts=_GRANITE, mixture=_GRANITE_SHARED_MIXTURE, on_disk=GRANITE_ON_DISK, in_memory=GRANITE_IN_MEMORY,
        defaults=_GRANITE_DEFAULTS,
    ),
    "granitemoe_swa": Family(
        facts={**_GRANITE, "attention_sinks": True}, has_window=lambda fields, layer: layer % 4 != 0,
        reads_layer_types=True, rope=rope_by_layer, mixture=_GRANITE_SHARED_MIXTURE,
        on_disk={**_GRANITE_SHARED_ON_DISK, "mlp.": ("block_sparse_moe.",)},
        defaults={**_GRANITE_DEFAULTS, "sliding_window": 128},
    ),
    "hunyuan_v1_moe": Family(
        scores_as="HunYuanMoEV1", facts={**ATTENTION_BIAS, "qk_norm": _always_normed},
        rope=DENSE["hunyuan_v1_dense"].rope, preprocessed=_with_one_number_of_experts,
        mixture={
            **MIXTURE, "experts_per_token": count("moe_topk"), "weights_sum_to_one": True,
            "shared_intermediate_size": count("intermediate_size"), "router_aux_loss_coef": 0.0,
            "router_in_float32": True, "router_weight_in_float32": True,
        },
        on_disk={
            **DENSE["hunyuan_v1_dense"].on_disk, "mlp.gate": ("mlp.gate.wg",),
            "mlp.shared_expert.": ("mlp.shared_mlp.",), **EXPERTS_ON_DISK,
        },
        defaults={
            **MIXTURE_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_local_experts": 1,
            "moe_topk": 1,
        },
    ),
    "flex_olmo": Family(
        facts={**ATTENTION_BIAS, "norm_placement": "post", "qk_norm": "projection"},
        mixture={**MIXTURE, "weights_sum_to_one": flag("norm_topk_prob")}, on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS, "max_position_embeddings": 4096, "rope_theta": 5e5, "num_local_experts": 7,
            "num_experts_per_tok": 5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
        },
    ),
    "mellum": Family(
        facts={**ATTENTION_BIAS, "qk_norm": "head"}, has_window=lambda fields, layer: False, reads_layer_types=True,
        rope=rope_by_window,
        mixture={
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": flag("norm_topk_prob"),
        },
        has_mixture=sparse_layers, on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072,
            "sliding_window": 1024, "num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
            "norm_topk_prob": True, "first_k_dense_replace": 0, "rope_local_base_freq": 1e4, "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "flint": Family(
        facts={**ATTENTION_BIAS, "qk_norm": "head", "attention_sinks": True},
        parts=FamilyParts(in_float32=(".sinks",), splits=True),
        has_window=_between_full_layers, reads_layer_types=True, rope=rope_in_windowed_layers,
        has_mixture=every_nth_layer_but_some,
        # null is the default.
        preprocessed=lambda config: {k: v for k, v in config.items() if k != "mlp_only_layers" or v is not None},
        mixture={
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": flag("norm_topk_prob"),
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
            **MIXTURE, "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": flag("norm_topk_prob"),
            "shared_intermediate_size": count("shared_expert_intermediate_size"), "shared_name": "shared_experts",
            "score": "sigmoid", "has_score_correction": True, "router_in_float32": True,
        },
        parts=FamilyParts(router=LogitCorrectedRouter, splits=True),
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
