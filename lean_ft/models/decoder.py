"""One decoder for every dense family: what differs between them is data in `DecoderConfig`.

The parameter names and the rotary convention are Hugging Face's, so loading renames nothing and saving neither.
Norm statistics and rotary angles are computed in float32 whatever the dtype of the weights, as transformers does.

Shapes: B batch, T tokens of a row, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.attention.attention import Attention, AttentionToShared, KeysAndValues, Prefixes
from lean_ft.models.attention.latent_attention import LatentAttention
from lean_ft.models.cache import KVCache, LayerCache, StateCache, cache_bytes
from lean_ft.models.config import DecoderConfig, DeltaRuleConfig, Mamba2Config, ShortConvolutionConfig
from lean_ft.models.few_rows import few_rows_linear
from lean_ft.models.layers import MLP, RMSNorm, gated
from lean_ft.models.moe import MixtureOfExperts, load_balancing_loss
from lean_ft.models.rope import RotaryEmbedding
from lean_ft.models.source import Sharding, Source
from lean_ft.models.state.convolution import ShortConvolution
from lean_ft.models.state.delta_rule import GatedDeltaRule
from lean_ft.models.state.mamba2 import Mamba2
from lean_ft.models.state.state_mixer import StateMixer
from lean_ft.torch_private import assert_on_device

# Hugging Face's names of a layer's norms: into attention and out of it, into the feed-forward layer and out of it.
_INTO_ATTENTION, _AFTER_ATTENTION, _OUT = "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
_NORMS = {
    "in": (_INTO_ATTENTION, None, _AFTER_ATTENTION, None),
    "out": (None, _AFTER_ATTENTION, None, _OUT),
    "both": (_INTO_ATTENTION, _AFTER_ATTENTION, "pre_feedforward_layernorm", _OUT),
    "once": (_INTO_ATTENTION, None, None, None),
}

# Columns that an output layer's bias is, for the losses: one of it, and zeros up to a width that matrix products like.
_WIDER = 8

# Where a mixture of experts lies beside a feed-forward layer: out of the latter, into the former and out of it.
_BESIDE = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"

# What mixes a layer's tokens in the place of attention or beside it, by its config, and Hugging Face's name of it.
_ATTENTION = "self_attn"
_MIXERS: dict[type, tuple[str, type[StateMixer]]] = {
    DeltaRuleConfig: ("linear_attn", GatedDeltaRule),
    ShortConvolutionConfig: ("conv", ShortConvolution),
    Mamba2Config: ("mamba", Mamba2),
}


class Block(nn.Module):
    """One layer: what mixes tokens, most often attention, and the feed-forward layer, each added to the residual, with norms
    on the way in or out. Some families have another mixer beside attention, or only one of the two."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.norms = _NORMS[config.norm_placement]
        self.side_by_side = config.norm_placement == "once"
        self.residual_multiplier = config.residual_multiplier
        self.attention_multipliers = config.attention_multipliers
        layer, self.mixer_names = config.layers[layer_index], []
        if layer.attends:
            attention = Attention if config.latent is None else LatentAttention
            attention = attention if layer.keys_of is None else AttentionToShared
            self.add_module(_ATTENTION, attention(config, layer_index))
            self.mixer_names.append(_ATTENTION)
        if layer.mixer is not None:
            name, mixer = _MIXERS[type(layer.mixer)]
            self.add_module(name, mixer(config, layer_index))
            self.mixer_names.append(name)
        self.mlp = self.mixture = None
        mixture = None if layer.mixture is None else MixtureOfExperts(config.hidden_size, layer.mixture)
        if mixture is not None and mixture.config.beside:
            self.mixture = mixture
            for name in _BESIDE:
                self.add_module(name, _norm(config))
        elif mixture is not None:
            self.mlp = mixture
        if self.mlp is None and layer.feeds:
            inner, kind = layer.intermediate_size or config.intermediate_size, (config.activation, config.fused_gate_up)
            self.mlp = MLP(config.hidden_size, inner, config.mlp_bias, *kind, config.mlp_multipliers)
        self.activation, self.has_input = config.activation, config.layer_input_dim > 0
        if self.has_input:
            self.per_layer_input_gate = nn.Linear(config.hidden_size, config.layer_input_dim, bias=False)
            self.per_layer_projection = nn.Linear(config.layer_input_dim, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = _norm(config)
        self.layer_scalar = nn.Buffer(torch.ones(1)) if config.layer_scalars else None
        of_mixers, of_mlp = self.norms[:2], self.norms[2:]
        for name in (*(of_mixers if self.mixer_names else ()), *(of_mlp if layer.feeds else ())):
            if name is not None:
                self.add_module(name, _norm(config))

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: tuple[LayerCache | None, StateCache | None] = (None, None),
        prefixes: Prefixes | None = None,
        shared: KeysAndValues | None = None,
        layer_input: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None, KeysAndValues | None]:
        """hidden (B, T, D), cos and sin (B or 1, T, turned features) or None; shared keys and values of a layer before
        where it attends to those; layer_input (B, T, inputs) where layers have one; returns (B, T, D).

        With a mixture of experts it also returns the router's logits (B * T, experts), and where other layers attend to them
        its keys and values. They are results, and nothing that is set aside, so that compilation and checkpointing treat them
        right.
        """
        into_attention, out_of_attention, into_mlp, out_of_mlp = self.norms
        normed, router_logits, given = hidden, None, None
        if self.mixer_names:
            normed = self._normed(into_attention, hidden)
            added, given = self._mixed(normed, (cos, sin, cu_seqlens), cache, prefixes, shared)
            hidden = torch.add(hidden, self._normed(out_of_attention, added), alpha=self.residual_multiplier)
        if self.mlp is not None:
            added = self.mlp(normed if self.side_by_side else self._normed(into_mlp, hidden))
            if isinstance(added, tuple):
                added, router_logits = added
            if self.mixture is not None:
                out_of_plain, into_experts, out_of_experts = _BESIDE
                of_experts, router_logits = self.mixture(self._normed(into_experts, hidden), hidden)
                added = self._normed(out_of_plain, added) + self._normed(out_of_experts, of_experts)
            hidden = torch.add(hidden, self._normed(out_of_mlp, added), alpha=self.residual_multiplier)
        if self.has_input:
            assert layer_input is not None
            inner = gated(self.per_layer_input_gate(hidden), layer_input, self.activation)
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(inner))
        if self.layer_scalar is not None:
            hidden = hidden * self.layer_scalar
        return hidden if router_logits is None and given is None else (hidden, router_logits, given)

    def _mixed(
        self, normed: Tensor, context: Any, cache: Any, prefixes: Prefixes | None, shared: KeysAndValues | None
    ) -> tuple[Tensor, KeysAndValues | None]:
        """What attention and what is beside it or in its place add together, and the keys and values for other layers."""
        parts, given = [], None
        for name in self.mixer_names:
            mixer = getattr(self, name)
            if name != _ATTENTION:
                parts.append(mixer(normed, *context, cache[1], prefixes))
                continue
            into, out_of = self.attention_multipliers
            others = {} if shared is None else {"shared": shared}
            attended = mixer(normed if into == 1.0 else normed * into, *context, cache[0], prefixes, **others)
            if isinstance(attended, tuple):
                attended, given = attended
            parts.append(attended if out_of == 1.0 else attended * out_of)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1], given

    @property
    def first_part(self) -> nn.Module:
        """What the layer computes first: attention, what is in its place, or the feed-forward layer where that is alone."""
        return getattr(self, next(iter(self.mixer_names), "mlp"))

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)


def _norm(config: DecoderConfig) -> nn.Module:
    if config.norm_centered:
        return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_weight_offset)


class Trunk(nn.Module):
    """Everything before the output layer; it exists so that parameter names begin as Hugging Face's do."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = _norm(config)
        if dim := config.layer_input_dim:
            self.embed_tokens_per_layer = nn.Embedding(config.layer_input_vocab_size, config.num_layers * dim)
            self.per_layer_model_projection = nn.Linear(config.hidden_size, config.num_layers * dim, bias=False)
            self.per_layer_projection_norm = RMSNorm(dim, config.norm_eps, config.norm_weight_offset)


class Decoder(nn.Module):
    """A decoder-only language model.

    `source` describes the folder that it was read from, `sharding` how ranks share it. `router_aux_loss_coef` is the weight
    of the router's loss; at 0 that loss is not computed. Nothing is kept between calls.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head: nn.Linear | None = None
        self.score: nn.Linear | None = None
        if config.scores:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        elif not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None)
        self.rotary = {rope: RotaryEmbedding(rope, rope.head_dim or config.head_dim) for rope in ropes}
        self.tied_output_weight: Callable[[], Tensor] | None = None  # set by memory.tied_gradient
        self.source = Source()
        self.sharding = Sharding()
        self.mixture = config.mixture
        self.router_aux_loss_coef = 0.0 if self.mixture is None else self.mixture.router_aux_loss_coef

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def head(self) -> nn.Linear | None:
        """The output layer; None where it is the embedding."""
        return self.lm_head if self.score is None else self.score

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the arithmetic, but for what a family has wider."""
        return self._last_norm.dtype

    @property
    def device(self) -> torch.device:
        return self._last_norm.device

    @property
    def _last_norm(self) -> Tensor:
        """Which no technique replaces; `output_weight` may be made anew when it is asked for."""
        return self.model.norm.weight  # pyright: ignore[reportReturnType]

    @property
    def output_weight(self) -> Tensor:
        """The parameter (V, D) of the output layer, (1, D) of a reward model; the embedding's own, or what stands for it,
        where they are tied. Where it has a bias, a copy (V, D + 8) with that and zeros behind, of hidden states as wide."""
        if self.tied_output_weight is not None:
            return self.tied_output_weight()
        if self.config.head_bias and self.head is not None:
            return F.pad(torch.cat((self.head.weight, self.head.bias[:, None]), 1), (0, _WIDER - 1))
        return self.model.embed_tokens.weight if self.head is None else self.head.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        return_hidden: bool = False,
        lengths: Tensor | None = None,
        return_router_loss: bool = False,
        is_token: Tensor | None = None,
        prefixes: Tensor | None = None,
        num_prefix_tokens: int = 0,
    ) -> Any:
        """Returns the logits (B, T, V) of the next token, or with `return_hidden` what `logits` makes them of (B, T, D), which are
        as wide as `output_weight`.

        input_ids (B, T) int64, padded on the right where rows are shorter. positions (B, T) int64; where left out they
        count from 0 in each row or document, or go on from the cache. cu_seqlens (documents + 1,) int32: boundaries of
        packed documents in the B * T tokens, row after row; none is longer than a row. With a cache the new tokens go
        on from what it holds, and it is advanced: by T, or in rows that are padded by their `lengths` (B,) int64.

        prefixes (documents, 2) int32 lets a document of cu_seqlens go on from positions, from and to, of one before it in its
        row: it sees them, and its positions count on from theirs. `num_prefix_tokens` is how many those of all documents
        are together. Where a rotary scaling depends on the length of the text, all texts of a prefix have to be of the
        lengths that `RopeConfig.same_frequencies` takes for one.

        With `return_router_loss` returns beside that what a mixture's uneven load adds to a mean loss, a float32 scalar:
        `router_aux_loss_coef` times `load_balancing_loss`, as transformers adds it. It is None where the coefficient is 0
        or nothing trains. is_token (B, T) bool is for it: False on padding, which does not count.

        Where ranks share a row, input_ids and is_token are of the tokens that are here, as is the result; positions, which
        cannot be left out then, cu_seqlens and prefixes are of all. With a cache rows are whole on each rank, and where heads
        are cut the same ones on those that have each other's.

        Raises ValueError for a cache together with cu_seqlens, positions or gradients, for lengths without one, for
        prefixes without cu_seqlens, and where the cache is full.
        """
        tokens = self.sharding.row_tokens if cache is None else None  # the split of this pass
        if self.sharding.row_tokens is not None:
            self.sharding.row_tokens.rows_are_whole = tokens is None
        if tokens is not None and positions is None:
            raise ValueError("of a row that ranks share, all positions have to be given.")
        num_rows, num_tokens = (input_ids if tokens is None or positions is None else positions).shape
        if cache is not None:
            if cu_seqlens is not None or positions is not None:
                raise ValueError("a cache goes with neither cu_seqlens nor positions: it knows its own positions.")
            if torch.is_grad_enabled():
                raise ValueError("a cache keeps no gradients: call the model inside torch.no_grad().")
            positions = cache.begin(num_tokens, lengths)
        elif lengths is not None:
            raise ValueError("lengths go with a cache alone: without one padding on the right changes nothing.")
        elif cu_seqlens is not None:
            _check_documents(cu_seqlens, num_rows, num_tokens)
            if positions is None:
                indices = torch.arange(num_rows * num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
                document = _document_of(indices, cu_seqlens)
                positions = (indices - cu_seqlens[document]).view(num_rows, num_tokens)
                if prefixes is not None:
                    positions = positions + prefixes.diff(dim=1)[document].view_as(positions)
        if positions is None:
            positions = torch.arange(num_tokens, device=input_ids.device)[None]  # (1, T) serves all rows

        seen = None
        if prefixes is not None:
            if cu_seqlens is None:
                raise ValueError("prefixes go with cu_seqlens: they are what its documents go on from.")
            if self.config.has_states:
                raise ValueError(
                    "prefixes are seen by attention alone, and layers of this model keep a state over each document: give "
                    "each document what it goes on from as a copy of its own."
                )
            seen = Prefixes.of(prefixes, num_prefix_tokens, cu_seqlens, num_rows * num_tokens)

        hidden = self._scaled(self.model.embed_tokens(input_ids), self.config.embedding_multiplier)
        balances = return_router_loss and self.router_aux_loss_coef > 0 and torch.is_grad_enabled()
        all_router_logits: list[Tensor] = []  # (B * T, experts) a mixture
        text_lengths = self._text_lengths(positions, cu_seqlens, cache)
        here: Tensor = positions if tokens is None else tokens.of_attention(positions)
        if tokens is not None and text_lengths is not None:
            text_lengths = tokens.of_attention(text_lengths)
        turns = {rope: rotary(here, hidden.dtype, text_lengths) for rope, rotary in self.rotary.items()}
        inputs, given = self._layer_inputs(input_ids, hidden), {}
        for i, layer in enumerate(self.model.layers):
            rope, keys_of = self.config.layers[i].rope, self.config.layers[i].keys_of
            cos, sin = (None, None) if rope is None else turns[rope]
            others = {} if keys_of is None else {"shared": given[keys_of]}
            if inputs:
                others["layer_input"] = inputs[i]
            kept = (None, None) if cache is None else cache.layer(i)
            hidden = layer(hidden, cos, sin, cu_seqlens, kept, seen, **others)
            if isinstance(hidden, tuple):
                hidden, router_logits, given[i] = hidden
                if balances and router_logits is not None:
                    all_router_logits.append(router_logits)
        hidden = self.model.norm(hidden)
        if self.config.logits_divisor != 1.0:  # here and not of the logits, of which a loss never has all at once
            hidden = hidden / self.config.logits_divisor
        if self.config.head_bias:  # what the output layer's bias is multiplied by, and zeros
            hidden = torch.cat((hidden, F.pad(torch.ones_like(hidden[..., :1]), (0, _WIDER - 1))), -1)
        if cache is not None:
            cache.advance()
        result = hidden if return_hidden else self.logits(hidden)
        if not return_router_loss:
            return result
        if not all_router_logits:
            return result, None
        assert self.mixture is not None
        over_row = (lambda values: values) if tokens is None else tokens.sum
        balance = load_balancing_loss(all_router_logits, self.mixture.experts_per_token, is_token, over_row)
        return result, self.router_aux_loss_coef * balance

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (..., V) of hidden states (..., D), as `forward` gives them with `return_hidden`."""
        cut = self.sharding.vocabulary
        if self.config.head_bias and self.head is not None:
            logits = few_rows_linear(hidden[..., :-_WIDER], self.head.weight, self.head.bias)
        else:
            logits = few_rows_linear(hidden, self.output_weight) if cut is None else cut.logits(hidden)
        cap = self.config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _text_lengths(self, positions: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """The length of the text that each position belongs to, (B or 1, T or 1), where a frequency depends on it and it
        is not that of the row."""
        if cache is not None:
            return cache.next_lengths[:, None]
        if not any(rope.depends_on_length for rope in self.rotary):
            return None
        if cu_seqlens is None:
            return (
                None if self.sharding.row_tokens is None else positions.amax(-1, keepdim=True).expand_as(positions) + 1
            )
        flat = positions.flatten()
        document = _document_of(torch.arange(len(flat), dtype=cu_seqlens.dtype, device=flat.device), cu_seqlens)
        last = torch.zeros(len(cu_seqlens), dtype=flat.dtype, device=flat.device)
        last = last.scatter_reduce(0, document, flat, "amax")
        return (last[document] + 1).view(positions.shape)

    def _scaled(self, embedded: Tensor, multiplier: float) -> Tensor:
        if self.config.embedding_multiplier_in_weight_dtype:
            multiplier = torch.tensor(multiplier, dtype=embedded.dtype).item()
        return embedded if multiplier == 1.0 else embedded * multiplier

    def _layer_inputs(self, input_ids: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """What each layer is given of the token itself, (B, T, inputs) a layer: a row of an embedding of its own beside a
        projection of the model's (B, T, D), after Gemma 3n. Empty where layers are given nothing."""
        dim, trunk = self.config.layer_input_dim, self.model
        if not dim:
            return ()
        of_token = self._scaled(trunk.embed_tokens_per_layer(input_ids), dim**0.5).unflatten(-1, (-1, dim))
        projected = trunk.per_layer_model_projection(hidden) * self.config.hidden_size**-0.5
        projected = trunk.per_layer_projection_norm(projected.unflatten(-1, (-1, dim)))
        return ((projected + of_token) * 2**-0.5).unbind(-2)

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Returns an empty cache for `batch_size` rows of up to `capacity` positions."""
        return KVCache(self.config, batch_size, capacity, self.dtype, self.device, self._num_head_parts)

    def cache_bytes(self, batch_size: int, capacity: int) -> int:
        """What such a cache takes."""
        return cache_bytes(self.config, batch_size, capacity, self.dtype.itemsize, self._num_head_parts)

    @property
    def _num_head_parts(self) -> int:
        return 1 if self.sharding.row_tokens is None else self.sharding.row_tokens.num_head_parts


def _document_of(indices: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The number of the document that each of the flattened batch's `indices` lies in."""
    return torch.bucketize(indices, cu_seqlens, right=True) - 1


def _check_documents(cu_seqlens: Tensor, num_rows: int, num_tokens: int) -> None:
    """Raises ValueError where documents do not end with the batch or one is longer than a row.

    On a GPU the check runs there, so that nothing waits for it, and a failure is a device-side assertion.
    """
    fits = (cu_seqlens.diff() <= num_tokens).all() & (cu_seqlens[-1] == num_rows * num_tokens)
    message = (
        f"cu_seqlens has a document longer than a row of {num_tokens} tokens, or does not end with the batch, at "
        f"{num_rows * num_tokens}."
    )
    if cu_seqlens.is_cuda:
        assert_on_device(fits, message)
    elif not fits:
        raise ValueError(message)
