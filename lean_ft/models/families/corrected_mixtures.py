"""Families with a mixture of experts whose router has a correction of each expert's score."""

from functools import partial

import torch
from torch import nn

from lean_ft.models.config import FamilyParts, MixtureConfig
from lean_ft.models.families.dense import DENSE
from lean_ft.models.families.family import ATTENTION_BIAS, Family, count, every_layer, flag, number, partial_rope
from lean_ft.models.families.mixtures import (
    EXPERTS_ON_DISK,
    MIXTRAL_IN_MEMORY,
    MIXTRAL_ON_DISK,
    MIXTURE,
    MIXTURE_DEFAULTS,
    all_layers_but_the_first,
    num_experts_of,
    router_aux_loss_coef,
    sparse_layers,
)
from lean_ft.models.moe import Router
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import head_dim_of, rope_config, rope_settings
from lean_ft.system.config_fields import ConfigFields


def _layers_with_window_above(fields: ConfigFields, layer: int) -> bool:
    return every_layer(fields, layer) and layer >= fields.count("max_window_layers", least=0)


def _every_nth_layer_between(fields: ConfigFields, layer: int) -> bool:
    first, last = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_end_index", least=-1)
    return first <= layer and (layer <= last or last == -1) and (layer + 1) % fields.count("moe_layer_interval") == 0


def _rope_of_rotary_dim(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """Partial rotation; published files have the number of rotated features."""
    if fields.get("rotary_dim") is None:
        return rope_config(fields, may_be_partial=True)
    key, settings = rope_settings(fields)
    share = {"partial_rotary_factor": fields.count("rotary_dim") / head_dim_of(fields)}
    return rope_config(fields, settings={**share, **settings}, key=key, may_be_partial=True)


def _shared_intermediate_size(fields: ConfigFields, number: str) -> int:
    return fields.count("moe_intermediate_size") * fields.count(number, least=0)


class RouterWithRow(Router):
    """The correction is stored as (1, E) (ERNIE 4.5)."""

    def add_others(self, config: MixtureConfig) -> None:
        self.e_score_correction_bias = nn.Buffer(torch.empty(1, config.num_experts))


# A table: related fields share a line.
# fmt: off
CORRECTED_MIXTURE = {
    "num_experts": count("n_routed_experts"), "experts_per_token": count("num_experts_per_tok"),
    "intermediate_size": count("moe_intermediate_size"), "weights_sum_to_one": flag("norm_topk_prob"),
    "shared_intermediate_size": partial(_shared_intermediate_size, number="n_shared_experts"),
    "shared_name": "shared_experts", "score": "sigmoid", "has_score_correction": True, "num_groups": count("n_group"),
    "groups_per_token": count("topk_group"), "weights_factor": number("routed_scaling_factor"),
    "router_in_float32": True,
}
CORRECTED_MIXTURE_DEFAULTS = {
    "num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0,
}

CORRECTED_MIXTURES: dict[str, Family] = {
    "glm4_moe": Family(
        facts={
            "qkv_bias": flag("attention_bias"),
            "qk_norm": lambda fields: "head" if fields.flag("use_qk_norm") else None,
        },
        rope=partial_rope, mixture=CORRECTED_MIXTURE, has_mixture=all_layers_but_the_first, on_disk=EXPERTS_ON_DISK,
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
            "shared_intermediate_size": partial(_shared_intermediate_size, number="moe_num_shared_experts"),
            "shared_name": "shared_experts", "has_score_correction": True, "router_in_float32": True,
            "router_weight_in_float32": True, "router_aux_loss_coef": router_aux_loss_coef,
        },
        parts=FamilyParts(router=RouterWithRow, splits=True),
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
        on_disk={"mlp.gate.e_score": ("block_sparse_moe.e_score",), **MIXTRAL_ON_DISK}, in_memory=MIXTRAL_IN_MEMORY,
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
            "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536,
        },
    ),
    "dots1": Family(
        facts={**ATTENTION_BIAS, "qk_norm": "head"}, has_window=_layers_with_window_above, reads_layer_types=True,
        mixture=CORRECTED_MIXTURE, has_mixture=all_layers_but_the_first, on_disk=EXPERTS_ON_DISK,
        defaults={
            **CORRECTED_MIXTURE_DEFAULTS, "num_key_value_heads": 32, "max_position_embeddings": 2048,
            "moe_intermediate_size": 1408, "n_shared_experts": None, "num_experts_per_tok": None,
            "norm_topk_prob": False, "first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62,
        },
    ),
    "solar_open": Family(
        facts={"qkv_bias": flag("attention_bias")}, mixture=CORRECTED_MIXTURE, on_disk=EXPERTS_ON_DISK,
        defaults={
            **CORRECTED_MIXTURE_DEFAULTS, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "moe_intermediate_size": 1280, "n_routed_experts": 128,
            "intermediate_size": 1280,  # no layer has it
        },
    ),
    "exaone_moe": Family(
        facts={"qk_norm": "head"}, has_window=DENSE["exaone4"].has_window, reads_layer_types=True,
        rope=DENSE["exaone4"].rope, mixture={
            **CORRECTED_MIXTURE, "num_experts": count("num_experts"),
            "shared_intermediate_size": partial(_shared_intermediate_size, number="num_shared_experts"),
        },
        has_mixture=sparse_layers,
        on_disk={"mlp.gate.e_score": ("mlp.e_score",), **EXPERTS_ON_DISK}, in_memory={"mlp.gate.": "mlp.gate."},
        defaults={
            **CORRECTED_MIXTURE_DEFAULTS, **DENSE["exaone4"].defaults, "moe_intermediate_size": 1024,
            "num_experts": 64, "num_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        },
    ),
    "hy_v3": Family(
        facts={**ATTENTION_BIAS, "qk_norm": "head"},
        mixture={
            **CORRECTED_MIXTURE, "num_experts": num_experts_of, "weights_sum_to_one": True, "num_groups": 1,
            "groups_per_token": 1, "weights_factor": number("router_scaling_factor"),
            "shared_intermediate_size": partial(_shared_intermediate_size, number="num_shared_experts"),
        },
        has_mixture=sparse_layers,
        on_disk={
            "mlp.gate.e_score_correction_bias": ("mlp.expert_bias",), "mlp.gate.": ("mlp.router.gate.",),
            "mlp.shared_experts.": ("mlp.shared_mlp.",), **EXPERTS_ON_DISK,
        },
        in_memory={"mlp.": "mlp."},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0, "initializer_range": 0.006, "num_local_experts": 192,
            "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826, "first_k_dense_replace": 1,
        },
    ),
}
# fmt: on
