"""Gemma 4: an input of each token for each layer, a mixture of experts beside the feed-forward layer, and a scalar per
layer.

Shapes: B batch, T tokens of a row, D hidden size, N tokens of a batch, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from lean_ft.models.attention.attention import Attention
from lean_ft.models.block import Block, LayerResult, Pass
from lean_ft.models.config import DecoderConfig, FamilyParts, LayerConfig, MixtureConfig
from lean_ft.models.families.family import Family, count, number_or_null, rope_by_window
from lean_ft.models.families.gemma import GEMMA_DEFAULTS, GEMMA_FACTS
from lean_ft.models.layers import MLP, RMSNorm, gated, residual_norm, unit_rms, wide
from lean_ft.models.moe import MixtureOfExperts, best_experts
from lean_ft.models.projections import project
from lean_ft.models.rope_settings import head_dim_of, num_kv_heads_of
from lean_ft.models.trunk import Trunk
from lean_ft.system.config_fields import ConfigFields, listed


@dataclass(frozen=True)
class LayerInputs:
    """A further embedding of tokens, of which each layer has its own features."""

    layer_input_dim: int  # features per layer; 0: none
    layer_input_vocab_size: int  # tokens from here on have the first row


class TrunkWithInputs(Trunk):
    """Each layer's input is a per-layer embedding plus a projection of the model's embedding."""

    more_embeddings = ("embed_tokens_per_layer",)

    def add_others(self, config: DecoderConfig) -> None:
        own = config.own
        if not (dim := own.layer_input_dim):
            return
        # The row of tokens that are images or have no row is not trained, as in transformers.
        pad_id = 0 if own.layer_input_vocab_size < config.vocab_size else config.vision and config.vision.pad_id
        self.embed_tokens_per_layer = nn.Embedding(own.layer_input_vocab_size, config.num_layers * dim, pad_id)
        self.per_layer_model_projection = nn.Linear(config.hidden_size, config.num_layers * dim, bias=False)
        self.per_layer_projection_norm = RMSNorm(dim, config.norm_eps, config.norm_weight_offset)

    def into_layers(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        own, dim = self.config.own, self.config.own.layer_input_dim
        if not dim:
            return hidden, ()
        if own.layer_input_vocab_size < self.config.vocab_size:
            input_ids = input_ids.where(input_ids < own.layer_input_vocab_size, 0)
        of_token = self.scaled(self.embed_tokens_per_layer(input_ids), dim**0.5).unflatten(-1, (-1, dim))
        projected = self.per_layer_model_projection(hidden) * self.config.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (-1, dim)))
        return hidden, ((projected + of_token) * 2**-0.5).unbind(-2)


class BlockWithInput(Block):
    """A gated projection of the layer's input is added to its output."""

    def add_others(self, config: DecoderConfig, layer: LayerConfig) -> None:
        if dim := config.own.layer_input_dim:
            self.activation = config.activation
            self.per_layer_input_gate = nn.Linear(config.hidden_size, dim, bias=False)
            self.per_layer_projection = nn.Linear(dim, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = residual_norm(config)

    def of_input(self, read: Tensor, layer_input: Tensor) -> Tensor:
        """What is added (B, T, D): layer_input (B, T, inputs), gated by `read` (B, T, D)."""
        inner = gated(self.per_layer_input_gate(read), layer_input, self.activation)
        return self.post_per_layer_input_norm(self.per_layer_projection(inner))


# After the feed-forward layer, before the mixture beside it, and after the mixture.
_BESIDE_MLP = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"


@dataclass(frozen=True)
class Gemma4Layer:
    values_are_keys: bool  # values are the key projection, before norm and rotation


class Gemma4Attention(Attention):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.values_are_keys: bool = config.layers[layer_index].own.values_are_keys
        if self.values_are_keys:
            del self.v_proj

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if not self.values_are_keys:
            return super().projected(hidden)
        query, key = project(hidden, self.q_proj, self.k_proj)
        return query, key, key, None


class Gemma4Block(BlockWithInput):
    """The mixture of experts and the feed-forward layer are added, each between its own norms. The output is multiplied
    by a number that is stored and not trained."""

    def add_feed_forward(self, config: DecoderConfig, layer: LayerConfig) -> None:
        self.mixture = None if layer.mixture is None else MixtureOfExperts.of(config, layer.mixture)
        for name in () if self.mixture is None else _BESIDE_MLP:
            self.add_module(name, residual_norm(config))
        self.mlp = MLP.of(config, layer)

    def add_others(self, config: DecoderConfig, layer: LayerConfig) -> None:
        super().add_others(config, layer)
        self.initial = {"layer_scalar": 1.0}
        self.layer_scalar = nn.Buffer(torch.ones(1))

    def forward(self, hidden: Tensor, context: Pass) -> LayerResult:
        hidden, routes, kept = super().forward(hidden, context)
        if context.layer_input is not None:
            hidden = hidden + self.of_input(hidden, context.layer_input)
        return hidden * self.layer_scalar, routes, kept

    def fed(self, read: Tensor, hidden: Tensor, recorded: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        if self.mixture is None:
            return super().fed(read, hidden, recorded)
        assert self.mlp is not None
        after_mlp, before_experts, after_experts = _BESIDE_MLP
        added = self.mlp(read)
        recorded_experts = () if recorded is None else (recorded,)
        mixed, *routes = self.mixture(self.normed(before_experts, hidden), hidden, *recorded_experts)
        return self.normed(after_mlp, added) + self.normed(after_experts, mixed), tuple(routes)


class NormedRouter(nn.Module):
    """A router with an RMSNorm of its input, a scale per feature, and a factor of each expert's weights."""

    @classmethod
    def of(cls, config: DecoderConfig, mixture: MixtureConfig) -> Self:
        return cls(config, mixture)

    def __init__(self, config: DecoderConfig, mixture: MixtureConfig) -> None:
        super().__init__()
        self.initial = {"scale": 1.0, "per_expert_scale": 1.0}
        self.eps = config.norm_eps
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.proj = nn.Linear(config.hidden_size, mixture.num_experts, bias=False)
        self.per_expert_scale = nn.Parameter(torch.empty(mixture.num_experts))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.proj(unit_rms(tokens, self.eps) * self.scale * tokens.shape[-1] ** -0.5)  # (N, E)

    def choose(self, logits: Tensor, config: MixtureConfig, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Router.choose`."""
        best, chosen = best_experts(wide(logits), config.experts_per_token, recorded)
        return best.softmax(-1) * self.per_expert_scale[chosen], chosen


def _all_but_every_sixth_and_the_last(fields: ConfigFields, layer: int) -> bool:
    last = fields.count("num_hidden_layers") - 1
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and layer_types[-1:] == ["sliding_attention"]:
        raise ValueError(
            f"{fields.where}: layer_types ends with sliding_attention; expected full_attention, which transformers "
            "always uses for the last layer."
        )
    return (layer + 1) % 6 != 0 and layer != last


_PER_LAYER_FIELDS = ("num_key_value_heads", "head_dim")


def _gemma4_layer_facts(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> dict[str, Any]:
    """Layers with full attention have other heads, and the upper layers use keys and values of the last lower layer of
    the same kind. Published files have fields for the heads of full attention; transformers 5 writes heads per
    layer."""
    facts: dict[str, Any] = {}
    num_heads, head_dim = usual = num_kv_heads_of(fields), head_dim_of(fields)
    if "per_layer_config" in fields.config:
        by_layer, where = fields.get("per_layer_config"), f"{fields.where}: per_layer_config"
        if not isinstance(by_layer, dict):
            raise ValueError(f"{where} is {by_layer!r}; expected an object of settings by layer number.")
        settings = {str(i).zfill(4): of_layer for i, of_layer in by_layer.items()}.get(f"{layer:04}", {})  # "5" or "05"
        if unknown := set(settings) - set(_PER_LAYER_FIELDS):
            raise ValueError(f"{where}: {layer} has {listed(unknown)}; expected only {listed(_PER_LAYER_FIELDS)}.")
        of_layer = ConfigFields(settings, dict(zip(_PER_LAYER_FIELDS, usual, strict=True)), f"{where}: {layer}")
        num_heads, head_dim = (of_layer.count(name) for name in _PER_LAYER_FIELDS)
    elif not is_windowed[layer]:
        head_dim = fields.count("global_head_dim")
        if fields.flag("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
            num_heads = fields.count("num_global_key_value_heads")
    if (num_heads, head_dim) != usual:
        facts["kv_shape"] = num_heads, head_dim
    facts["kv_from_layer"] = kv_from_layer(fields, is_windowed, layer)
    are_keys = facts["kv_from_layer"] is None and fields.flag("attention_k_eq_v") and not is_windowed[layer]
    facts["own"] = Gemma4Layer(values_are_keys=are_keys)
    if facts["kv_from_layer"] is not None and fields.flag("use_double_wide_mlp"):
        facts["intermediate_size"] = 2 * fields.count("intermediate_size")
    return facts


def kv_from_layer(fields: ConfigFields, is_windowed: Sequence[bool], layer: int) -> int | None:
    first = len(is_windowed) - fields.count("num_kv_shared_layers", least=0)
    if layer < first:
        return None
    lower = [i for i in range(first) if is_windowed[i] == is_windowed[layer]]
    if not lower:
        raise ValueError(
            f"{fields.where}: num_kv_shared_layers leaves no lower layer of the kind of layer {layer} with keys and "
            "values."
        )
    return lower[-1]


def _layer_inputs(fields: ConfigFields) -> LayerInputs:
    if not (dim := fields.count("hidden_size_per_layer_input", least=0)):
        return LayerInputs(0, 0)
    return LayerInputs(dim, fields.count("vocab_size_per_layer_input", least=fields.count("vocab_size")))


# A table: related fields share a line.
# fmt: off
_GEMMA_4 = Family(
    facts={
        **GEMMA_FACTS, "norm_weight_offset": 0.0, "norm_placement": "both", "qk_norm": "head", "value_norm": True,
        "attention_scale": 1.0, "logits_softcap": number_or_null("final_logit_softcapping"),
    },
    parts=FamilyParts(
        trunk=TrunkWithInputs, block=Gemma4Block, attention=Gemma4Attention, router=NormedRouter, splits=True,
    ),
    own=lambda fields: LayerInputs(0, 0),
    has_window=_all_but_every_sixth_and_the_last, reads_layer_types=True, layer_facts=_gemma4_layer_facts,
    rope=rope_by_window,
    defaults={
        **GEMMA_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262144,
        "global_head_dim": 512, "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    activation_field="hidden_activation",
)

GEMMA4: dict[str, Family] = {
    "gemma4_text": replace(
        _GEMMA_4,
        own=_layer_inputs,
        mixture={
            "num_experts": lambda fields: fields.count("num_experts") if fields.flag("enable_moe_block") else 0,
            "experts_per_token": count("top_k_experts"), "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": True, "router_name": "router",
        },
        on_disk={"mixture.": ("",)},
        defaults={
            **_GEMMA_4.defaults, "enable_moe_block": False, "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072, "sliding_window": 512,
        },
    ),
    "gemma4_unified_text": replace(
        _GEMMA_4, defaults={**_GEMMA_4.defaults, "max_position_embeddings": 262144, "sliding_window": 1024}
    ),
}
# fmt: on
