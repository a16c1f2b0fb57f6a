"""Attention for each document separately, in plain matrix products; causal, or in text encoders to both sides.

Queries are processed in blocks. A block's float32 scores exist only for its softmax; products with values and gradients
use the tensors' dtype (float32 on a CPU without 16-bit instructions). Backward recomputes the softmax, so nothing of
shape (T, T) outlives a block. The heads of a group are stacked as rows of one product, which avoids copies of keys and
values.

Three options change the softmax: a window (keys outside it are not multiplied), a soft cap (scores become
cap * tanh(score / cap)), and sinks (a learned logit per head that joins the softmax and has no value).

A query may see later tokens of its document, as tokens of one image see each other. A document may continue a prefix, a
stretch of an earlier document: its queries see the prefix's keys before its own. So a prompt is computed once for
several completions, and the gradients of its keys add up. Short documents are computed together.

With AVX512-BF16 this takes less than half the time of PyTorch's flash kernel, which does not use those instructions, at
the same accuracy; with AMX the flash kernel takes two thirds of the time. The op is opaque to torch.compile. On a GPU
it uses the kernels of `flash_kernels` where they run and `row_attention` elsewhere, because the host does not know the
boundaries.

Source: blocks and recomputation: FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135).

Shapes: N tokens of all documents, T of one, H query heads, K key-value heads, G = H / K heads of a group, D features of
a head, R = G * (queries of a block) rows, C keys that a block sees, P keys of a document including padding, B = K for
one document and K * documents for several.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.attention.documents import QueryBlock, documents_at_once, put_rows, rows_of
from lean_ft.models.attention.kernels import choose_kernel
from lean_ft.models.attention.row_attention import RowArguments, Rows, Weights, attend_rows, attend_rows_backward
from lean_ft.models.float32_products import product_dtype
from lean_ft.models.layers import is_on_cuda, wide_dtype
from lean_ft.system.costs import Arithmetic, Cost, Launched, SlowPath, register_cost
from lean_ft.system.world import capability

RowArgumentsAndLSE = tuple[*RowArguments, Tensor]
_NUM_PRODUCTS = (2, 5)  # of queries with keys, in the forward and the backward pass
# Keys per query whose time flash attention spends in vain: on the diagonal's tiles, and to fill and drain the card. On
# an H200, one document of 4,096 tokens reached 261 TFLOP/s in forward, and two of 2,048 reached 226.
_IDLE_KEYS = 300
# Time of lean_ft's kernels divided by flash attention's, forward and backward, for heads of at most this many features.
# On an H200, at 0.3 of the published rate for flash attention; `benchmarks/gpu_kernels.py` and a step of Gemma 4 26B.
_OWN_TIMES = {256: (1.15, 2.0), 512: (1.5, 3.4)}


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    row_tokens: int = 0,
    prefixes: Tensor | None = None,
    ends: Tensor | None = None,
    num_ahead: int = 0,
    key_bounds: Tensor | None = None,
) -> Tensor:
    """The attention (N, H, D) of query (N, H, D) to key and value (N, K, D).

    Args:
        cu_seqlens: (documents + 1,) integers, the documents' boundaries from 0 to N.
        sinks: (H,), a logit per head.
        scale: of the scores; default D ** -0.5.
        window: positions that a query sees, including its own.
        softcap: the bound of the scores.
        row_tokens: no document crosses a multiple of this number; default N. Used on a GPU only.
        prefixes: (documents, 2) integers, start and end of the earlier positions in the same row that each document
            continues; equal for no prefix.
        ends: (N,) integers, the token before which each query's keys end, in the query's document. By default it sees
            the next `num_ahead` tokens of its document.
        num_ahead: the most tokens that a query sees ahead.
        key_bounds: (documents + 1,) integers, the boundaries of the documents' keys, if key and value have other tokens
            than the query; a document's last query is aligned with its last key. PyTorch's flash kernel computes this,
            on a GPU, with `sinks`, and without a soft cap, `prefixes` and `ends`.

    Raises ValueError for invalid boundaries; on a GPU this is a device-side assertion, or they are not checked where
    `flash_kernels` runs.
    """
    rules = sinks, scale, window, softcap, row_tokens or len(query), prefixes, ends, num_ahead, key_bounds
    return _document_attention(query, key, value, cu_seqlens, *rules)[0]


_ROWS = (
    "Tensor cu_seqlens, Tensor? sinks, float? scale, SymInt? window, float? softcap, SymInt row_tokens, Tensor? "
    "prefixes, Tensor? ends, SymInt num_ahead, Tensor? key_bounds"
)


@torch.library.custom_op(
    "lean_ft::document_attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_ROWS}) -> (Tensor, Tensor)",
)
@torch.autocast("cpu", enabled=False)
def _document_attention(query: Tensor, key: Tensor, value: Tensor, *rows: *RowArguments) -> tuple[Tensor, Tensor]:
    """The result of `document_attention`, and the log-sum-exp (H, N) of `flash_kernels`, empty without them. rows: as
    `Rows`."""
    of_rows = Rows(*rows)
    if (kernels := _kernels(query, of_rows.key_bounds)) is not None:
        of_rows = of_rows.with_ends(len(query))
        attend = kernels.attend if of_rows.key_bounds is None else kernels.attend_with_sinks
        return attend(query, key, value, of_rows)
    lse = query.new_empty(0, dtype=torch.float32)
    if query.is_cuda:
        return attend_rows(query, key, value, of_rows), lse
    out, dtype = torch.empty_like(query, memory_format=torch.contiguous_format), product_dtype(query)
    num_heads, num_groups = query.shape[1], key.shape[1]
    for documents in documents_at_once(of_rows.cu_seqlens, len(query), of_rows.prefixes, *query.shape[1:]):
        queries, outs = documents.queries(query, num_groups), documents.room(out, num_groups)
        ends = documents.ends(of_rows, num_groups)
        blocks = documents.blocks(num_heads, of_rows.window, ends)
        keys, values = (documents.seen(x, blocks) for x in (key, value))
        softmax, values = _Softmax(queries, keys, of_rows, ends), values.to(dtype)
        for block in blocks:
            weights = softmax(block).weights.to(dtype)  # (B, R, C)
            put_rows(torch.bmm(weights, values[:, block.keys]), outs, block)
        documents.put(outs, out)
    return out, lse


@_document_attention.register_fake
def _(query: Tensor, *args: Tensor | float | None) -> tuple[Tensor, Tensor]:
    shape = (query.shape[1], query.shape[0]) if args[-1] is not None or _has_kernels(query) else (0,)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(shape, dtype=torch.float32)


# Without a formula, a compiler that trades memory for arithmetic considers the op free.
@register_flop_formula(torch.ops.lean_ft.document_attention)
def _num_flops(query_shape: Sequence[int], *_: object, **__: object) -> int:
    """Two products of N * N * D multiplications and additions per head, as if all N tokens were one document."""
    num_tokens, num_heads, head_dim = query_shape
    return 4 * num_tokens * num_tokens * num_heads * head_dim


@torch.library.custom_op(
    "lean_ft::document_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor out, Tensor query, Tensor key, Tensor value, {_ROWS}, Tensor lse) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
@torch.autocast("cpu", enabled=False)
def document_attention_backward(
    grad_out: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rows_and_lse: *RowArgumentsAndLSE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sinks (empty without sinks) from that of `_document_attention`'s
    results."""
    of_rows, lse, wide = Rows(*rows_and_lse[:-1]), rows_and_lse[-1], wide_dtype(query)
    sinks, key_bounds = of_rows.sinks, of_rows.key_bounds
    if query.is_cuda:
        if (kernels := _kernels(query, key_bounds)) is not None:
            of_rows = of_rows.with_ends(len(query))
            backward = kernels.attend_backward if key_bounds is None else kernels.attend_with_sinks_backward
            *grads, grad_sinks = backward(grad_out, out, lse, query, key, value, of_rows)
        else:
            *grads, grad_sinks = attend_rows_backward(grad_out, query, key, value, of_rows)
        of_sinks = query.new_empty(0, dtype=wide) if sinks is None or grad_sinks is None else grad_sinks.to(sinks.dtype)
        return *grads, of_sinks  # type: ignore[return-value]
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    dtype = product_dtype(query)
    grad_sinks = query.new_zeros(0 if sinks is None else len(sinks), dtype=wide)  # (H,)
    num_heads, num_groups = query.shape[1], key.shape[1]
    for documents in documents_at_once(of_rows.cu_seqlens, len(query), of_rows.prefixes, *query.shape[1:]):
        queries, outs, grads = (documents.queries(x, num_groups) for x in (query, out, grad_out))
        grad_queries = documents.room(grad_query, num_groups)
        ends = documents.ends(of_rows, num_groups)
        blocks = documents.blocks(num_heads, of_rows.window, ends)
        keys, values = (documents.seen(x, blocks).to(dtype) for x in (key, value))
        softmax = _Softmax(queries, keys, of_rows, ends)
        # The softmax's gradient is weight * (grad of weight - delta), with one delta per query.
        delta = (grads.to(wide) * outs.to(wide)).sum(-1, keepdim=True)  # (B, G, T, 1)
        # (B, D + 3, P). F.pad rather than cat keeps a token's features together, so that strides repeat too.
        values_and_ones = F.pad(values.transpose(0, 1), (0, 3), value=1.0).permute(1, 2, 0)
        grad_keys, grad_values = torch.zeros_like(softmax.keys.mT), torch.zeros_like(softmax.keys.mT)  # (B, P, D)
        for block in blocks:
            weights, slope, sink_weights = softmax(block)
            weights = weights.to(dtype)  # (B, R, C)
            grad_rows = rows_of(grads, block).to(dtype)  # (B, R, D)
            grad_values[:, block.keys] += torch.bmm(weights.mT, grad_rows)
            # Delta is subtracted inside the product, where sums are float32, as three more features that add up to it
            # with 24 bits. Subtracting it afterwards would round the difference of two large numbers.
            rows_delta = rows_of(delta, block)  # (B, R, 1)
            minus_delta = _in_three(-rows_delta, dtype)
            grad_scores = torch.bmm(torch.cat((grad_rows, minus_delta), -1), values_and_ones[:, :, block.keys])
            grad_scores *= weights
            if slope is not None:
                grad_scores *= slope
            put_rows(torch.bmm(grad_scores, keys[:, block.keys]) * softmax.scale, grad_queries, block)
            grad_keys[:, block.keys] += torch.bmm(grad_scores.mT, rows_of(queries, block).to(dtype))
            if sink_weights is not None:  # a sink has no value, so delta is its whole gradient
                num_queries = block.queries.stop - block.queries.start
                of_heads = (sink_weights * rows_delta).view(-1, len(grad_sinks), num_queries)
                grad_sinks -= of_heads.sum((0, 2))
        documents.put(grad_queries, grad_query)
        documents.put_seen(grad_keys * softmax.scale, grad_key)
        documents.put_seen(grad_values, grad_value)
    return grad_query, grad_key, grad_value, grad_sinks if sinks is None else grad_sinks.to(sinks.dtype)


@document_attention_backward.register_fake
def _(
    grad_out: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu: Tensor,
    sinks: Tensor | None,
    *_: object,
) -> tuple[Tensor, ...]:
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    grad_sinks = query.new_empty(0, dtype=wide_dtype(query)) if sinks is None else torch.empty_like(sinks)
    return *grads, grad_sinks


def _kernel_in_plan(capability: tuple[int, int], query: Tensor, of_rows: Rows) -> tuple[str, str]:
    """The kernel that a GPU chooses, and the reason where it is not PyTorch's."""
    has_sinks = of_rows.sinks is not None
    is_plain = of_rows.softcap is None and of_rows.ends is None and not (has_sinks and of_rows.num_ahead)
    kernel, why = choose_kernel(
        query.shape[-1], query.dtype, capability, is_plain=is_plain, sinks=has_sinks, compiles=True
    )
    why += ". Set model.dtype=bfloat16" if kernel == "eager" and query.itemsize > 2 else ""
    return kernel, f"attention runs in blocks of eager operations (slow): {why}"


def _launched(
    capability: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, *rows: *RowArguments
) -> Launched | SlowPath:
    of_rows = Rows(*rows)
    kernel, why = _kernel_in_plan(capability, query, of_rows)
    if kernel == "eager":
        return SlowPath(partial(attend_rows, query, key, value, of_rows), why)
    # Besides the kernel: two launches that find each token's document; or one for a random state, or for the sinks.
    return Launched(3 if kernel == "own" else 2)


def _launched_backward(
    capability: tuple[int, int],
    grad: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rows_and_lse: *RowArgumentsAndLSE,
) -> Launched | SlowPath:
    """PyTorch's flash attention sums the queries' gradient in float32, with each document padded to 128 tokens and each
    head to 32 or 64 features, and expands the gradients of keys and values to the query heads."""
    of_rows = Rows(*rows_and_lse[:-1])
    (num_tokens, num_heads, head_dim), sinks = query.shape, of_rows.sinks
    kernel, why = _kernel_in_plan(capability, query, of_rows)
    if kernel == "eager":
        return SlowPath(partial(attend_rows_backward, grad, query, key, value, of_rows), why)
    if kernel == "own":  # two kernels read all, and a third the gradient
        lse_bytes, has_sinks = 4 * num_heads * num_tokens, sinks is not None
        again = 3 * query.nbytes + key.nbytes + value.nbytes + 2 * lse_bytes
        return Launched(5 + has_sinks, [lse_bytes] * (1 + has_sinks), again)
    filled_tokens = num_tokens + 128 * (len(of_rows.cu_seqlens) - 1)
    multiple = 32 if head_dim <= 128 else 64
    sums = 4 * filled_tokens * num_heads * -(-head_dim // multiple) * multiple
    is_grouped = key.shape[1] < num_heads
    number = 5 + 2 * is_grouped  # one fills the gradient of the log-sum-exp with zeros
    if sinks is not None:  # neither these nor a random state; two kernels for gradients of sinks
        number += 0 if sinks.requires_grad else -2
    return Launched(number, [*[query.nbytes] * 2 * is_grouped, sums])


def _sees_both_sides(of_rows: Rows) -> bool:
    return of_rows.ends is None and of_rows.num_ahead > 0


def _flops(longest_document: int, query: Tensor, key: Tensor, value: Tensor, *rows: *RowArguments) -> int:
    """Two products of N x L x D per head; the causal mask halves each."""
    return 2 * query.numel() * longest_document * (1 + _sees_both_sides(Rows(*rows)))


def _flops_backward(
    longest_document: int,
    grad: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rows_and_lse: *RowArgumentsAndLSE,
) -> int:
    """Five products."""
    return 5 * query.numel() * longest_document * (1 + _sees_both_sides(Rows(*rows_and_lse[:-1])))


def _arithmetic(
    capability: tuple[int, int], longest_document: int, query: Tensor, key: Tensor, value: Tensor, *rows: *RowArguments
) -> Arithmetic:
    return _on_gpu(capability, longest_document, query, Rows(*rows), 0)


def _arithmetic_backward(
    capability: tuple[int, int],
    longest_document: int,
    grad: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rows_and_lse: *RowArgumentsAndLSE,
) -> Arithmetic:
    return _on_gpu(capability, longest_document, query, Rows(*rows_and_lse[:-1]), 1)


def _on_gpu(
    capability: tuple[int, int], longest_document: int, query: Tensor, of_rows: Rows, which_pass: int
) -> Arithmetic:
    """The products of each query with the keys that it sees, and with `_IDLE_KEYS` more, in one pass: 0 is forward."""
    window = min(of_rows.window or longest_document, longest_document)
    seen = window - window**2 / (2 * longest_document)  # keys, on average
    seen *= 1 + _sees_both_sides(of_rows)
    each = 2 * _NUM_PRODUCTS[which_pass] * query.numel()
    times = 1.0
    if _kernel_in_plan(capability, query, of_rows)[0] == "own":
        times = next(own[which_pass] for width, own in _OWN_TIMES.items() if query.shape[-1] <= width)
    return Arithmetic(each * seen, each * (times * (seen + _IDLE_KEYS) - seen))


_ATTENTION = Cost(_launched, _flops, _arithmetic, is_attention=True)
register_cost(torch.ops.lean_ft.document_attention, _ATTENTION)
_ATTENTION_BACKWARD = Cost(_launched_backward, _flops_backward, _arithmetic_backward, is_attention=True)
register_cost(torch.ops.lean_ft.document_attention_backward, _ATTENTION_BACKWARD)


def _save_for_backward(ctx, inputs, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, sinks, *ctx.settings, prefixes, ends, ctx.num_ahead, key_bounds = inputs
    out, lse = output
    ctx.save_for_backward(out, query, key, value, cu_seqlens, sinks, prefixes, ends, key_bounds, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # no zeros for a gradient of lse


def _backward(ctx, grad_out: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    *saved, sinks, prefixes, ends, key_bounds, lse = ctx.saved_tensors
    trains_sinks = ctx.needs_input_grad[4]
    if key_bounds is not None and not trains_sinks:
        sinks = None  # the log-sum-exp has them
    seen = prefixes, ends, ctx.num_ahead, key_bounds, lse
    *grads, grad_sinks = document_attention_backward(grad_out, *saved, sinks, *ctx.settings, *seen)
    return *grads, None, grad_sinks if trains_sinks else None, *(None,) * 8


_document_attention.register_autograd(_backward, setup_context=_save_for_backward)


def _kernels(query: Tensor, key_bounds: Tensor | None) -> Any:
    """The module of Triton kernels, or None if none of them computes this."""
    if not query.is_cuda or (key_bounds is None and not _has_kernels(query)):
        return None
    from lean_ft.models.attention import flash_kernels

    return flash_kernels


def _has_kernels(query: Tensor) -> bool:
    """Whether `flash_kernels` computes this; in a plan of a GPU, whether a kernel does, which is one that keeps the
    log-sum-exp."""
    if not is_on_cuda(query):
        return False
    card, compiles = capability(query.device), None if query.is_cuda else True
    return choose_kernel(query.shape[-1], query.dtype, card, is_plain=False, compiles=compiles)[0] == "own"


class _Softmax:
    """The attention weights of queries (B, G, T, D) to the keys of their documents (B, P, D), a block at a time."""

    def __init__(self, queries: Tensor, keys: Tensor, of_rows: Rows, ends: Tensor | None) -> None:
        self.ends = ends  # (1 or B, T), counted in the keys
        self.queries, self.dtype = queries, wide_dtype(queries)
        self.keys = keys.to(self.dtype).transpose(1, 2)  # (B, D, P)
        num_stacked, heads_of_group = queries.shape[:2]
        self.sinks = None  # (B, G, 1, 1)
        if of_rows.sinks is not None:
            sinks = of_rows.sinks.to(self.dtype).view(-1, heads_of_group, 1, 1)
            self.sinks = sinks.repeat(num_stacked // len(sinks), 1, 1, 1)
        self.scale = queries.shape[-1] ** -0.5 if of_rows.scale is None else of_rows.scale
        self.window, self.softcap = of_rows.window, of_rows.softcap

    @torch.autocast("cuda", enabled=False)
    def __call__(self, block: QueryBlock) -> Weights:
        num_queries = block.queries.stop - block.queries.start
        rows = rows_of(self.queries, block).to(self.dtype) * self.scale
        scores = torch.bmm(rows, self.keys[:, :, block.keys])  # (B, R, C)
        slope = None
        if self.softcap is not None:
            tanh = scores.div_(self.softcap).tanh_()
            slope = 1 - tanh.square()
            scores = tanh.mul_(self.softcap)
        by_query = scores.unflatten(1, (-1, num_queries))  # (B, G, queries of the block, C)
        num_last = block.keys.stop - block.place  # other keys are in no query's future
        if self.ends is None:
            future = torch.full((num_queries, num_last), float("-inf"), device=scores.device).triu(1)
            by_query[..., -num_last:] += future
        else:
            ends = self.ends[:, block.queries]
            ends = F.pad(ends, (0, num_queries - ends.shape[1]), value=block.keys.stop)  # beyond the document's end
            hidden = torch.arange(block.place, block.keys.stop) >= ends[:, None, :, None]  # (1 or B, 1, queries, C)
            by_query[..., -num_last:].masked_fill_(hidden, float("-inf"))
        if self.window is not None:
            oldest = block.place - block.keys.start - self.window  # the last key before the first query's window
            num_hidden = oldest + num_queries
            if num_hidden > 0:
                past = torch.full((num_queries, num_hidden), float("-inf"), device=scores.device).tril(oldest)
                by_query[..., :num_hidden] += past
        if self.sinks is None:
            return Weights(scores.softmax(-1), slope, None)
        sinks = self.sinks.expand(-1, -1, num_queries, -1).flatten(1, 2)  # (B, R, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)
        return Weights(weights[..., :-1], slope, weights[..., -1:])


def _in_three(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Split x (..., 1) into three numbers (..., 3) of `dtype` that add up to x with three times the precision."""
    first = x.to(dtype)
    second = (x - first).to(dtype)
    return torch.cat((first, second, (x - first - second).to(dtype)), -1)
