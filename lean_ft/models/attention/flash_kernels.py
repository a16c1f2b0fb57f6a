"""Triton kernels of attention for what PyTorch's flash kernels lack: soft caps, heads of more than 256 features, and
queries that see later tokens. They also support windows, prefixes and sinks, in 16 bits on cards since Ampere. Imported
only with Triton and a GPU.

Scores are float32 and never leave a kernel. Each program loops over the blocks of keys that any of its queries sees;
for the gradients of keys and values, over the blocks of queries that may see its keys. No sum uses atomics, so equal
inputs give equal bits.

PyTorch's flash kernels have no sinks. They compute the softmax without the sinks and its log-sum-exp. The sinks join
the log-sum-exp afterwards, and the output is scaled by the share of the other weights. Backward, PyTorch's kernel
computes weights as exp(score - log-sum-exp) and needs the sum of output times gradient, so from the joined log-sum-exp
and the scaled output it computes the right gradients.

Source: FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).

Shapes: N tokens of all rows, S keys, H query heads, K key-value heads, D features of a head.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.models.attention.row_attention import Rows
from lean_ft.models.grouped_kernels import load_tile, store_tile
from lean_ft.torch_private import flash_attention_backward, flash_attention_forward

_LOG2_E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(2**31 - 1)  # beyond every token
_TOKENS = 32  # per program of the kernels that compute no product


# The largest head -> queries, keys, warps and pipeline stages of a program: of the forward pass, of the queries'
# gradient, and of the gradients of keys and values. For all cards since Ampere: within 99 KiB of shared memory, and
# without spilled registers.
_BLOCKS = {
    64: ((64, 64, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2)),
    128: ((64, 32, 4, 1), (64, 32, 4, 2), (32, 32, 4, 2)),
    256: ((64, 32, 8, 1), (32, 32, 4, 2), (32, 32, 8, 2)),
    512: ((32, 32, 8, 1), (32, 16, 8, 1), (32, 16, 8, 2)),
}
# The fastest on an H200, for Hopper and Blackwell with 227 KiB, if there are no prefixes and no images, with which
# these spill registers.
_LARGE_BLOCKS = {
    64: ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    128: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2)),
    256: ((64, 32, 4, 2), (64, 32, 4, 1), (64, 32, 8, 2)),
    512: ((64, 64, 8, 1), (32, 64, 8, 1), (32, 16, 8, 2)),
}


def attend(query: Tensor, key: Tensor, value: Tensor, of_rows: Rows) -> tuple[Tensor, Tensor]:
    """The attention (N, H, D) of query (N, H, D) to key and value (N, K, D), as `document_attention`, and the
    log-sum-exp of each softmax, (H, N) float32. `cu_seqlens` is not checked."""
    query, key, value = _contiguous(query, key, value)
    num_tokens, num_heads, _ = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(num_heads, num_tokens, dtype=torch.float32)
    launch: Any
    launch, tile = _forward, _tile(query, of_rows, 0)
    launch[triton.cdiv(num_tokens, tile["QUERIES"]), num_heads](
        *(query, key, value, out, lse, of_rows.sinks, *_arguments(query, key, value, of_rows)), **tile
    )
    return out, lse


def attend_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, of_rows: Rows
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks from those of `attend`'s results."""
    num_tokens, num_heads, _ = query.shape
    query, key, value, grad_out = _contiguous(query, key, value, grad_out)
    delta, grad_sinks = _deltas(grad_out, out, lse, of_rows.sinks)
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    inputs = query, key, value, grad_out, lse, delta
    arguments = *_arguments(query, key, value, of_rows), *grad_out.stride()[:2]
    launch: Any
    launch, tile = _backward_queries, _tile(query, of_rows, 1)
    launch[triton.cdiv(num_tokens, tile["QUERIES"]), num_heads](*inputs, grad_query, *arguments, **tile)
    launch, tile = _backward_keys, _tile(query, of_rows, 2)
    launch[triton.cdiv(num_tokens, tile["KEYS"]), key.shape[1]](
        *(*inputs, grad_key, grad_value, *arguments, of_rows.num_tokens, of_rows.num_ahead), **tile
    )
    return grad_query, grad_key, grad_value, grad_sinks


def attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, of_rows: Rows) -> tuple[Tensor, Tensor]:
    """As `attend`, by PyTorch's flash kernel. key and value (S, K, D) have the documents' boundaries
    `of_rows.key_bounds`."""
    bounds, rules = _flash_arguments(of_rows)
    out, lse, *_ = flash_attention_forward(query, key, value, *bounds, False, **rules)
    assert of_rows.sinks is not None
    join_sinks(out, lse, of_rows.sinks)
    return out.contiguous(), lse  # it has the query's layout


def attend_with_sinks_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, of_rows: Rows
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value and sinks from those of `attend_with_sinks`'s results. Without
    `of_rows.sinks`, which the log-sum-exp includes, they get None."""
    bounds, rules = _flash_arguments(of_rows)
    inputs, unused = (
        (grad_out.contiguous(), query, key, value, out, lse),
        (query.new_empty(2, dtype=torch.uint64), query.new_empty(0)),
    )
    grads = flash_attention_backward(*inputs, *bounds, *unused, **rules)  # without dropout, its state is not used
    grad_sinks = None if of_rows.sinks is None else sink_gradients(grad_out, out, lse, of_rows.sinks)
    return *(grad.contiguous() for grad in grads), grad_sinks


def _flash_arguments(of_rows: Rows) -> tuple[tuple[Any, ...], dict[str, Any]]:
    longest, window = of_rows.num_tokens, of_rows.window
    windows = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    bounds = of_rows.cu_seqlens, of_rows.key_bounds, longest, longest, 0.0, window is None
    return bounds, {"scale": of_rows.scale, **windows}


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let sinks (H,) join the softmax of attention without them: scale out (N, H, D) and add to lse (H, N), in
    place."""
    launch: Any = _join
    num_tokens, num_heads, head_dim = out.shape
    grid = triton.cdiv(num_tokens, _TOKENS), num_heads
    launch[grid](out, lse, sinks, num_tokens, head_dim, out.stride(0), out.stride(1), _TOKENS, _power_of_two(head_dim))


def sink_gradients(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradients of sinks (H,) from those of attention with them, (N, H, D). lse (H, N) includes the sinks."""
    _, grads = _deltas(_contiguous(grad_out)[0], out, lse, sinks)
    assert grads is not None
    return grads


def _deltas(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The product of each output with its gradient, (H, N), and the gradients of sinks (H,)."""
    num_tokens, num_heads, head_dim = out.shape
    delta, of_sinks = torch.empty_like(lse), None if sinks is None else torch.empty_like(lse)
    sizes = num_tokens, head_dim, *grad_out.stride()[:2], *out.stride()[:2]
    launch: Any = _delta
    grid = triton.cdiv(num_tokens, _TOKENS), num_heads
    launch[grid](grad_out, out, lse, sinks, delta, of_sinks, *sizes, _TOKENS, _power_of_two(head_dim))
    if sinks is None or of_sinks is None:
        return delta, None
    launch, grad_sinks = _sum, torch.empty_like(sinks)
    launch[num_heads,](of_sinks, grad_sinks, num_tokens, 1024)
    return delta, grad_sinks


def _power_of_two(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _tile(query: Tensor, of_rows: Rows, kernel: int) -> dict[str, int]:
    """The sizes of a program. kernel: its index in `_BLOCKS`."""
    is_simple = of_rows.prefixes is None and of_rows.ends is None
    is_large = is_simple and query.is_cuda and torch.cuda.get_device_capability(query.device)[0] in (9, 10)
    head_dim, blocks = query.shape[-1], _LARGE_BLOCKS if is_large else _BLOCKS
    queries, keys, warps, stages = next(blocks[most] for most in blocks if head_dim <= most)[kernel]
    return {"DIM": _power_of_two(head_dim), "QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose features are next to each other."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _arguments(query: Tensor, key: Tensor, value: Tensor, of_rows: Rows) -> tuple[Any, ...]:
    """The documents and rules of attention, as all kernels take them."""
    num_tokens, num_heads, head_dim = query.shape
    bounds, prefixes = of_rows.cu_seqlens, of_rows.prefixes
    tokens = torch.arange(num_tokens, device=query.device, dtype=bounds.dtype)
    documents = torch.bucketize(tokens, bounds[1:-1], right=True, out_int32=True)  # each token's document
    seen = documents, bounds, None if prefixes is None else prefixes.contiguous(), of_rows.ends
    scale = head_dim**-0.5 if of_rows.scale is None else of_rows.scale
    sizes = num_tokens, num_heads // key.shape[1], head_dim
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
    return *seen, *sizes, scale, of_rows.window, of_rows.softcap, *strides


# fmt: off
@triton.jit
def _seen(q, num_tokens, documents, bounds, prefixes, ends, window):
    """Which keys queries q see: of their document [first, last), and of its prefix [begin, end). Without a query all
    are 0."""
    is_query = q < num_tokens
    document = tl.load(documents + q, mask=is_query, other=0)
    start = tl.load(bounds + document, mask=is_query, other=0).to(tl.int32)
    last = tl.where(is_query, q + 1, 0)
    if ends is not None:
        last = tl.load(ends + q, mask=is_query, other=0).to(tl.int32)
    first = start
    begin, end = tl.zeros_like(first), tl.zeros_like(first)
    if prefixes is not None:
        begin = tl.load(prefixes + 2 * document, mask=is_query, other=0).to(tl.int32)
        end = tl.load(prefixes + 2 * document + 1, mask=is_query, other=0).to(tl.int32)
    if window is not None:
        begin = tl.maximum(begin, q - start + end - (window - 1))
        first = tl.maximum(first, q - (window - 1))
    return first, last, begin, end


@triton.jit
def _features(start, tokens, stride, num_tokens, head_dim, DIM: tl.constexpr):
    """The features of tokens of one head, (tokens, DIM)."""
    d = tl.arange(0, DIM)
    return load_tile(start, tokens.to(tl.int64), stride, tokens < num_tokens, d, 1, d < head_dim)


@triton.jit
def _put(start, tile, tokens, stride, num_tokens, head_dim, DIM: tl.constexpr):
    d = tl.arange(0, DIM)
    store_tile(start, tile, tokens.to(tl.int64), stride, tokens < num_tokens, d, d < head_dim)


@triton.jit
def _scores(products, scale, softcap):
    """Scores times log2(e) of products of queries and keys, and the soft cap's derivative, times `scale`."""
    if softcap is None:
        scores, slope = products * (scale * _LOG2_E), scale
    else:
        tanh = 2 / (1 + tl.exp2(products * (-2 * _LOG2_E * scale / softcap))) - 1
        scores, slope = tanh * (softcap * _LOG2_E), scale * (1 - tanh * tanh)
    return scores, slope


@triton.jit
def _forward(
    query, key, value, out, lse, sinks,
    documents, bounds, prefixes, ends, num_tokens, group, head_dim, scale, window, softcap,
    query_stride, query_head, key_stride, key_head, value_stride, value_head,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    head = tl.program_id(1)
    q = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    first, last, begin, end = _seen(q, num_tokens, documents, bounds, prefixes, ends, window)
    queries = _features(query + head * query_head, q, query_stride, num_tokens, head_dim, DIM)
    keys_of_head, values_of_head = key + head // group * key_head, value + head // group * value_head
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, DIM), tl.float32)
    for part in tl.static_range(1 if prefixes is None else 2):
        if part == 1:
            first, last = begin, end
        lowest = tl.min(tl.where(first < last, first, _FAR), 0)
        for start in range(lowest, tl.max(tl.where(first < last, last, 0), 0), KEYS):
            k = start + tl.arange(0, KEYS)
            keys = _features(keys_of_head, k, key_stride, num_tokens, head_dim, DIM)
            scores, _ = _scores(tl.dot(queries, tl.trans(keys)), scale, softcap)
            sees = (k[None, :] >= first[:, None]) & (k[None, :] < last[:, None])
            scores = tl.where(sees, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet
            weights = tl.exp2(scores - base[:, None])
            shrinks = tl.exp2(highest - base)
            total = total * shrinks + tl.sum(weights, 1)
            values = _features(values_of_head, k, value_stride, num_tokens, head_dim, DIM)
            sums = tl.dot(weights.to(values.dtype), values, sums * shrinks[:, None])
            highest = higher
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        higher = tl.maximum(highest, sink)
        shrinks = tl.exp2(highest - higher)
        total, sums, highest = total * shrinks + tl.exp2(sink - higher), sums * shrinks[:, None], higher
    total = tl.where(q < num_tokens, total, 1.0)
    _put(out + head * head_dim, sums / total[:, None], q, tl.num_programs(1) * head_dim, num_tokens, head_dim, DIM)
    tl.store(lse + head.to(tl.int64) * num_tokens + q, (highest + tl.log2(total)) / _LOG2_E, mask=q < num_tokens)


@triton.jit
def _backward_queries(
    query, key, value, grad_out, lse, delta, grad_query,
    documents, bounds, prefixes, ends, num_tokens, group, head_dim, scale, window, softcap,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, grad_stride, grad_head,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    head = tl.program_id(1)
    q = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    first, last, begin, end = _seen(q, num_tokens, documents, bounds, prefixes, ends, window)
    queries = _features(query + head * query_head, q, query_stride, num_tokens, head_dim, DIM)
    grads = _features(grad_out + head * grad_head, q, grad_stride, num_tokens, head_dim, DIM)
    of_head = head.to(tl.int64) * num_tokens + q
    sizes = tl.load(lse + of_head, mask=q < num_tokens, other=0.0) * _LOG2_E
    deltas = tl.load(delta + of_head, mask=q < num_tokens, other=0.0)
    keys_of_head, values_of_head = key + head // group * key_head, value + head // group * value_head
    sums = tl.zeros((QUERIES, DIM), tl.float32)
    for part in tl.static_range(1 if prefixes is None else 2):
        if part == 1:
            first, last = begin, end
        lowest = tl.min(tl.where(first < last, first, _FAR), 0)
        for start in range(lowest, tl.max(tl.where(first < last, last, 0), 0), KEYS):
            k = start + tl.arange(0, KEYS)
            keys = _features(keys_of_head, k, key_stride, num_tokens, head_dim, DIM)
            values = _features(values_of_head, k, value_stride, num_tokens, head_dim, DIM)
            scores, slope = _scores(tl.dot(queries, tl.trans(keys)), scale, softcap)
            sees = (k[None, :] >= first[:, None]) & (k[None, :] < last[:, None])
            weights = tl.where(sees, tl.exp2(scores - sizes[:, None]), 0.0)
            grad_scores = weights * (tl.dot(grads, tl.trans(values)) - deltas[:, None]) * slope
            sums = tl.dot(grad_scores.to(keys.dtype), keys, sums)
    _put(grad_query + head * head_dim, sums, q, tl.num_programs(1) * head_dim, num_tokens, head_dim, DIM)


@triton.jit
def _backward_keys(
    query, key, value, grad_out, lse, delta, grad_key, grad_value,
    documents, bounds, prefixes, ends, num_tokens, group, head_dim, scale, window, softcap,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, grad_stride, grad_head,
    row_tokens, num_ahead,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    head = tl.program_id(1)  # of keys and values
    k_start = tl.program_id(0) * KEYS
    k = k_start + tl.arange(0, KEYS)
    keys = _features(key + head * key_head, k, key_stride, num_tokens, head_dim, DIM)
    values = _features(value + head * value_head, k, value_stride, num_tokens, head_dim, DIM)
    # The queries that may see these keys: to the end of the document or its window, or of the row if the keys may be a
    # prefix.
    final = tl.minimum(k_start + KEYS, num_tokens) - 1
    if prefixes is not None:
        q_end = tl.minimum((final // row_tokens + 1) * row_tokens, num_tokens)
    else:
        q_end = tl.load(bounds + tl.load(documents + final) + 1).to(tl.int32)
        if window is not None:
            q_end = tl.minimum(q_end, final + window)
    grad_keys, grad_values = tl.zeros((KEYS, DIM), tl.float32), tl.zeros((KEYS, DIM), tl.float32)
    for q_start in range(tl.maximum(k_start - num_ahead, 0), q_end, QUERIES):
        q = q_start + tl.arange(0, QUERIES)
        first, last, begin, end = _seen(q, num_tokens, documents, bounds, prefixes, ends, window)
        sees = (k[:, None] >= first[None, :]) & (k[:, None] < last[None, :])
        if prefixes is not None:
            sees |= (k[:, None] >= begin[None, :]) & (k[:, None] < end[None, :])
        if tl.max(tl.max(sees.to(tl.int32), 1), 0) > 0:
            for member in range(group):
                of_group = head * group + member  # the query head
                queries = _features(query + of_group * query_head, q, query_stride, num_tokens, head_dim, DIM)
                grads = _features(grad_out + of_group * grad_head, q, grad_stride, num_tokens, head_dim, DIM)
                of_head = of_group.to(tl.int64) * num_tokens + q
                sizes = tl.load(lse + of_head, mask=q < num_tokens, other=0.0) * _LOG2_E
                deltas = tl.load(delta + of_head, mask=q < num_tokens, other=0.0)
                scores, slope = _scores(tl.dot(keys, tl.trans(queries)), scale, softcap)
                weights = tl.where(sees, tl.exp2(scores - sizes[None, :]), 0.0)
                grad_values = tl.dot(weights.to(grads.dtype), grads, grad_values)
                grad_scores = weights * (tl.dot(values, tl.trans(grads)) - deltas[None, :]) * slope
                grad_keys = tl.dot(grad_scores.to(queries.dtype), queries, grad_keys)
    stride = tl.num_programs(1) * head_dim
    _put(grad_key + head * head_dim, grad_keys, k, stride, num_tokens, head_dim, DIM)
    _put(grad_value + head * head_dim, grad_values, k, stride, num_tokens, head_dim, DIM)


@triton.jit
def _delta(
    grad_out, out, lse, sinks, delta, of_sinks, num_tokens, head_dim, grad_stride, grad_head, out_stride, out_head,
    TOKENS: tl.constexpr, DIM: tl.constexpr,
):
    head = tl.program_id(1)
    q = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    grads = _features(grad_out + head * grad_head, q, grad_stride, num_tokens, head_dim, DIM).to(tl.float32)
    outs = _features(out + head * out_head, q, out_stride, num_tokens, head_dim, DIM).to(tl.float32)
    deltas, of_head = tl.sum(grads * outs, 1), head.to(tl.int64) * num_tokens + q
    tl.store(delta + of_head, deltas, mask=q < num_tokens)
    if sinks is not None:  # a sink has no value, so the weighted delta is its whole gradient
        sizes = tl.load(lse + of_head, mask=q < num_tokens, other=0.0)
        weights = tl.exp2((tl.load(sinks + head).to(tl.float32) - sizes) * _LOG2_E)
        tl.store(of_sinks + of_head, -weights * deltas, mask=q < num_tokens)


@triton.jit
def _sum(rows, out, num_columns, COLUMNS: tl.constexpr):
    row, total = tl.program_id(0), tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_columns, COLUMNS):
        i = start + tl.arange(0, COLUMNS)
        total += tl.load(rows + row.to(tl.int64) * num_columns + i, mask=i < num_columns, other=0.0)
    tl.store(out + row, tl.sum(total, 0).to(out.dtype.element_ty))


@triton.jit
def _join(out, lse, sinks, num_tokens, head_dim, stride, head_stride, TOKENS: tl.constexpr, DIM: tl.constexpr):
    head = tl.program_id(1)
    q = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    of_head = head.to(tl.int64) * num_tokens + q
    sizes, sink = tl.load(lse + of_head, mask=q < num_tokens, other=0.0), tl.load(sinks + head).to(tl.float32)
    highest = tl.maximum(sizes, sink)
    joined = highest + tl.log2(tl.exp2((sizes - highest) * _LOG2_E) + tl.exp2((sink - highest) * _LOG2_E)) / _LOG2_E
    tile = _features(out + head * head_stride, q, stride, num_tokens, head_dim, DIM).to(tl.float32)
    scaled = tile * tl.exp2((sizes - joined) * _LOG2_E)[:, None]
    _put(out + head * head_stride, scaled, q, stride, num_tokens, head_dim, DIM)
    tl.store(lse + of_head, joined, mask=q < num_tokens)
# fmt: on
