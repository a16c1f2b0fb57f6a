"""Families whose attention has a gate projection, or other numbers of heads in layers with a window."""

from lean_ft.models.families.family import (
    ATTENTION_BIAS,
    Family,
    count,
    number,
    rope_in_windowed_layers,
)
from lean_ft.models.families.mixtures import EXPERTS_ON_DISK
from lean_ft.system.config_fields import ConfigFields


def _all_but_every_nth(fields: ConfigFields, layer: int) -> bool:
    return (layer + 1) % fields.count("global_attn_every_n_layers") != 0


# A table: related fields share a line.
# fmt: off
UNUSUAL_ATTENTION: dict[str, Family] = {
    "afmoe": Family(
        facts={
            **ATTENTION_BIAS, "norm_placement": "both", "qk_norm": "head", "attention_gate": "own",
            "embedding_multiplier": lambda fields: (
                fields.count("hidden_size") ** 0.5 if fields.flag("mup_enabled") else 1.0
            ),
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
}
# fmt: on
