"""Gemma 3n: several residual streams, of which each layer computes one and predicts the others (AltUp), a low-rank
branch beside attention (LAuReL), gates with a cutoff, and an input of each token for each layer.

A layer predicts all streams from its input by coefficients that depend on the token. Attention and the feed-forward
layer compute the active stream; what they add to its prediction corrects every stream.

Sources: Baykal et al. 2023, https://arxiv.org/abs/2301.13310; Menghani et al. 2024, https://arxiv.org/abs/2411.07501.

Shapes: B batch, T tokens of a row, S streams, D hidden size, I intermediate features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.block import LayerResult, Pass
from lean_ft.models.config import DecoderConfig, FamilyParts, LayerConfig
from lean_ft.models.families.family import Family, number_or_null, rope_by_window
from lean_ft.models.families.gemma import GEMMA_DEFAULTS, GEMMA_FACTS
from lean_ft.models.families.gemma4 import BlockWithInput, LayerInputs, TrunkWithInputs, kv_from_layer
from lean_ft.models.layers import MLP, gated, residual_norm, wide
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class Streams:
    """Several residual streams."""

    number: int
    active: int  # the stream that layers compute
    coefficient_limit: float | None  # coefficients are clamped to this from both sides in training
    scales_input: bool  # the gates of per-layer inputs read the active stream times a trained vector


@dataclass(frozen=True)
class Gemma3n(LayerInputs):
    streams: Streams
    branch_rank: int  # of a low-rank branch beside attention; their sum is divided by sqrt(2)


@dataclass(frozen=True)
class Gemma3nLayer:
    gate_sparsity: float  # share of the gates that a cutoff, from their mean and deviation, sets to 0


class _Coefficients(nn.Linear):
    """A small linear layer that is never quantized. In training its weight is clamped to `limit` from both sides."""

    def __init__(self, in_features: int, out_features: int, limit: float | None = None) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.limit = limit

    def forward(self, input: Tensor) -> Tensor:
        limit = self.limit if self.training else None
        return F.linear(input, self.weight if limit is None else self.weight.clamp(-limit, limit))


class ResidualStreams(nn.Module):
    """How one layer predicts and corrects the streams."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        streams, size = config.own.streams, config.hidden_size
        self.active, self.scales = streams.active, streams.scales_input
        self.initial = {"correct_output_scale": 0.0}
        scale = torch.zeros(size)
        self.correct_output_scale = nn.Parameter(scale) if self.scales else nn.Buffer(scale)  # stored in either case
        self.correction_coefs = _Coefficients(streams.number, streams.number, streams.coefficient_limit)
        self.prediction_coefs = _Coefficients(streams.number, streams.number**2, streams.coefficient_limit)
        self.modality_router = _Coefficients(size, streams.number)
        self.router_norm = residual_norm(config)

    def _routed(self, x: Tensor) -> Tensor:
        """(..., S) from a stream (..., D)."""
        return wide(self.modality_router(self.router_norm(x) / x.shape[-1])).tanh().to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """Each stream plus a weighted sum of all: (B, T, S, D)."""
        number = streams.shape[-2]
        coefficients = self.prediction_coefs(self._routed(streams[..., self.active, :]))
        return streams + coefficients.unflatten(-1, (number, number)) @ streams

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """The predicted streams, corrected by the active stream (B, T, D) that a layer computed."""
        coefficients = self.correction_coefs(self._routed(computed)) + 1.0  # (B, T, S)
        missed = computed - predicted[..., self.active, :]
        return predicted + coefficients.unsqueeze(-1) * missed.unsqueeze(-2)

    def read(self, streams: Tensor) -> Tensor:
        """The active stream (B, T, D) as the gate of a per-layer input reads it."""
        active = streams[..., self.active, :]
        return active * self.correct_output_scale if self.scales else active

    def add(self, streams: Tensor, added: Tensor) -> Tensor:
        """Add (B, T, D) to all streams but the first."""
        first, others = streams.split((1, streams.shape[-2] - 1), -2)
        return torch.cat((first, others + added.unsqueeze(-2)), -2)


class LowRankBranch(nn.Module):
    """x + norm(right(left(x)))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.linear_left = nn.Linear(config.hidden_size, config.own.branch_rank, bias=False)
        self.linear_right = nn.Linear(config.own.branch_rank, config.hidden_size, bias=False)
        self.post_laurel_norm = residual_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


def _as_large_as(x: Tensor, projected: Tensor) -> Tensor:
    expected, own = (wide(values).square().mean(-1, keepdim=True) for values in (x, projected))
    return (projected * expected.sqrt() / own.clamp(min=1e-5).sqrt()).to(x.dtype)


class SparseMLP(MLP):
    """Of each token's gates, a cutoff is subtracted, below which they are 0: `gate_sparsity` of them if they were
    normally distributed."""

    num_deviations: float | None  # of the cutoff, above the mean of the gates

    @classmethod
    def of(cls, config: DecoderConfig, layer: LayerConfig) -> Self:
        mlp, sparsity = super().of(config, layer), layer.own.gate_sparsity
        mlp.num_deviations = NormalDist().inv_cdf(sparsity) if sparsity else None
        return mlp

    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.num_deviations is None:
            return super().inner(gate, up)
        # Not overwritten: the backward pass of ReLU reads the gates.
        return gated(_above_cutoff(gate, self.num_deviations), up, self.activation)


def _above_cutoff(x: Tensor, num_deviations: float) -> Tensor:
    """ReLU(x - cutoff), where the cutoff is that many standard deviations above the mean of the features."""
    deviation, mean = torch.std_mean(x, -1, correction=0, keepdim=True)
    factor = torch.full((), num_deviations, dtype=x.dtype, device=x.device)  # rounded to the dtype first
    return F.relu(x - (mean + deviation * factor))


class Gemma3nTrunk(TrunkWithInputs):
    """The streams begin as projections of the embeddings, and end as the mean of their projections."""

    altup_projections: nn.ModuleList  # of the embeddings to the other streams
    altup_unembed_projections: nn.ModuleList  # and of these streams

    def add_others(self, config: DecoderConfig) -> None:
        self.num_streams = config.own.streams.number
        size = config.hidden_size
        for name in ("altup_projections", "altup_unembed_projections"):
            projections = (nn.Linear(size, size, bias=False) for _ in range(self.num_streams - 1))
            self.add_module(name, nn.ModuleList(projections))
        super().add_others(config)

    def into_layers(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The streams (B, T, S, D) of embeddings (B, T, D): these, and a projection for each other stream, of equal
        magnitude."""
        hidden, inputs = super().into_layers(hidden, input_ids)
        projected = (_as_large_as(hidden, project(hidden)) for project in self.altup_projections)
        return torch.stack((hidden, *projected), -2), inputs

    def out_of_layers(self, hidden: Tensor) -> Tensor:
        """Of streams (B, T, S, D): the mean of the first and of projections of the others, of equal magnitude,
        normed."""
        first, *others = hidden.unbind(-2)
        pairs = zip(self.altup_unembed_projections, others, strict=True)
        projected = [_as_large_as(first, project(x)) for project, x in pairs]
        return super().out_of_layers(torch.stack((first, *projected)).mean(0))


class Gemma3nBlock(BlockWithInput):
    """A layer that computes the active stream and corrects all streams (B, T, S, D)."""

    def add_others(self, config: DecoderConfig, layer: LayerConfig) -> None:
        self.altup, self.laurel = ResidualStreams(config), LowRankBranch(config)
        super().add_others(config, layer)

    def forward(self, hidden: Tensor, context: Pass) -> LayerResult:
        """As `Block`, with streams for hidden states."""
        predicted = self.altup.predict(hidden)
        computed, routes, kept = super().forward(predicted[..., self.altup.active, :], context)
        streams = self.altup.correct(predicted, computed)
        assert context.layer_input is not None
        added = self.of_input(self.altup.read(streams), context.layer_input)
        return self.altup.add(streams, added), routes, kept

    def joined(self, hidden: Tensor, normed: Tensor, mixed: Tensor) -> Tensor:
        return (super().joined(hidden, normed, mixed) + self.laurel(normed)) / 2**0.5


def _gemma3n_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """One size of feed-forward layers, and a list beside it where config.json has a list. Without
    query_pre_attn_scalar, which published files have and transformers ignores."""
    config = {name: value for name, value in config.items() if name != "query_pre_attn_scalar"}
    sizes = config.get("intermediate_size")
    if isinstance(sizes, list) and sizes:
        config |= {"intermediate_size": max(sizes), "intermediate_sizes": sizes}
    return config


def _gemma3n_layer_facts(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"kv_from_layer": kv_from_layer(fields, is_windowed, layer)}
    if fields.get("intermediate_sizes") is not None:
        size = fields.of_each_layer("intermediate_sizes")[layer]
        facts["intermediate_size"] = None if size == fields.count("intermediate_size") else size
    name = "activation_sparsity_pattern"
    if fields.get(name) is None:  # the first ten of more than ten layers
        return {**facts, "own": Gemma3nLayer(0.95 if layer < 10 < len(is_windowed) else 0.0)}
    sparsity = fields.of_each_layer(name)[layer]
    if not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
        raise fields.wrong(name, "numbers from 0 to below 1")
    return {**facts, "own": Gemma3nLayer(float(sparsity))}


def _own(fields: ConfigFields) -> Gemma3n:
    number = fields.count("altup_num_inputs")
    active = fields.count("altup_active_idx", least=0, most=number - 1)
    limit = fields.positive_or_null("altup_coef_clip")
    return Gemma3n(
        layer_input_dim=fields.count("hidden_size_per_layer_input"),
        layer_input_vocab_size=fields.count("vocab_size_per_layer_input"),
        streams=Streams(number, active, limit, scales_input=fields.flag("altup_correct_scale")),
        branch_rank=fields.count("laurel_rank"),
    )


# A table: related fields share a line.
# fmt: off
GEMMA3N: dict[str, Family] = {
    "gemma3n_text": Family(
        facts={
            **GEMMA_FACTS, "norm_weight_offset": 0.0, "norm_placement": "both", "qk_norm": "head", "value_norm": True,
            "attention_scale": 1.0, "logits_softcap": number_or_null("final_logit_softcapping"),
        },
        parts=FamilyParts(trunk=Gemma3nTrunk, block=Gemma3nBlock, mlp=SparseMLP), own=_own,
        has_window=lambda fields, layer: (layer + 1) % 5 != 0, reads_layer_types=True, rope=rope_by_window,
        layer_facts=_gemma3n_layer_facts, preprocessed=_gemma3n_fields,
        defaults={
            **GEMMA_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 512,
            "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "num_kv_shared_layers": 15, "laurel_rank": 64, "altup_num_inputs": 4, "altup_active_idx": 0,
            "altup_coef_clip": 120.0, "altup_correct_scale": True,
        },
        activation_field="hidden_activation",
    ),
}
# fmt: on
