"""One layer of the decoder.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.models.attention.attention import Attention, AttentionToShared, KeysAndValues, Sight
from lean_ft.models.attention.latent_attention import LatentAttention
from lean_ft.models.cache import LayerCache, StateCache
from lean_ft.models.config import DecoderConfig, DeltaRuleConfig, Mamba2Config, ShortConvolutionConfig
from lean_ft.models.layers import MLP, gated, residual_norm
from lean_ft.models.moe import MixtureOfExperts
from lean_ft.models.residual_streams import LowRankBranch, ResidualStreams
from lean_ft.models.state.convolution import ShortConvolution
from lean_ft.models.state.delta_rule import GatedDeltaRule
from lean_ft.models.state.mamba2 import Mamba2
from lean_ft.models.state.state_mixer import StateMixer

# Hugging Face's names of a layer's norms: before and after attention, before and after the feed-forward layer.
_IN, _MIDDLE, _OUT = "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
_NORMS = {
    "pre": (_IN, None, _MIDDLE, None),
    "post": (None, _MIDDLE, None, _OUT),
    "both": (_IN, _MIDDLE, "pre_feedforward_layernorm", _OUT),
    "parallel": (_IN, None, None, None),
    "parallel_normed": (_IN, None, _MIDDLE, None),
}
# With a mixture of experts beside a feed-forward layer: after the latter, before the mixture and after it.
_BESIDE_MLP = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"

_ATTENTION = "self_attn"
# Other token mixers: the module's name in Hugging Face's format, and the module.
_MIXERS: dict[type, tuple[str, type[StateMixer]]] = {
    DeltaRuleConfig: ("linear_attn", GatedDeltaRule),
    ShortConvolutionConfig: ("conv", ShortConvolution),
    Mamba2Config: ("mamba", Mamba2),
}


class Block(nn.Module):
    """One layer: token mixers (attention, a recurrent mixer or both) and a feed-forward layer, added to the residual stream.
    In some families a layer has only one of the two."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.initial = {"layer_scalar": 1.0}
        self.norms, self.is_parallel = _NORMS[config.norm_placement], config.norm_placement.startswith("parallel")
        self.residual_multiplier = config.residual_multiplier
        self.attention_multipliers = config.attention_multipliers
        layer, self.mixer_names = config.layers[layer_index], []
        if layer.has_attention:
            attention = Attention if config.latent is None else LatentAttention
            attention = attention if layer.kv_from_layer is None else AttentionToShared
            self.add_module(_ATTENTION, attention(config, layer_index))
            self.mixer_names.append(_ATTENTION)
        if layer.mixer is not None:
            name, mixer = _MIXERS[type(layer.mixer)]
            self.add_module(name, mixer(config, layer_index))
            self.mixer_names.append(name)
        self.mlp = self.mixture = None
        mixture = None if layer.mixture is None else MixtureOfExperts(config.hidden_size, layer.mixture)
        if mixture is not None and mixture.config.beside_mlp:
            self.mixture = mixture
            for name in _BESIDE_MLP:
                self.add_module(name, residual_norm(config))
        elif mixture is not None:
            self.mlp = mixture
        if self.mlp is None and layer.has_mlp:
            inner, kind = layer.intermediate_size or config.intermediate_size, (config.activation, config.gated)
            others = config.fused_gate_up, config.mlp_multipliers, layer.gate_sparsity
            self.mlp = MLP(config.hidden_size, inner, config.mlp_bias, *kind, *others)
        self.altup = None if config.streams is None else ResidualStreams(config)
        self.laurel = LowRankBranch(config) if config.branch_rank else None
        self.activation, self.has_input = config.activation, config.layer_input_dim > 0
        if self.has_input:
            self.per_layer_input_gate = nn.Linear(config.hidden_size, config.layer_input_dim, bias=False)
            self.per_layer_projection = nn.Linear(config.layer_input_dim, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = residual_norm(config)
        self.layer_scalar = nn.Buffer(torch.ones(1)) if config.layer_scalars else None
        of_mixers, of_mlp = self.norms[:2], self.norms[2:]
        for name in (*(of_mixers if self.mixer_names else ()), *(of_mlp if layer.has_mlp else ())):
            if name is not None:
                self.add_module(name, residual_norm(config))

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: tuple[LayerCache | None, StateCache | None] = (None, None),
        sight: Sight | None = None,
        shared: KeysAndValues | None = None,
        layer_input: Tensor | None = None,
        recorded: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...] | None, KeysAndValues | None]:
        """Compute hidden states (B, T, D) from `hidden` (B, T, D); both are (B, T, S, D) with several residual streams.

        cos and sin: (B or 1, T, rotated features), or None. shared: keys and values of an earlier layer that this layer
        attends to. layer_input: (B, T, inputs). recorded: (B, T, K) experts, as in `Router.choose`.

        With a mixture of experts, or if other layers use this layer's keys and values, returns (hidden states, router logits
        (B * T, experts) and chosen experts (B * T, K) or None, keys and values or None). These are results rather than
        attributes, so that compilation and checkpointing handle them.
        """
        into_attention, out_of_attention, into_mlp, out_of_mlp = self.norms
        given = beside = None
        routes: tuple[Tensor, ...] | None = None
        predicted = hidden if self.altup is None else self.altup.predict(hidden)
        hidden = predicted if self.altup is None else predicted[..., self.altup.active, :]
        if self.mixer_names:
            normed = self._normed(into_attention, hidden)
            beside = self._normed(into_mlp, normed if into_mlp is None else hidden) if self.is_parallel else None
            added, given = self._mixed(normed, (cos, sin, cu_seqlens), cache, sight, shared)
            hidden = torch.add(hidden, self._normed(out_of_attention, added), alpha=self.residual_multiplier)
            hidden = hidden if self.laurel is None else (hidden + self.laurel(normed)) / 2**0.5
        if self.mlp is not None:
            read = self._normed(into_mlp, hidden) if beside is None else beside
            added = self.mlp(read) if recorded is None or self.mixture is not None else self.mlp(read, read, recorded)
            if isinstance(added, tuple):
                added, routes = added[0], added[1:]
            if self.mixture is not None:
                after_mlp, before_experts, after_experts = _BESIDE_MLP
                others = () if recorded is None else (recorded,)
                mixed, *decided = self.mixture(self._normed(before_experts, hidden), hidden, *others)
                routes = tuple(decided)
                added = self._normed(after_mlp, added) + self._normed(after_experts, mixed)
            hidden = torch.add(hidden, self._normed(out_of_mlp, added), alpha=self.residual_multiplier)
        hidden = hidden if self.altup is None else self.altup.correct(predicted, hidden)
        if self.has_input:
            assert layer_input is not None
            read = hidden if self.altup is None else self.altup.read(hidden)
            inner = gated(self.per_layer_input_gate(read), layer_input, self.activation)
            added = self.post_per_layer_input_norm(self.per_layer_projection(inner))
            hidden = hidden + added if self.altup is None else self.altup.add(hidden, added)
        if self.layer_scalar is not None:
            hidden = hidden * self.layer_scalar
        return hidden if routes is None and given is None else (hidden, routes, given)

    def _mixed(
        self, normed: Tensor, context: Any, cache: Any, sight: Sight | None, shared: KeysAndValues | None
    ) -> tuple[Tensor, KeysAndValues | None]:
        """The sum of the token mixers' outputs, and keys and values for other layers."""
        parts, given = [], None
        for name in self.mixer_names:
            mixer = getattr(self, name)
            if name != _ATTENTION:
                parts.append(mixer(normed, *context, cache[1], sight))
                continue
            into, out_of = self.attention_multipliers
            others = {} if shared is None else {"shared": shared}
            attended = mixer(normed if into == 1.0 else normed * into, *context, cache[0], sight, **others)
            if isinstance(attended, tuple):
                attended, given = attended
            parts.append(attended if out_of == 1.0 else attended * out_of)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1], given

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)
