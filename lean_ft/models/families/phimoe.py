"""Phi-3.5-MoE: a token's two experts are chosen one after the other (sparsemixer), and longrope has two factors of cos
and sin.

Source: Liu et al. 2024, https://arxiv.org/abs/2409.12136, without sampling.

Shapes: B batch, T tokens of a row, N tokens of a batch, E experts, K experts per token.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lean_ft.models.config import DecoderConfig, FamilyParts, MixtureConfig
from lean_ft.models.families.family import ATTENTION_BIAS, Family, every_layer
from lean_ft.models.families.mixtures import MIXTRAL_IN_MEMORY, MIXTRAL_ON_DISK, MIXTURE, MIXTURE_DEFAULTS
from lean_ft.models.layers import wide
from lean_ft.models.moe import Router, best_experts
from lean_ft.models.rope import RopeConfig, RotaryEmbedding
from lean_ft.models.rope_settings import rope_config, rope_settings
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class Phimoe:
    # Each weight is a softmax over the remaining experts whose scores are below the best by at most this relative
    # margin.
    sparsemixer_margin: float
    long_attention_factor: float  # of cos and sin beyond the original length


class Sparsemixer(Router):
    margin: float

    @classmethod
    def of(cls, config: DecoderConfig, mixture: MixtureConfig) -> Self:
        router = super().of(config, mixture)
        router.margin = config.own.sparsemixer_margin
        return router

    def choose(self, logits: Tensor, config: MixtureConfig, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Router.choose`."""
        logits = wide(logits)
        weights, chosen, left = [], [], logits
        for k in range(config.experts_per_token):
            best, index = best_experts(left.detach(), 1, None if recorded is None else recorded[:, k, None])
            is_far = (best - logits.detach()) / logits.detach().abs().maximum(best) > self.margin
            weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, index))
            chosen.append(index)
            left = left.scatter(-1, index, float("-inf"))
        return torch.cat(weights, -1), torch.cat(chosen, -1)


class TwoScales(RotaryEmbedding):
    long_attention_factor: float

    @classmethod
    def of(cls, config: DecoderConfig, rope: RopeConfig, head_dim: int) -> Self:
        rotary = super().of(config, rope, head_dim)
        rotary.long_attention_factor = config.own.long_attention_factor
        return rotary

    def factor(self, positions: Tensor, lengths: Tensor | None) -> float | Tensor:
        factor = super().factor(positions, lengths)
        if self.rope.scaling != "longrope":
            return factor
        return torch.where(self.is_long(positions, lengths), self.long_attention_factor, factor)


def _rope(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    rope = rope_config(fields, ignored=("short_mscale", "long_mscale"))
    if rope.scaling == "default":
        return rope
    scales = fields.object(rope_settings(fields)[0])
    if rope.scaling != "longrope":
        raise ValueError(f"{scales.where} has the rope type {rope.scaling!r}; expected longrope in this family.")
    return replace(rope, attention_factor=scales.positive("short_mscale"))


def _own(fields: ConfigFields) -> Phimoe:
    margin = 2 * fields.positive("router_jitter_noise", or_0=True)
    has_scales = rope_config(fields, ignored=("short_mscale", "long_mscale")).scaling == "longrope"
    long_factor = fields.object(rope_settings(fields)[0]).positive("long_mscale") if has_scales else 1.0
    return Phimoe(margin, long_factor)


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
PHIMOE: dict[str, Family] = {
    "phimoe": Family(
        scores_as="Phimoe",
        facts={**ATTENTION_BIAS, "norm_centered": True, "norm_parameters": "weight_and_bias", "head_bias": _head_bias},
        parts=FamilyParts(router=Sparsemixer, rotary=TwoScales, splits=True), own=_own,
        has_window=every_layer, rope=_rope,
        mixture={
            **MIXTURE, "experts_per_token": _two_experts_per_token, "weights_sum_to_one": False,
            "router_name": "router",
        },
        on_disk={**MIXTRAL_ON_DISK, "mlp.router.": ("block_sparse_moe.gate.",)}, in_memory=MIXTRAL_IN_MEMORY,
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
            "lm_head_bias": False,
        },
    ),
}
# fmt: on
