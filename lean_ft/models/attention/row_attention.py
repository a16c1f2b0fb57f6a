"""Attention of packed rows on a GPU, whose host does not know the documents' boundaries.

`document_attention` reads the boundaries, so on a GPU it would wait in every layer, and one short document is too
little work for a launch. Here a block of queries of all rows attends to all earlier keys, and other documents are
masked, so no shape depends on data on the device. The masked products cost little compared with a layer's other
products.

Products are summed in float32, and scores and the gradients of keys and values are float32. Backward recomputes the
softmax, so only a block's scores have the shape (T, T). The softmax's gradient is one kernel; its formula also holds
for weights that do not sum to one because of a sink.

Source: blocks and recomputation: FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135).

Shapes: B rows, T tokens of a row, N = B * T tokens, H query heads, K key-value heads, G = H / K heads of a group, D
features of a head, S rows of a block (its queries times G), C keys that a block sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lean_ft.models.layers import wide_dtype
from lean_ft.system.world import capability, device_type
from lean_ft.torch_private import assert_on_device, softmax_backward

BLOCK_SCORES = 2**23  # scores of a block over all rows and heads, 32 MiB in float32; two to four copies exist at once
_ALIGNED_QUERIES = 8  # blocks have a multiple of this number of queries, for tensor cores


RowArguments = tuple[
    Tensor,
    Tensor | None,
    float | None,
    int | None,
    float | None,
    int,
    Tensor | None,
    Tensor | None,
    int,
    Tensor | None,
]  # the fields of `Rows`, as an operator gets them


class Rows(NamedTuple):
    """The documents of rows, and variants of causal softmax attention: the operator's arguments of
    `document_attention`."""

    cu_seqlens: Tensor
    sinks: Tensor | None
    scale: float | None
    window: int | None
    softcap: float | None
    num_tokens: int  # of a row
    prefixes: Tensor | None = None
    ends: Tensor | None = None
    num_ahead: int = 0
    key_bounds: Tensor | None = None

    def with_ends(self, num_all: int) -> "Rows":
        """The same with `ends` for all N tokens, if queries see `num_ahead` later tokens of their documents."""
        if self.ends is not None or not self.num_ahead:
            return self
        tokens = torch.arange(num_all, dtype=self.cu_seqlens.dtype, device=self.cu_seqlens.device)
        document = torch.bucketize(tokens, self.cu_seqlens[1:-1], right=True)
        ends = torch.minimum(self.cu_seqlens[document + 1], tokens + self.num_ahead + 1)
        return self._replace(ends=ends.to(torch.int32))


def attend_rows(query: Tensor, key: Tensor, value: Tensor, of_rows: Rows) -> Tensor:
    """The attention (N, H, D) of query (N, H, D) to key and value (N, K, D), as `document_attention`.

    The device checks that `cu_seqlens` rises from 0 to N and that no document crosses the end of a row.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    softmax = _Softmax(query, key, of_rows)
    values = _by_head(value, of_rows.num_tokens)
    outs = torch.empty_like(softmax.queries)  # (B * K, T * G, D)
    for block in softmax.blocks:
        weights = softmax(block).weights.to(query.dtype)  # (B * K, S, C)
        torch.bmm(weights, values[:, block.keys], out=outs[:, block.rows])
    _put_queries(outs, out, of_rows.num_tokens)
    return out


def attend_rows_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, of_rows: Rows
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and (in float32) sinks from that of `attend_rows`'s result."""
    softmax, row_tokens, sinks = _Softmax(query, key, of_rows), of_rows.num_tokens, of_rows.sinks
    keys, values = softmax.keys, _by_head(value, row_tokens)
    grads = _by_query(grad_out, key.shape[1], row_tokens)  # (B * K, T * G, D)
    grad_queries = torch.empty_like(softmax.queries)
    # (B * K, T, D) each
    grad_keys, grad_values = (torch.zeros_like(keys, dtype=softmax.dtype) for _ in range(2))
    grad_sinks = None if sinks is None else torch.zeros(len(sinks), dtype=softmax.dtype, device=query.device)
    for block in softmax.blocks:
        weights, slope, sink_weights = softmax(block)
        grad_rows = grads[:, block.rows]  # (B * K, S, D)
        grad_weights = _product(grad_rows, values[:, block.keys].mT)  # (B * K, S, C)
        if grad_sinks is not None and sink_weights is not None:
            of_sinks = sink_weights * (weights * grad_weights).sum(-1, keepdim=True)
            of_sinks = of_sinks.view(len(query) // row_tokens, key.shape[1], -1, softmax.group)  # (B, K, queries, G)
            grad_sinks -= of_sinks.sum((0, 2)).flatten()
        grad_scores = softmax_backward(grad_weights, weights, -1, softmax.dtype)
        del grad_weights
        grad_values[:, block.keys] += _product(weights.to(query.dtype).mT, grad_rows)
        if slope is not None:
            grad_scores *= slope
        del weights, slope
        grad_scores = grad_scores.to(query.dtype)
        torch.bmm(grad_scores, keys[:, block.keys], out=grad_queries[:, block.rows])
        grad_keys[:, block.keys] += _product(grad_scores.mT, softmax.queries[:, block.rows])
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    _put_queries(grad_queries.mul_(softmax.scale), grad_query, row_tokens)
    for grad, grad_heads in ((grad_key, grad_keys.mul_(softmax.scale)), (grad_value, grad_values)):
        heads = grad_heads.unflatten(0, (-1, key.shape[1]))  # (B, K, T, D)
        grad.view(-1, row_tokens, *grad.shape[1:]).copy_(heads.transpose(1, 2))
    return grad_query, grad_key, grad_value, grad_sinks


class _Block(NamedTuple):
    queries: slice  # of a row's tokens
    rows: slice  # the same queries among a head's T * G rows
    keys: slice  # keys that any of the queries sees


class Weights(NamedTuple):
    weights: Tensor  # (B * K, S, C) float32
    slope: Tensor | None  # the soft cap's derivative
    sinks: Tensor | None  # (B * K, S, 1): the weights of the sinks


class _Softmax:
    """The attention weights of one block of queries."""

    def __init__(self, query: Tensor, key: Tensor, of_rows: Rows) -> None:
        of_rows = of_rows.with_ends(len(query))
        num_heads, num_kv_heads, row_tokens = query.shape[1], key.shape[1], of_rows.num_tokens
        self.group, self.num_kv_heads = num_heads // num_kv_heads, num_kv_heads
        self.dtype = wide_dtype(query)
        self.scale = query.shape[-1] ** -0.5 if of_rows.scale is None else of_rows.scale
        self.softcap = of_rows.softcap
        self.queries = _by_query(query, num_kv_heads, row_tokens)
        self.keys = _by_head(key, row_tokens)
        self.first, self.prefix = _visible(of_rows, len(query))
        self.places = torch.arange(row_tokens, device=query.device)
        window = of_rows.window if of_rows.prefixes is None else None  # a prefix may be outside the window's positions
        self.blocks = _blocks(len(query) // row_tokens * num_heads, row_tokens, self.group, window, of_rows.num_ahead)
        self.ends = None  # where each token's keys end in its row, (B, T)
        if of_rows.ends is not None:
            ends = of_rows.ends.view(-1, row_tokens)
            self.ends = ends - torch.arange(len(ends), device=ends.device)[:, None] * row_tokens
        self.sinks = None
        if of_rows.sinks is not None:
            self.sinks = of_rows.sinks.to(self.dtype).view(1, num_kv_heads, 1, self.group, 1)

    @torch.autocast("cpu", enabled=False)
    @torch.autocast("cuda", enabled=False)
    def __call__(self, block: _Block) -> Weights:
        scores = _product(self.queries[:, block.rows], self.keys[:, block.keys].mT)  # (B * K, S, C)
        slope = None
        if self.softcap is None:
            scores.mul_(self.scale)
        else:
            tanh = scores.mul_(self.scale / self.softcap).tanh_()
            slope = 1 - tanh.square()
            scores = tanh.mul_(self.softcap)
        queries, keys = self.places[block.queries], self.places[block.keys]
        is_later = keys > queries[:, None] if self.ends is None else keys >= self.ends[:, block.queries, None]
        hidden = (keys < self.first[:, block.queries, None]).logical_or_(is_later)  # (B, queries, C)
        if self.prefix is not None:
            begin, end = (bound[:, block.queries, None] for bound in self.prefix)
            hidden.logical_and_((keys < begin).logical_or_(keys >= end))
        by_query = scores.view(len(hidden), self.num_kv_heads, len(queries), self.group, -1)
        by_query.masked_fill_(hidden[:, None, :, None], float("-inf"))
        if self.sinks is None:
            return Weights(scores.softmax(-1), slope, None)
        sinks = self.sinks.expand(*by_query.shape[:-1], 1)
        weights = torch.cat((by_query, sinks), -1).softmax(-1).view(*scores.shape[:2], -1)
        return Weights(weights[..., :-1], slope, weights[..., -1:])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix products in float32 or wider."""
    wide = wide_dtype(left)
    if left.dtype == wide:
        return torch.bmm(left, right)
    # Cards before Ampere support this for float16 only.
    device = left.device
    if device_type(device) == "cuda" and (left.dtype == torch.float16 or capability(device) >= (8, 0)):
        return torch.bmm(left, right, out_dtype=wide)
    return torch.bmm(left.to(wide), right.to(wide))


def _visible(of_rows: Rows, num_tokens: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The first index in its row that each token sees of its document, (B, T), and the start and end of its prefix, (B,
    T) each."""
    cu_seqlens, window, row_tokens = of_rows.cu_seqlens, of_rows.window, of_rows.num_tokens
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.bucketize(tokens, cu_seqlens, right=True) - 1
    starts = cu_seqlens[document].view(-1, row_tokens)
    of_row = tokens.view(-1, row_tokens)
    row_starts = of_row[:, :1]
    fits = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens) & (cu_seqlens.diff() >= 0).all()
    prefix = None
    if of_rows.prefixes is not None:
        begin, end = (bound.view(-1, row_tokens) for bound in of_rows.prefixes[document].unbind(1))
        fits = fits & ((begin == end) | (begin >= row_starts) & (begin < end) & (end <= starts)).all()
        if window is not None:
            begin = torch.maximum(begin, begin + (of_row - starts) + (end - begin) - (window - 1))
        prefix = begin - row_starts, end - row_starts
    assert_on_device(
        fits & (starts >= row_starts).all(),
        f"cu_seqlens must rise from 0 to the number of tokens, {num_tokens}; no document may cross the end of a row of "
        f"{row_tokens} tokens, and prefixes must precede their documents in the row.",
    )
    if window is not None:
        starts = torch.maximum(starts, of_row - (window - 1))
    return starts - row_starts, prefix


def _blocks(num_rows: int, row_tokens: int, group: int, window: int | None, num_ahead: int = 0) -> list[_Block]:
    """Split a row's queries into blocks of about equal numbers of scores. `num_rows`: rows times heads."""
    blocks, start = [], 0
    while start < row_tokens:
        first = 0 if window is None else max(0, start - window + 1)
        # The largest q with num_rows * q * (before + q) <= BLOCK_SCORES.
        before, scores = start - first, BLOCK_SCORES // num_rows
        queries = int(((before * before + 4 * scores) ** 0.5 - before) / 2)
        queries = max(_ALIGNED_QUERIES, queries // _ALIGNED_QUERIES * _ALIGNED_QUERIES)
        end = min(row_tokens, start + queries)
        keys = slice(first, min(row_tokens, end + num_ahead))
        blocks.append(_Block(slice(start, end), slice(start * group, end * group), keys))
        start = end
    return blocks


def _by_head(x: Tensor, row_tokens: int) -> Tensor:
    """A copy of keys or values (N, K, D) as (B * K, T, D)."""
    return x.view(-1, row_tokens, *x.shape[1:]).transpose(1, 2).flatten(0, 1)


def _by_query(x: Tensor, num_kv_heads: int, row_tokens: int) -> Tensor:
    """A copy of queries (N, H, D) as (B * K, T * G, D), so that a block of tokens is a block of rows."""
    heads = x.view(-1, row_tokens, num_kv_heads, x.shape[1] // num_kv_heads, x.shape[2]).transpose(1, 2)
    return heads.flatten(2, 3).flatten(0, 1)


def _put_queries(rows: Tensor, target: Tensor, row_tokens: int) -> None:
    """Copy rows (B * K, T * G, D) to target (N, H, D), as the inverse of `_by_query`."""
    num_rows, group = len(target) // row_tokens, rows.shape[1] // row_tokens
    heads = rows.view(num_rows, -1, row_tokens, group, rows.shape[-1])  # (B, K, T, G, D)
    target.view(num_rows, row_tokens, heads.shape[1], group, -1).copy_(heads.transpose(1, 2))
