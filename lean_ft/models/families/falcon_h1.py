"""Falcon-H1: Mamba-2 in parallel to attention in every layer, and multipliers of most projections.

Source: https://arxiv.org/abs/2507.22448.

Shapes: B rows, T tokens of a row, D hidden size, I intermediate features.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lean_ft.models.attention.attention import Attention, KeysAndValues
from lean_ft.models.cache import StateCache
from lean_ft.models.config import DecoderConfig, FamilyParts, LayerConfig, Mamba2Config
from lean_ft.models.families.family import ATTENTION_BIAS, Family, flag, number
from lean_ft.models.families.mamba import FEED_FORWARD_ON_DISK, MAMBA_DEFAULTS, mamba2
from lean_ft.models.layers import MLP
from lean_ft.models.rope_settings import head_dim_of
from lean_ft.models.state.mamba2 import Mamba2
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class FalconH1:
    """Multipliers."""

    attention_multipliers: tuple[float, float]  # of the input and of the output
    mlp_multipliers: tuple[float, float]  # of the gate before its activation, and of the output
    in_multiplier: float  # of the input of Mamba-2
    multipliers: tuple[float, ...]  # of its projected gates, values, keys, queries and steps
    out_multiplier: float


class FalconAttention(Attention):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.multipliers: tuple[float, float] = config.own.attention_multipliers

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, *context: Any
    ) -> Tensor | tuple[Tensor, KeysAndValues]:
        into, out_of = self.multipliers
        attended = super().forward(_times(hidden, into), *context)
        assert isinstance(attended, Tensor), "no other layer uses its keys"
        return _times(attended, out_of)


class FalconMLP(MLP):
    multipliers: tuple[float, float]

    @classmethod
    def of(cls, config: DecoderConfig, layer: LayerConfig) -> Self:
        mlp = super().of(config, layer)
        mlp.multipliers = config.own.mlp_multipliers
        return mlp

    def forward(self, x: Tensor) -> Tensor:
        return _times(super().forward(x), self.multipliers[1])

    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().inner(_times(gate, self.multipliers[0]), up)


class FalconMamba2(Mamba2):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.multipliers: FalconH1 = config.own

    def mix(self, x: Tensor, cu_seqlens: Tensor | None, cache: StateCache | None) -> Tensor:
        return _times(super().mix(x, cu_seqlens, cache), self.multipliers.out_multiplier)

    def projected(self, x: Tensor) -> Tensor:
        projected = super().projected(_times(x, self.multipliers.in_multiplier))
        if all(multiplier == 1.0 for multiplier in self.multipliers.multipliers):
            return projected
        sizes = self.value_size, self.value_size, self.key_size, self.key_size, self.config.num_heads
        pairs = zip(projected.split(sizes, -1), self.multipliers.multipliers, strict=True)
        return torch.cat([part * multiplier for part, multiplier in pairs], -1)


def _times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


def _multipliers(fields: ConfigFields, name: str, number_of: int) -> tuple[float, ...]:
    values = fields.get(name)
    if values is None:
        return (1.0,) * number_of
    if not isinstance(values, list) or len(values) != number_of or not all(isinstance(x, int | float) for x in values):
        raise fields.wrong(name, f"{number_of} numbers")
    return tuple(float(x) for x in values)


def _mixer(fields: ConfigFields) -> Mamba2Config:
    norm = None
    if fields.flag("mamba_rms_norm"):
        norm = "before_gate" if fields.flag("mamba_norm_before_gate") else "after_gate"
    return mamba2(
        fields,
        out_bias=fields.flag("projectors_bias"),
        norm=norm,
    )


def _own(fields: ConfigFields) -> FalconH1:
    return FalconH1(
        attention_multipliers=(
            fields.positive("attention_in_multiplier"),
            fields.positive("attention_out_multiplier"),
        ),
        mlp_multipliers=_multipliers(fields, "mlp_multipliers", 2),  # pyright: ignore[reportArgumentType]
        in_multiplier=fields.positive("ssm_in_multiplier"),
        multipliers=_multipliers(fields, "ssm_multipliers", 5),
        out_multiplier=fields.positive("ssm_out_multiplier"),
    )


# A table: related fields share a line.
# fmt: off
FALCON_H1: dict[str, Family] = {
    "falcon_h1": Family(
        facts={
            **ATTENTION_BIAS, "mlp_bias": flag("mlp_bias"),
            "attention_scale": lambda fields: head_dim_of(fields) ** -0.5 * fields.positive("key_multiplier"),
            "embedding_multiplier": number("embedding_multiplier"),
            "logits_divisor": lambda fields: 1 / fields.positive("lm_head_multiplier"),
        },
        parts=FamilyParts(attention=FalconAttention, mlp=FalconMLP, mixer=FalconMamba2), own=_own,
        mixers={"hybrid": _mixer}, layer_type=lambda fields, layer: "hybrid", on_disk=FEED_FORWARD_ON_DISK,
        defaults={
            **MAMBA_DEFAULTS,
            **{f"{of}_multiplier": 1.0 for of in ("lm_head", "embedding", "key", "ssm_in", "ssm_out")},
            **{f"attention_{of}_multiplier": 1.0 for of in ("in", "out")}, "num_key_value_heads": 8,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "projectors_bias": False,
            "mamba_rms_norm": False, "mamba_norm_before_gate": True,
        },
    ),
}
# fmt: on
