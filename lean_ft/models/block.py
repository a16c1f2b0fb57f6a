"""One layer of the decoder.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lean_ft.models.attention.attention import Attention, AttentionToShared, KeysAndValues, Sight
from lean_ft.models.attention.latent_attention import LatentAttention
from lean_ft.models.cache import LayerCache, StateCache
from lean_ft.models.config import DecoderConfig, DeltaRuleConfig, LayerConfig, Mamba2Config, ShortConvolutionConfig
from lean_ft.models.layers import MLP, residual_norm
from lean_ft.models.moe import MixtureOfExperts
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
_ATTENTION = "self_attn"
# Other token mixers: the module's name in Hugging Face's format, and the module.
_MIXERS: dict[type, tuple[str, type[StateMixer]]] = {
    DeltaRuleConfig: ("linear_attn", GatedDeltaRule),
    ShortConvolutionConfig: ("conv", ShortConvolution),
    Mamba2Config: ("mamba", Mamba2),
}


class Pass(NamedTuple):
    """What a layer reads beside its hidden states."""

    cos: Tensor | None  # (B or 1, T, rotated features), as `RotaryEmbedding` returns it; None without rotation
    sin: Tensor | None
    cu_seqlens: Tensor | None = None  # (documents + 1,)
    cache: tuple[LayerCache | None, StateCache | None] = (None, None)
    sight: Sight | None = None
    shared: KeysAndValues | None = None  # of an earlier layer, if this layer attends to them
    layer_input: Tensor | None = None  # (B, T, inputs), in families with an input of each layer
    recorded: Tensor | None = None  # (B, T, K) experts, as in `Router.choose`


# Hidden states (B, T, D), router logits and choices of a mixture, and keys and values for other layers.
LayerResult = tuple[Tensor, tuple[Tensor, ...] | None, KeysAndValues | None]


class Block(nn.Module):
    """One layer: token mixers (attention, a recurrent mixer or both) and a feed-forward layer, added to the residual
    stream. In some families a layer has only one of the two.

    A family with another layer overrides a step: `mixed`, `joined`, `fed`, or their modules, `add_mixers`,
    `add_feed_forward` and `add_others`. The order of the modules is that of a new model's random numbers.
    """

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.norms, self.is_parallel = _NORMS[config.norm_placement], config.norm_placement.startswith("parallel")
        self.residual_multiplier = config.residual_multiplier
        self.mixer_names: list[str] = []
        self.mlp: nn.Module | None = None
        layer = config.layers[layer_index]
        self.add_mixers(config, layer_index)
        self.add_feed_forward(config, layer)
        self.add_others(config, layer)
        of_mixers, of_mlp = self.norms[:2], self.norms[2:]
        for name in (*(of_mixers if self.mixer_names else ()), *(of_mlp if layer.has_mlp else ())):
            if name is not None:
                self.add_module(name, residual_norm(config))

    def add_mixers(self, config: DecoderConfig, layer_index: int) -> None:
        layer, parts = config.layers[layer_index], config.parts
        if layer.has_attention:
            attention = parts.attention or (Attention if config.latent is None else LatentAttention)
            attention = attention if layer.kv_from_layer is None else AttentionToShared
            self.add_module(_ATTENTION, attention(config, layer_index))
            self.mixer_names.append(_ATTENTION)
        if layer.mixer is not None:
            name, mixer = _MIXERS[type(layer.mixer)]
            self.add_module(name, (parts.mixer or mixer)(config, layer_index))
            self.mixer_names.append(name)

    def add_feed_forward(self, config: DecoderConfig, layer: LayerConfig) -> None:
        if layer.mixture is not None:
            self.mlp = MixtureOfExperts.of(config, layer.mixture)
        elif layer.has_mlp:
            self.mlp = (config.parts.mlp or MLP).of(config, layer)

    def add_others(self, config: DecoderConfig, layer: LayerConfig) -> None:
        """Modules beside those of all families."""

    def forward(self, hidden: Tensor, context: Pass) -> LayerResult:
        """Compute hidden states (B, T, D) from `hidden` (B, T, D).

        Returns (hidden states, router logits (B * T, experts) and chosen experts (B * T, K) of a mixture, keys and
        values if other layers use them). These are results rather than attributes, so that compilation and
        checkpointing handle them.
        """
        into_mixers, out_of_mixers, into_mlp, out_of_mlp = self.norms
        kept = read = routes = None
        if self.mixer_names:
            normed = self.normed(into_mixers, hidden)
            if self.is_parallel:
                read = self.normed(into_mlp, normed if into_mlp is None else hidden)
            added, kept = self.mixed(normed, context)
            hidden = self.joined(hidden, normed, self.normed(out_of_mixers, added))
        if self.mlp is not None:
            read = self.normed(into_mlp, hidden) if read is None else read
            added, routes = self.fed(read, hidden, context.recorded)
            hidden = torch.add(hidden, self.normed(out_of_mlp, added), alpha=self.residual_multiplier)
        return hidden, routes, kept

    def mixed(self, normed: Tensor, context: Pass) -> tuple[Tensor, KeysAndValues | None]:
        """The sum (B, T, D) of the token mixers' outputs, and keys and values for other layers."""
        parts, kept, (of_attention, of_state) = [], None, context.cache
        for name in self.mixer_names:
            mixer = getattr(self, name)
            if name != _ATTENTION:
                parts.append(mixer(normed, *context[:3], of_state, context.sight))
                continue
            shared = {} if context.shared is None else {"shared": context.shared}
            attended = mixer(normed, *context[:3], of_attention, context.sight, **shared)
            if isinstance(attended, tuple):
                attended, kept = attended
            parts.append(attended)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1], kept

    def joined(self, hidden: Tensor, normed: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream (B, T, D) after the token mixers, whose input was `normed` and whose output, normed, is
        `mixed`."""
        return torch.add(hidden, mixed, alpha=self.residual_multiplier)

    def fed(self, read: Tensor, hidden: Tensor, recorded: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The feed-forward layer's output (B, T, D) and a mixture's choices. Its input is `read`, the normed
        `hidden`."""
        assert self.mlp is not None
        output = self.mlp(read) if recorded is None else self.mlp(read, read, recorded)
        return (output[0], output[1:]) if isinstance(output, tuple) else (output, None)

    def normed(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)
