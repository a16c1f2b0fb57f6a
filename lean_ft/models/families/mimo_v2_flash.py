"""MiMo-V2-Flash: values of fewer features than keys, multiplied by a number, and other numbers of heads, and sinks, in
layers with a window.

Shapes: B batch, T tokens of a row, H heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lean_ft.models.attention.attention import Attention
from lean_ft.models.config import DecoderConfig, FamilyParts
from lean_ft.models.families.corrected_mixtures import CORRECTED_MIXTURE, CORRECTED_MIXTURE_DEFAULTS
from lean_ft.models.families.family import Family, flag, rope_by_window
from lean_ft.models.families.mixtures import EXPERTS_ON_DISK, sparse_layers
from lean_ft.models.rope import RopeConfig
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class Mimo:
    value_dim: int  # features of a head's values, at most `head_dim`
    value_multiplier: float


class MimoAttention(Attention):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.value_multiplier: float = config.own.value_multiplier
        if config.layers[layer_index].window is None:
            self.sinks = None

    def features_of_values(self, config: DecoderConfig) -> int:
        return config.own.value_dim

    def by_head(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().by_head(query, key, value)
        if self.value_multiplier != 1.0:
            value = value * self.value_multiplier
        # Kernels need queries, keys and values of one size.
        return query, key, F.pad(value, (0, self.head_dim - self.value_dim))

    def attended(self, *tensors: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().attended(*tensors)[..., : self.value_dim]


def _all_but_the_first_and_every_sixth(fields: ConfigFields, layer: int) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


def _partial_rope_by_window(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    """The share of a head that is rotated, rounded down to whole features."""
    rope, size = rope_by_window(fields, layer, is_windowed, may_be_partial=True), fields.count("head_dim")
    return replace(rope, rotary_fraction=int(size * rope.rotary_fraction) / size)


def _own(fields: ConfigFields) -> Mimo:
    value_dim = fields.count("v_head_dim", most=fields.count("head_dim"))
    return Mimo(value_dim, fields.positive("attention_value_scale"))


def _window_heads(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    """Layers with a window have twice the keys."""
    shape = 2 * fields.count("num_key_value_heads"), fields.count("head_dim")
    return {"kv_shape": shape} if is_windowed[layer] else {}


# Each layer type has its own rotation.
_WITHOUT_EFFECT = ("first_k_dense_replace", "rope_theta", "partial_rotary_factor", "rope_scaling")


def _with_window_and_own_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Null factors are 1. `sliding_window_size` counts the positions before a query, and rope without a share has a
    third."""
    fields = {name: value for name, value in config.items() if name not in _WITHOUT_EFFECT}
    fields |= {name: 1.0 for name in ("routed_scaling_factor", "attention_value_scale") if fields.get(name, 0) is None}
    if type(size := fields.pop("sliding_window_size", None)) is int:
        fields["sliding_window"] = size + 1
    if isinstance(ropes := fields.get("rope_parameters"), dict):
        share = {"partial_rotary_factor": 0.334}
        fields["rope_parameters"] = {
            name: share | rope if isinstance(rope, dict) and rope.get("rope_type", "default") == "default" else rope
            for name, rope in ropes.items()
        }
    return fields


# A table: related fields share a line.
# fmt: off
MIMO_V2_FLASH: dict[str, Family] = {
    "mimo_v2_flash": Family(
        facts={"qkv_bias": flag("attention_bias"), "attention_sinks": True},
        parts=FamilyParts(attention=MimoAttention, splits=True), own=_own,
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
