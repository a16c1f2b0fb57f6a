"""Cohere's mixtures (Command A+): the output of routed and shared experts is their mean.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lean_ft.models.block import Block
from lean_ft.models.config import DecoderConfig, FamilyParts
from lean_ft.models.families.family import Family, count
from lean_ft.models.families.layer_norm import COHERE, COHERE2_DEFAULTS
from lean_ft.models.families.mixtures import EXPERTS_ON_DISK, sparse_layers
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import rope_config
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class Cohere2Moe:
    averages_experts: bool  # the outputs of routed and shared experts are averaged, not added


class AveragingBlock(Block):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.averages_experts: bool = config.own.averages_experts and config.layers[layer_index].mixture is not None

    def fed(self, read: Tensor, hidden: Tensor, recorded: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        added, routes = super().fed(read, hidden, recorded)
        return (added / 2 if self.averages_experts else added), routes


def _own(fields: ConfigFields) -> Cohere2Moe:
    combination = fields.one_of("shared_expert_combination_strategy", ("average", "sum"))
    return Cohere2Moe(combination == "average" and fields.count("num_shared_experts", least=0) > 0)


def _has_window(fields: ConfigFields, layer: int) -> bool:
    """Whether a layer has a window. The dense layers, which come first, repeat one pattern, and the others a second."""
    num_dense = fields.count("first_k_dense_replace", least=0)
    of_dense, of_others = map(fields.count, ("prefix_dense_sliding_window_pattern", "sliding_window_pattern"))
    return (layer + 1) % of_dense != 0 if layer < num_dense else (layer - num_dense + 1) % of_others != 0


def _rope(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    """In layers with a window, and in dense layers if none of them needs to have one."""
    is_forced = fields.count("prefix_dense_sliding_window_pattern") == 1 and not sparse_layers(fields, layer)
    return rope_config(fields, interleaved=True, in_float32=True) if is_windowed or is_forced else None


def _dense_layers(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    own_size = fields.get("prefix_dense_intermediate_size")
    if own_size is None or sparse_layers(fields, layer):
        return {}
    return {"intermediate_size": fields.count("prefix_dense_intermediate_size")}


def _norm_eps(fields: ConfigFields) -> float:
    return fields.positive("layer_norm_eps" if fields.get("rms_norm_eps") is None else "rms_norm_eps")


def _score(fields: ConfigFields) -> str:
    return fields.one_of("expert_selection_fn", ("softmax", "sigmoid"))


# A table: related fields share a line.
# fmt: off
COHERE2_MOE: dict[str, Family] = {
    "cohere2_moe": Family(
        facts={
            **COHERE, "norm_eps": _norm_eps, "norm_centered": lambda fields: fields.get("rms_norm_eps") is None,
        },
        parts=FamilyParts(block=AveragingBlock, splits=True), own=_own,
        has_window=_has_window, reads_layer_types=True, layer_facts=_dense_layers, rope=_rope,
        norm_eps_field="layer_norm_eps", has_mixture=sparse_layers,
        mixture={
            "num_experts": count("num_experts"), "experts_per_token": count("num_experts_per_tok"),
            "intermediate_size": count("intermediate_size"), "score": _score,
            # The softmax is that of the chosen experts.
            "weights_sum_to_one": lambda fields: fields.flag("norm_topk_prob") or _score(fields) == "softmax",
            "shared_intermediate_size": lambda fields: (
                fields.count("num_shared_experts", least=0) * fields.count("intermediate_size")
            ),
            "shared_name": "shared_experts",
        },
        on_disk=EXPERTS_ON_DISK,
        defaults={
            **COHERE2_DEFAULTS, "head_dim": 128, "intermediate_size": 22528, "rms_norm_eps": None, "num_experts": 8,
            "num_experts_per_tok": 2, "num_shared_experts": 0, "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax", "norm_topk_prob": True, "first_k_dense_replace": 0,
            "prefix_dense_sliding_window_pattern": 1, "prefix_dense_intermediate_size": None,
        },
    ),
}
# fmt: on
