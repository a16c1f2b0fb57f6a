"""One decoder for all families. Several families' differences are facts of `DecoderConfig`, one family's are its
`parts`.

Parameter names and the rotary convention follow Hugging Face, so loading and saving rename little. As in transformers,
norm statistics and rotary angles are computed in float32, whatever the dtype of the weights.

Shapes: B batch, T tokens of a row, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.attention.attention import Attention, KeysAndValues, Sight
from lean_ft.models.block import Pass
from lean_ft.models.cache import KVCache
from lean_ft.models.config import DecoderConfig
from lean_ft.models.dense import DenseLayers
from lean_ft.models.drafting_layers import drafted, drafting_layers
from lean_ft.models.few_rows import few_rows_linear
from lean_ft.models.inserts import Inserts
from lean_ft.models.positions import bounds_of_texts, lengths_of_documents, positions_of
from lean_ft.models.rope import RopeConfig, RotaryEmbedding
from lean_ft.models.routing import Routes, RoutingStatistics
from lean_ft.models.source import Sharding, Source
from lean_ft.models.trunk import Trunk
from lean_ft.models.vision.inserts import inserts_of
from lean_ft.models.vision.tower import VisionTower

# Losses see the bias of an output layer as a column of its weight, followed by zero columns up to this number.
_BIAS_COLUMNS = 8


class Decoder(nn.Module):
    """A decoder-only language model, or a text encoder of the same parts. It keeps no state between calls.

    `source` describes the folder that the model was read from, `sharding` how ranks share it. `router_aux_loss_coef` is
    the weight of the router's load-balancing loss; at 0 the loss is not computed. `routing` gets the routers' choices
    in training.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = (config.parts.trunk or Trunk)(config)
        self.model.layers.extend(drafting_layers(config))
        self.vision = None if config.vision is None else VisionTower(config.vision)
        self.lm_head: nn.Linear | None = None
        self.score: nn.Linear | None = None
        if config.num_scores:
            self.score = nn.Linear(config.hidden_size, config.num_scores, bias=config.head_bias)
        elif config.has_output and not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.dense = DenseLayers(config.dense) if config.dense else None
        rotary = config.parts.rotary or RotaryEmbedding
        self.rotary = {rotation: rotary.of(config, *rotation) for rotation in config.rotations}
        self.tied_output_weight: Callable[[], Tensor] | None = None  # set by memory.tied_gradient
        self.source, self.sharding = Source(), Sharding()
        self.mixture = config.mixture
        self.router_aux_loss_coef = 0.0 if self.mixture is None else self.mixture.router_aux_loss_coef
        self.routing: RoutingStatistics | None = None

    @property
    def layers(self) -> nn.ModuleList:
        """All layers, those that draft tokens last."""
        return self.model.layers

    @property
    def drafting(self) -> list[nn.Module]:
        """The layers that draft tokens."""
        return [*self.model.layers][self.config.num_layers :]

    @property
    def has_chunks(self) -> bool:
        """Whether a layer attends within chunks of positions."""
        return any(isinstance(module, Attention) and module.scoring.chunk for module in self.modules())

    @property
    def head(self) -> nn.Linear | None:
        """The output layer; None if it is tied to the embedding, or the model has none."""
        return self.lm_head if self.score is None else self.score

    @property
    def ties_output(self) -> bool:
        """Whether the embedding is also the output layer."""
        return self.head is None and self.config.has_output

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations, except for tensors that a family keeps in float32."""
        return self._last_norm.dtype

    @property
    def device(self) -> torch.device:
        return self._last_norm.device

    @property
    def _last_norm(self) -> Tensor:
        """A parameter that no technique replaces, unlike `output_weight`."""
        return self.model.norm.weight  # pyright: ignore[reportReturnType]

    @property
    def output_weight(self) -> Tensor:
        """The output layer's weight (V, D), or (1, D) for a reward model; the embedding's weight if they are tied, or
        the model has no output layer. With a bias, a copy (V, D + 8) with the bias and zeros as further columns, for
        hidden states of that width."""
        if self.tied_output_weight is not None:
            return self.tied_output_weight()
        if self.config.head_bias and self.head is not None:
            return F.pad(torch.cat((self.head.weight, self.head.bias[:, None]), 1), (0, _BIAS_COLUMNS - 1))
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
        return_drafts: bool = False,
        is_token: Tensor | None = None,
        prefixes: Tensor | None = None,
        num_prefix_tokens: int = 0,
        recorded_experts: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Compute logits (B, T, V), or with `return_hidden` the hidden states from which `logits` computes them, of the
        width of `output_weight`.

        Args:
            input_ids: (B, T) int64, padded on the right.
            positions: (B, T) int64. By default they count from 0 in each row or document, or continue the cache.
            cu_seqlens: (documents + 1,) int32, boundaries of packed documents in the B * T tokens. No document is
                longer than a row.
            cache: holds earlier tokens of each row. It advances by T, or by `lengths`.
            lengths: (B,) int64, the number of tokens of each row that are not padding; only with a cache.
            return_router_loss: also return `router_aux_loss_coef` times `load_balancing_loss`, a float32 scalar to add
                to a mean loss. It is None if the coefficient is 0 or no gradients are computed.
            return_drafts: also return, last, a list with the hidden states (B, T, D) of each drafting layer. Those of
                layer k at position t predict token t + k + 1 of the same document; `logits` computes from them. Not
                with a cache or prefixes.
            is_token: (B, T) bool, False for padding, which the router's loss ignores and which no token of a text
                encoder sees. In rows of an encoder without `cu_seqlens` and `is_token`, all are tokens.
            prefixes: (documents, 2) int32, start and end of an earlier stretch of the same row that a document
                continues. The document attends to it, and its positions continue from there. If a rotary scaling
                depends on the length, all documents with one prefix must have lengths of the same frequencies
                (`RopeConfig.same_frequencies`).
            num_prefix_tokens: the total length of all prefixes.
            recorded_experts: (B, T, choices) integers, the experts that a cache recorded for the tokens
                (`KVCache.experts`). They replace the routers' choices; their weights are those of the present logits.
                0: the router chooses.
            inputs: further inputs by name. `lean_ft.models.vision.inserts` lists those that a model with a vision tower
                reads. None is the same as no input.

        If ranks share a row, input_ids, is_token and the result are this rank's tokens; positions (required),
        cu_seqlens and prefixes are those of the whole row. With a cache every rank has whole rows, and heads may be
        sharded.

        Raises ValueError for invalid combinations of these arguments, for inputs that the model does not read, and for
        a cache that is full.
        """
        tokens = self.sharding.row_tokens if cache is None else None
        if tokens is not None and positions is None:
            raise ValueError("positions are required if ranks share a row.")
        if return_drafts and (tokens is not None or cache is not None or prefixes is not None):
            raise ValueError("drafting layers read whole rows of texts, without a cache or prefixes.")
        inserts = inserts_of(self, inputs, input_ids.device, shares_rows=tokens is not None)
        rows = input_ids if tokens is None or positions is None else positions
        if self.config.bidirectional and cu_seqlens is None and is_token is not None:
            if tokens is not None:
                raise ValueError(
                    "ranks share a row, so rows of a text encoder need cu_seqlens. Set data.packing=padding_free."
                )
            cu_seqlens = bounds_of_texts(is_token)
        sight = self._sight(rows.shape, cu_seqlens, prefixes, num_prefix_tokens)
        positions = positions_of(rows, positions, cu_seqlens, cache, lengths, prefixes, inserts.position_shift)
        routes = Routes(self, is_token, cache, recorded_experts)
        drafts: list[Tensor] | None = [] if return_drafts else None
        texts = Pass(None, None, cu_seqlens, sight=sight)
        hidden = self._through_layers(input_ids, positions, texts, cache, inserts, routes, drafts)
        if cache is not None:
            cache.advance(routes.chosen)
        result = hidden if return_hidden else self.logits(hidden)
        further = ((routes.loss(),) if return_router_loss else ()) + (() if drafts is None else (drafts,))
        return (result, *further) if further else result

    def _sight(
        self, shape: torch.Size, cu_seqlens: Tensor | None, prefixes: Tensor | None, num_prefix_tokens: int
    ) -> Sight | None:
        if prefixes is None:
            return None
        if cu_seqlens is None:
            raise ValueError("prefixes need cu_seqlens.")
        if self.config.bidirectional:
            raise ValueError(
                "prefixes are not supported: the tokens of a prefix see what continues it. Copy the prefix into each "
                "document."
            )
        if self.config.has_states:
            raise ValueError(
                "prefixes are not supported: the model has recurrent layers. Copy the prefix into each document."
            )
        return Sight.of(prefixes, num_prefix_tokens, cu_seqlens, shape.numel())

    def rotations(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        cu_seqlens: Tensor | None,
        cache: KVCache | None,
        inserts: Inserts,
    ) -> dict[tuple[RopeConfig, int] | None, tuple[Tensor | None, Tensor | None]]:
        """cos and sin (B or 1, T, rotated features) of each kind of rotation in the model."""
        text_lengths = self._text_lengths(positions, cu_seqlens, cache)
        positions = inserts.turned(positions)
        if self.sharding.row_tokens is not None and cache is None:
            positions = self.sharding.row_tokens.of_attention(positions)
            text_lengths = None if text_lengths is None else self.sharding.row_tokens.of_attention(text_lengths)
        rotations = {rotation: rotary(positions, dtype, text_lengths) for rotation, rotary in self.rotary.items()}
        return {None: (None, None), **rotations}

    def _through_layers(
        self,
        input_ids: Tensor,
        positions: Tensor,
        texts: Pass,
        cache: KVCache | None,
        inserts: Inserts,
        routes: Routes,
        drafts: list[Tensor] | None,
    ) -> Tensor:
        """Hidden states of the width of `output_weight`. `texts` has the documents and sight of the batch; hidden
        states of drafting layers are added to `drafts`."""
        hidden, input_ids = inserts.embedded(self.model.embedded(input_ids, positions), input_ids)
        embedded = hidden if drafts is not None else None  # only then kept during the layers
        sights = inserts.sights(texts.sight, self.config.layers)
        rotations = self.rotations(positions, hidden.dtype, texts.cu_seqlens, cache, inserts)
        hidden, inputs = self.model.into_layers(hidden, input_ids)
        keys_and_values: dict[int, KeysAndValues | None] = {}

        def context(i: int) -> Pass:
            kv_from_layer = self.config.layers[i].kv_from_layer
            return Pass(
                *rotations[self.config.rotation_of(i)],
                texts.cu_seqlens,
                cache=(None, None) if cache is None else cache.layer(i),
                sight=sights[i],
                shared=None if kv_from_layer is None else keys_and_values[kv_from_layer],
                layer_input=inputs[i] if inputs else None,
                recorded=None if self.config.layers[i].mixture is None else routes.recorded(),
            )

        for i, layer in zip(range(self.config.num_layers), self.model.layers, strict=False):
            hidden, routed, keys_and_values[i] = layer(hidden, context(i))
            if routed is not None:
                routes.add(i, *routed)
            hidden = inserts.after(i, hidden)
        hidden = self.model.out_of_layers(hidden)
        if drafts is not None and embedded is not None:
            drafts += drafted(self.drafting, hidden, embedded, context, routes, self.config.num_layers)
        if self.config.logits_divisor != 1.0:  # divides hidden states, because losses never hold all logits at once
            hidden = hidden / self.config.logits_divisor
        if self.config.head_bias:  # the factors of the bias and of the zero columns of `output_weight`
            hidden = torch.cat((hidden, F.pad(torch.ones_like(hidden[..., :1]), (0, _BIAS_COLUMNS - 1))), -1)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits (..., V) of hidden states (..., D) that `forward` returned with `return_hidden`.

        Raises ValueError if the model has no output layer.
        """
        if not self.config.has_output:
            raise ValueError("the model has no output layer: call it with return_hidden=True for its hidden states.")
        # In training the product is the same with and without gradients.
        product = F.linear if self.training else few_rows_linear
        if self.config.head_bias and self.head is not None:
            logits = product(hidden[..., :-_BIAS_COLUMNS], self.head.weight, self.head.bias)
        elif self.sharding.vocabulary is None:
            logits = product(hidden, self.output_weight)
        else:
            logits = self.sharding.vocabulary.logits(hidden)
        cap = self.config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _text_lengths(self, positions: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """The length of each position's document, (B or 1, T or 1); None if no frequency depends on it, or each row is
        one document."""
        if cache is not None:
            return cache.next_lengths[:, None]
        if not any(rope.depends_on_length for rope, _ in self.rotary):
            return None
        if cu_seqlens is None:
            is_whole_row = self.sharding.row_tokens is None
            return None if is_whole_row else positions.amax(-1, keepdim=True).expand_as(positions) + 1
        return lengths_of_documents(positions, cu_seqlens)

    def through_dense(self, vectors: Tensor) -> Tensor:
        """The vectors (M, D') of M texts from their pooled hidden states (M, D), float32 or wider; without dense layers
        these are the vectors."""
        return vectors if self.dense is None else self.dense(vectors)

    def new_cache(self, batch_size: int, capacity: int, records_experts: bool = False) -> KVCache:
        """An empty cache for `batch_size` rows of up to `capacity` positions, and of their experts with
        `records_experts`. Raises ValueError for a text encoder, whose tokens see later ones."""
        if self.config.bidirectional:
            raise ValueError("a text encoder has no cache: its tokens see later ones, so it cannot generate text.")
        return self._cache(batch_size, capacity, self.device, records_experts)

    def cache_bytes(self, batch_size: int, capacity: int) -> int:
        """The size of such a cache."""
        return self._cache(batch_size, capacity, torch.device("meta")).num_bytes

    def _cache(self, batch_size: int, capacity: int, device: torch.device, records_experts: bool = False) -> KVCache:
        row_tokens = self.sharding.row_tokens
        num_head_parts = 1 if row_tokens is None else row_tokens.num_head_parts
        return KVCache(self.config, batch_size, capacity, self.dtype, device, num_head_parts, records_experts)
