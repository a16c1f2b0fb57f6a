"""Llama 4: rotated queries and keys are normed, layers with rotation attend within chunks of positions, and others have
queries that grow with the position. Experts weigh their inputs.

Shapes: B batch, T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from lean_ft.models.attention.attention import Attention
from lean_ft.models.config import DecoderConfig, FamilyParts, MixtureConfig
from lean_ft.models.families.family import ATTENTION_BIAS, Family, count, has_rope
from lean_ft.models.families.mixtures import num_experts_of
from lean_ft.models.layers import unit_rms
from lean_ft.models.mix import ExpertFormula
from lean_ft.models.moe import Experts
from lean_ft.models.rope import RopeConfig, RotaryEmbedding
from lean_ft.models.rope_settings import rope_config
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class Llama4Layer:
    unit_qk: bool  # each head's rotated queries and keys are RMS-normed without a weight
    chunk: int | None  # a query sees its own chunk of this many positions; None: no chunks


class Llama4Attention(Attention):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        own: Llama4Layer = config.layers[layer_index].own
        self.unit_eps = config.norm_eps if own.unit_qk else None
        self.scoring = replace(self.scoring, chunk=own.chunk)

    def turned(self, query: Tensor, key: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key = super().turned(query, key, cos, sin)
        if self.unit_eps is None:
            return query, key
        return unit_rms(query, self.unit_eps), unit_rms(key, self.unit_eps)


class Llama4Experts(Experts):
    @classmethod
    def of(cls, config: DecoderConfig, mixture: MixtureConfig) -> Self:
        experts = cls(config.hidden_size, mixture, ExpertFormula.of(mixture, scales_input=True, input_first=True))
        experts.input_first_in_adapters = False  # PEFT takes their inputs for outputs
        return experts


class Llama4Rotary(RotaryEmbedding):
    query_growth_start = 1


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
    return RopeConfig(theta=1.0, scaling="proportional", nonzero_fraction=0.0, **growth)


def _layer_facts(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    chunk = fields.count("attention_chunk_size") if is_windowed[layer] else None
    return {"own": Llama4Layer(fields.flag("use_qk_norm") and has_rope(fields, layer), chunk)}


# A table: related fields share a line.
# fmt: off
LLAMA4: dict[str, Family] = {
    "llama4_text": Family(
        facts={**ATTENTION_BIAS, "intermediate_size": count("intermediate_size_mlp")}, has_window=has_rope,
        window_kind="chunked_attention", reads_layer_types=True,
        parts=FamilyParts(attention=Llama4Attention, experts=Llama4Experts, rotary=Llama4Rotary, splits=True),
        layer_facts=_layer_facts,
        # An empty list is none.
        preprocessed=lambda config: {k: v for k, v in config.items() if k != "no_rope_layers" or v},
        rope=_interleaved_rope_or_growing_queries,
        mixture={
            "num_experts": num_experts_of, "experts_per_token": count("num_experts_per_tok"),
            "intermediate_size": count("intermediate_size"), "weights_sum_to_one": False, "router_name": "router",
            "score": "sigmoid", "shared_intermediate_size": count("intermediate_size"),
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
}
# fmt: on
