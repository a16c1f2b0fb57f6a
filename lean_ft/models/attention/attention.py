"""Grouped-query attention over padded, packed and cached inputs; causal, or in text encoders to both sides.

A batch has plain rows (one document per row, padded on the right, where causality hides the padding; an encoder's rows
have none) or packed rows, whose documents `cu_seqlens` marks. Documents never see each other. Each is computed
separately rather than through a (T, T) mask, so changing a document leaves the others' outputs bit-identical. A
document may continue an earlier stretch of its row (`Sight`), as several completions of one prompt do.

On CUDA in 16 bits, on cards since Ampere, PyTorch's kernels compute it: fused attention for rows, `varlen_attn` for
documents and windows. Everything else uses the custom op of `document_attention`: sinks, CPUs, older cards, float32,
soft caps, queries that see later tokens, and heads of more than 256 features, which PyTorch's kernels lack or compute
slowly or with all scores in memory. `kernels` chooses. No path keeps a (T, T) tensor, or copies of keys and values for
each query head.

Shapes: B batch, T tokens of a row, N = B * T tokens, H query heads, K key-value heads, D features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.attention.document_attention import document_attention
from lean_ft.models.attention.kernels import kernel_of
from lean_ft.models.cache import LayerCache
from lean_ft.models.config import DecoderConfig
from lean_ft.models.layers import HeadLayerNorm, RMSNorm, unit_rms
from lean_ft.models.projections import project
from lean_ft.models.rope import rotate, rotate_both


@dataclass(frozen=True)
class Scoring:
    """Variants of softmax attention."""

    scale: float | None = None  # None: D ** -0.5
    window: int | None = None  # positions that a query sees, including its own; as many on the other side of an encoder
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    chunk: int | None = None  # a query sees its own chunk of this many positions
    sees_later: bool = False  # a query also sees the later tokens of its document

    def num_ahead(self, longest: int) -> int:
        """The most later tokens that a query sees in documents of up to `longest` tokens."""
        return min(self.window or longest, longest) - 1 if self.sees_later else 0

    def is_plain(self, *, sinks: bool) -> bool:
        """Whether PyTorch's flash kernels compute this, with or without sinks, for heads of the right size."""
        return self.softcap is None and not (self.sees_later and sinks)


class Sight(NamedTuple):
    """What queries see beside the earlier tokens of their document."""

    # An earlier stretch of the same row that each document continues, (documents, 2) int32: start and end; equal for no
    # prefix.
    prefixes: Tensor | None = None
    # On CUDA: the positions that each document sees (its prefix and its own), and where each document's begin.
    key_index: Tensor | None = None
    key_cu_seqlens: Tensor | None = None  # (documents + 1,) int32
    # The token of the flattened batch before which each query's keys end, (N,) int32, where some see later tokens of
    # their document; and the most tokens that a query sees ahead.
    ends: Tensor | None = None
    num_ahead: int = 0

    @classmethod
    def of(cls, bounds: Tensor, num_prefix_tokens: int, cu_seqlens: Tensor, num_tokens: int) -> "Sight":
        """The sight of documents `cu_seqlens` of `num_tokens` tokens that continue prefixes, of `num_prefix_tokens` in
        all."""
        if not bounds.is_cuda:
            return cls(bounds)
        return cls.listing_keys(bounds, num_prefix_tokens, cu_seqlens, num_tokens)

    @classmethod
    def listing_keys(cls, bounds: Tensor, num_prefix_tokens: int, cu_seqlens: Tensor, num_tokens: int) -> "Sight":
        """As `of`, with the index of keys for kernels that do not support prefixes."""
        begins, ends = bounds.unbind(1)
        before = ends - begins  # (documents,)
        key_cu_seqlens = F.pad((before + cu_seqlens.diff()).cumsum(0), (1, 0)).to(torch.int32)
        keys = torch.arange(num_tokens + num_prefix_tokens, dtype=torch.int32, device=bounds.device)
        document = torch.bucketize(keys, key_cu_seqlens, right=True) - 1
        nth = keys - key_cu_seqlens[document]
        in_document = cu_seqlens[document] + nth - before[document]
        index = torch.where(nth < before[document], begins[document] + nth, in_document)
        return cls(bounds, index, key_cu_seqlens)


KeysAndValues = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scoring, Tensor | None, Sight | None], Tensor]


class Attention(nn.Module):
    """Grouped-query attention with its projections, norms, gate and rotation.

    A family with another attention overrides a step: `projected`, `by_head`, `turned` or `attended`.
    """

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        layer, hidden_size = config.layers[layer_index], config.hidden_size
        self.head_dim = config.head_dim_of(layer_index)
        self.scoring = Scoring(config.attention_scale, layer.window, sees_later=config.bidirectional)
        query_size, kv_size = (n * self.head_dim for n in (config.num_heads, config.num_kv_heads_of(layer_index)))
        self.value_dim = self.features_of_values(config)
        self.split_sizes = [query_size, kv_size, kv_size]
        self.is_fused, self.qkv_by_head = config.fused_qkv, config.qkv_by_head
        if self.is_fused:
            self.qkv_proj = nn.Linear(hidden_size, sum(self.split_sizes), bias=config.qkv_bias)
        else:
            of_gate = query_size if config.attention_gate == "in_query" else 0
            self.q_proj = nn.Linear(hidden_size, query_size + of_gate, bias=config.qkv_bias)
            self.k_proj = nn.Linear(hidden_size, kv_size, bias=config.qkv_bias)
            self.v_proj = nn.Linear(hidden_size, kv_size // self.head_dim * self.value_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * self.value_dim, hidden_size, bias=config.output_bias)
        if config.attention_gate == "own":
            self.gate_proj = nn.Linear(hidden_size, config.num_heads * self.value_dim, bias=False)
        self.is_kv_source = layer_index in config.kv_source_layers
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.gate, self.qk_norm = config.attention_gate, config.qk_norm
        if self.qk_norm == "centered_by_head":
            counts = config.num_heads, config.num_kv_heads_of(layer_index)
            self.q_norm, self.k_norm = (HeadLayerNorm(n, self.head_dim, config.norm_eps) for n in counts)
        elif self.qk_norm == "centered":
            self.q_norm, self.k_norm = (nn.LayerNorm(self.head_dim, config.norm_eps) for _ in range(2))
        elif self.qk_norm is not None:
            sizes = (query_size, kv_size) if self.qk_norm == "projection" else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (RMSNorm(n, config.norm_eps, config.norm_weight_offset) for n in sizes)
        self.value_norm_eps = config.norm_eps if config.value_norm else None
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        self.attend: Attend = attend  # replaced if ranks share a row

    def features_of_values(self, config: DecoderConfig) -> int:
        """Features of a head's values; `head_dim` is set."""
        return self.head_dim

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
        sight: Sight | None = None,
    ) -> Tensor | tuple[Tensor, KeysAndValues]:
        """Attend from hidden states (B, T, hidden_size); cos and sin are those of `RotaryEmbedding`, or None.

        Returns (B, T, hidden_size), and also keys and values (B, T, K, D) if other layers attend to them.
        """
        query, key, value, gate = self.projected(hidden)
        query, key, value = self.by_head(query, key, value)
        query, key = self.turned(query, key, cos, sin)
        attended = self.attended(query, key, value, cu_seqlens, cache, sight).flatten(-2)
        result = self.o_proj(attended if gate is None else attended * gate.sigmoid())
        return (result, (key, value)) if self.is_kv_source else result

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and the gate of each head's output: all heads' features side by side, or with
        `qkv_by_head` by head."""
        if self.is_fused:
            fused = self.qkv_proj(hidden)
            gates = [self.gate_proj(hidden)] if self.gate == "own" else []
            by_head = fused.unflatten(-1, (-1, 3 * self.head_dim)) if self.qkv_by_head else None
            query, key, value = fused.split(self.split_sizes, -1) if by_head is None else by_head.chunk(3, -1)
        else:
            layers = self.q_proj, self.k_proj, self.v_proj, *([self.gate_proj] if self.gate == "own" else [])
            query, key, value, *gates = project(hidden, *layers)
        gate = gates[0] if gates else None
        if self.gate == "in_query":  # each head's query is followed by its gate
            query, gate = (x.flatten(-2) for x in query.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1))
        return query, key, value, gate

    def by_head(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, H, D), and (B, T, K, D) twice, with the norms before rotation."""
        if self.qk_norm == "projection":
            query, key = self.q_norm(query), self.k_norm(key)
        if not self.qkv_by_head:
            query, key = (x.unflatten(-1, (-1, self.head_dim)) for x in (query, key))
            value = value.unflatten(-1, (-1, self.value_dim))
        if self.qk_norm in ("head", "centered", "centered_by_head"):  # under autocast a LayerNorm returns float32
            query, key = self.q_norm(query).to(query.dtype), self.k_norm(key).to(key.dtype)
        if self.value_norm_eps is not None:
            value = unit_rms(value, self.value_norm_eps)
        return query, key, value

    def turned(self, query: Tensor, key: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys, with the norm after rotation."""
        if cos is not None and sin is not None:
            query, key = rotate_both(query, key, cos, sin, self.interleaved)
        if self.qk_norm == "turned_head":
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None,
        cache: LayerCache | None,
        sight: Sight | None,
    ) -> Tensor:
        """What each head sees, (B, T, H, features of a value). The keys and values are added to the cache."""
        if cache is None:
            return self.attend(query, key, value, cu_seqlens, self.scoring, self.sinks, sight)
        keys, values = cache.store(key, value)  # (B, C, K, D)
        if cache.owner.starts_empty:
            return attend_rows(query, key, value, self.scoring, self.sinks, sight)
        return attend_filled(query, keys, values, cache, self.scoring, self.sinks, sight)


class AttentionToShared(nn.Module):
    """Attends to the keys and values of an earlier layer."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        layer, self.head_dim = config.layers[layer_index], config.head_dim_of(layer_index)
        self.scoring = Scoring(config.attention_scale, layer.window, sees_later=config.bidirectional)
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, config.norm_weight_offset)
        self.attend: Attend = attend

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
        sight: Sight | None = None,
        *,
        shared: KeysAndValues,
    ) -> Tensor:
        """As `Attention`. `shared`: the earlier layer's keys and values of this pass; `cache`: the earlier layer's."""
        query = rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))), cos, sin)
        if cache is None:
            attended = self.attend(query, *shared, cu_seqlens, self.scoring, None, sight)
        elif cache.owner.starts_empty:
            attended = attend_rows(query, *shared, self.scoring, None, sight)
        else:
            attended = attend_filled(query, *cache.filled(len(query)), cache, self.scoring, None, sight)
        return self.o_proj(attended.flatten(-2))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    scoring: Scoring,
    sinks: Tensor | None,
    sight: Sight | None = None,
) -> Tensor:
    """Attention within each document, or within each row if `cu_seqlens` is None."""
    if cu_seqlens is None:
        return attend_rows(query, key, value, scoring, sinks, sight)
    return attend_documents(query, key, value, cu_seqlens, scoring, sinks, sight)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring = Scoring(),
    sinks: Tensor | None = None,
    sight: Sight | None = None,
) -> Tensor:
    """Attention (B, T, H, D) within each row, of query (B, T, H, D), key and value (B, T, K, D).

    sinks (H,): a logit per head that joins the softmax and has no value.
    """
    if sight is None and _has_row_kernels(query, key, scoring, sinks):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, heads, T, D)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=not scoring.sees_later, scale=scoring.scale, enable_gqa=True
        )
        return attended.transpose(1, 2)
    num_rows, num_tokens = query.shape[:2]
    device = query.device if query.is_cuda else None
    bounds = torch.arange(0, num_rows * num_tokens + 1, num_tokens, dtype=torch.int32, device=device)
    return attend_documents(query, key, value, bounds, scoring, sinks, sight)


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scoring: Scoring = Scoring(),
    sinks: Tensor | None = None,
    sight: Sight | None = None,
) -> Tensor:
    """Attention (B, T, H, D) within each document and to its prefix.

    query (B, T, H, D); key and value (B, T, K, D); cu_seqlens (documents + 1,) int32, the documents' boundaries in the
    N = B * T tokens; sinks (H,). No document with its prefix is longer than a row. Raises ValueError for prefixes if
    rows have several chunks.
    """
    longest = query.shape[1]
    if scoring.chunk is not None and scoring.chunk < longest:
        if sight is not None:
            chunks = f"attention has chunks of {scoring.chunk} positions"
            raise ValueError(f"prefixes and images are not supported: {chunks}.")
        cu_seqlens, longest = _chunk_bounds(cu_seqlens, scoring.chunk, query.shape[0] * longest), scoring.chunk
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))  # (N, heads, D)
    num_ahead, ends = scoring.num_ahead(longest), None if sight is None else sight.ends
    if sight is not None and scoring.sees_later:
        raise ValueError("prefixes and images are not supported: tokens see the later tokens of their text.")
    if has_kernels(query, scoring, sinks) and ends is None:
        # The longest document's length only sizes the kernel's grid, so its upper bound is enough: reading the true
        # length would wait for the device in every layer.
        key_cu_seqlens = cu_seqlens
        if sight is not None:
            # With more keys than queries the kernel aligns the last query with the last key.
            assert sight.key_index is not None and sight.key_cu_seqlens is not None
            k, v = (x.index_select(0, sight.key_index) for x in (k, v))
            key_cu_seqlens = sight.key_cu_seqlens
        if sinks is not None:
            rules = sinks, scoring.scale, scoring.window, None, longest
            attended: Any = document_attention(q, k, v, cu_seqlens, *rules, key_bounds=key_cu_seqlens)
        else:
            from lean_ft.models.attention.varlen import GROUPED, varlen_attn

            back = -1 if scoring.window is None else scoring.window - 1  # earlier positions that a query sees; -1: all
            ahead = back if scoring.sees_later else 0
            attended = varlen_attn(
                *(q, k, v, cu_seqlens, key_cu_seqlens, longest, longest),
                scale=scoring.scale,
                window_size=(back, ahead),
                **GROUPED,
            )
    else:
        rules = scoring.scale, scoring.window, scoring.softcap
        seen = (None, None, num_ahead) if sight is None else (sight.prefixes, sight.ends, sight.num_ahead)
        attended = document_attention(q, k, v, cu_seqlens, sinks, *rules, query.shape[1], *seen)
    return attended.view(query.shape)


def _chunk_bounds(cu_seqlens: Tensor, chunk: int, num_tokens: int) -> Tensor:
    """Boundaries of the chunks of documents. Their number is an upper bound, which needs no wait for a GPU; the last
    chunks may be empty."""
    of_each = (cu_seqlens.diff() + chunk - 1) // chunk
    firsts = F.pad(of_each.cumsum(0), (1, 0))  # (documents + 1,): the number of each document's first chunk
    chunks = torch.arange(len(of_each) + num_tokens // chunk + 1, device=cu_seqlens.device)
    document = torch.bucketize(chunks, firsts, right=True) - 1
    return (cu_seqlens[document] + (chunks - firsts[document]) * chunk).clamp(max=num_tokens).to(torch.int32)


def attend_filled(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cache: LayerCache,
    scoring: Scoring,
    sinks: Tensor | None,
    sight: Sight | None = None,
) -> Tensor:
    """The attention of query (B, T, H, D) to the cached keys and values (B, filled, K, D)."""
    of_kernel = cache.owner.of_kernel
    if of_kernel is not None and _has_length_kernel(query, scoring, sinks):
        from lean_ft.models.attention.varlen import GROUPED, AuxRequest, varlen_attn

        starts, key_starts, lengths = of_kernel
        k, v = (x[: len(query)].flatten(0, 1) for x in (cache.keys, cache.values))  # (B * capacity, K, D)
        window = (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
        attended: Any = varlen_attn(
            *(query[:, 0], k, v, starts, key_starts, 1, cache.owner.filled),
            scale=scoring.scale,
            window_size=window,
            seqused_k=lengths,
            return_aux=AuxRequest(lse=True),
            **GROUPED,
        )
        out, lse = attended  # (B, H, D) and (H, B)
        if sinks is not None:  # the share of the other weights in a softmax that the sink joins
            out = (out * (lse - sinks[:, None]).sigmoid().T[..., None]).to(out.dtype)
        return out[:, None]
    ends = None if sight is None else sight.ends
    visible = cache.owner.visible(scoring.window, scoring.chunk, ends)  # (B, T, C)
    num_kv_heads = keys.shape[2]
    if scoring.softcap is None and sinks is None:
        q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
        mask = None if visible is None else visible[:, None]
        if query.shape[1] == 1:
            # Queries of a group are rows of one product, which avoids copies of keys and values.
            q = q.reshape(len(q), num_kv_heads, -1, q.shape[-1])  # (B, K, H / K, D)
            attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scoring.scale)
            return attended.reshape(query.shape)
        attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scoring.scale, enable_gqa=True)
        return attended.transpose(1, 2)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    grouped = query.float().unflatten(2, (num_kv_heads, -1)) * scale  # (B, T, K, H / K, D)
    scores = torch.einsum("btkgd,bckd->bkgtc", grouped, keys.float())
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype)
    return torch.einsum("bkgtc,bckd->btkgd", weights, values).flatten(2, 3)


def has_kernels(query: Tensor, scoring: Scoring, sinks: Tensor | None) -> bool:
    """Whether PyTorch's flash kernels support this, for documents, windows and grouped heads too."""
    return kernel_of(query, is_plain=scoring.is_plain(sinks=sinks is not None), sinks=sinks is not None) == "flash"


def _has_length_kernel(query: Tensor, scoring: Scoring, sinks: Tensor | None) -> bool:
    """The same for one new token of rows whose lengths are on the device."""
    if scoring.chunk is not None or not has_kernels(query, scoring, sinks):
        return False
    from lean_ft.models.attention.varlen import TAKES_LENGTHS

    return TAKES_LENGTHS


def _has_row_kernels(query: Tensor, key: Tensor, scoring: Scoring, sinks: Tensor | None) -> bool:
    """The same for rows. Kernels of older cards lack grouped heads, for which PyTorch would hold all scores."""
    is_cut = scoring.chunk is not None and scoring.chunk < query.shape[1]
    if sinks is not None or scoring.window is not None or is_cut:
        return False
    if has_kernels(query, scoring, None):
        return True
    is_older = query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0)
    same_heads = query.shape[2] == key.shape[2] and query.shape[3] % 8 == 0 and query.shape[3] <= 256
    return is_older and same_heads and query.itemsize == 2 and scoring.softcap is None
