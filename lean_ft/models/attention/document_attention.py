"""Attention for each document separately, in plain matrix products; causal, or in text encoders to both sides.

Queries are processed in blocks. A block's float32 scores exist only for its softmax; products with values and gradients
use the tensors' dtype (float32 on a CPU without 16-bit instructions). Backward recomputes the softmax, so nothing of
shape (T, T) outlives a block. The heads of a group are stacked as rows of one product, which avoids copies of keys and
values.

Three options change the softmax: a window (keys outside it are not multiplied), a soft cap (scores become
cap * tanh(score / cap)), and sinks (a learned logit per head that joins the softmax and has no value).

A query may see later tokens of its document, as tokens of one image see each other. A document may continue a prefix, a
stretch
of an earlier document: its queries see the prefix's keys before its own. So a prompt is computed once for several
completions, and the gradients of its keys add up.

Blocks are padded with zeros to a few sizes, because a CPU's library compiles code for each new shape, which takes as
long as a dozen products and a third of a megabyte.

With AVX512-BF16 this takes less than half the time of PyTorch's flash kernel, which does not use those instructions, at
the same accuracy; with AMX the flash kernel takes two thirds of the time. The op is opaque to torch.compile. On a GPU
it uses the kernels of `flash_kernels` where they run and `row_attention` elsewhere, because the host does not know the
boundaries.

Source: blocks and recomputation: FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135).

Shapes: N tokens of all documents, T of one, H query heads, K key-value heads, G = H / K heads of a group, D features of
a head, R = G * (queries of a block) rows, C keys that a block sees, P keys of a document including padding.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.attention.kernels import choose_kernel
from lean_ft.models.attention.row_attention import RowArguments, Rows, Weights, attend_rows, attend_rows_backward
from lean_ft.models.float32_products import product_dtype
from lean_ft.models.layers import is_on_cuda, wide_dtype
from lean_ft.system.costs import Arithmetic, Cost, Launched, SlowPath, register_cost
from lean_ft.system.world import capability

RowArgumentsAndLSE = tuple[*RowArguments, Tensor]
_BLOCK_QUERIES = 64
_SHORTEST_BLOCK = 16  # queries per block of shorter documents
_KEY_SIZES = 32  # the most distinct numbers of keys among the blocks of a long document
# Scores of one block over all heads, 16 MiB in float32; very long documents have smaller blocks.
_BLOCK_SCORES = 2**22
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
    for document, prefix in _documents(of_rows.cu_seqlens, len(query), of_rows.prefixes):
        queries, outs = (_by_group(x[document], key) for x in (query, out))
        num_before = prefix.stop - prefix.start
        own_ends = _ends(of_rows, document, num_before)
        blocks = _blocks(query.shape[1], queries.shape[2], of_rows.window, num_before, own_ends)
        keys, values = (_filled(_seen(x, document, prefix), blocks) for x in (key, value))
        softmax, values = _Softmax(queries, keys, of_rows, own_ends), values.to(dtype)
        for block in blocks:
            weights = softmax(block).weights.to(dtype)  # (K, R, C)
            _put_rows(torch.bmm(weights, values[:, block.keys]), outs, block)
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
    for document, prefix in _documents(of_rows.cu_seqlens, len(query), of_rows.prefixes):
        queries, outs, grads, grad_queries = (_by_group(x[document], key) for x in (query, out, grad_out, grad_query))
        num_before, num_tokens = prefix.stop - prefix.start, queries.shape[2]
        own_ends = _ends(of_rows, document, num_before)
        blocks = _blocks(query.shape[1], num_tokens, of_rows.window, num_before, own_ends)
        keys, values = (_filled(_seen(x, document, prefix), blocks).to(dtype) for x in (key, value))
        softmax = _Softmax(queries, keys, of_rows, own_ends)
        # The softmax's gradient is weight * (grad of weight - delta), with one delta per query.
        delta = (grads.to(wide) * outs.to(wide)).sum(-1, keepdim=True)  # (K, G, T, 1)
        # (K, D + 3, P). F.pad rather than cat keeps a token's features together, so that strides repeat too.
        values_and_ones = F.pad(values.transpose(0, 1), (0, 3), value=1.0).permute(1, 2, 0)
        grad_keys, grad_values = torch.zeros_like(softmax.keys.mT), torch.zeros_like(softmax.keys.mT)  # (K, P, D)
        for block in blocks:
            weights, slope, sink_weights = softmax(block)
            weights = weights.to(dtype)  # (K, R, C)
            grad_rows = _rows(grads, block).to(dtype)  # (K, R, D)
            grad_values[:, block.keys] += torch.bmm(weights.mT, grad_rows)
            # Delta is subtracted inside the product, where sums are float32, as three more features that add up to it
            # with 24 bits. Subtracting it afterwards would round the difference of two large numbers.
            rows_delta = _rows(delta, block)  # (K, R, 1)
            minus_delta = _in_three(-rows_delta, dtype)
            grad_scores = torch.bmm(torch.cat((grad_rows, minus_delta), -1), values_and_ones[:, :, block.keys])
            grad_scores *= weights
            if slope is not None:
                grad_scores *= slope
            _put_rows(torch.bmm(grad_scores, keys[:, block.keys]) * softmax.scale, grad_queries, block)
            grad_keys[:, block.keys] += torch.bmm(grad_scores.mT, _rows(queries, block).to(dtype))
            if sink_weights is not None:  # a sink has no value, so delta is its whole gradient
                grad_sinks -= (sink_weights * rows_delta).view(len(grad_sinks), -1).sum(-1)
        for grad, of_seen in ((grad_key, grad_keys * softmax.scale), (grad_value, grad_values)):
            before, within, _ = of_seen.transpose(0, 1).tensor_split((num_before, num_before + num_tokens))
            grad[document] = within
            grad[prefix] += before  # the prefix's document was processed before
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


def num_product_shapes(longest: int) -> int:
    """The number of shapes of 16-bit products, forward and backward, for documents of up to `longest` tokens."""
    lengths = {min(2**n, longest) for n in range(_power_of_two(longest).bit_length())}
    sizes = {size for n in lengths for step in [_key_step(n, n)] for size in range(step, n + step, step)}
    return 3 * len(sizes)  # with C keys: (R, C) @ (C, D), (C, R) @ (R, D) and (R, D + 3) @ (D + 3, C)


class _Block(NamedTuple):
    queries: slice  # may exceed the document's end in the last block
    keys: slice  # at least those that any of the queries sees
    place: int  # the index of the first query's own key


class _Softmax:
    """The attention weights of one document's queries (K, G, T, D) to its keys (K, P, D), a block at a time."""

    def __init__(self, queries: Tensor, keys: Tensor, of_rows: Rows, ends: Tensor | None) -> None:
        self.ends = ends  # (T,), counted in the keys
        self.queries, self.dtype = queries, wide_dtype(queries)
        self.keys = keys.to(self.dtype).transpose(1, 2)  # (K, D, P)
        # (K, G, 1, 1)
        self.sinks = None if of_rows.sinks is None else of_rows.sinks.to(self.dtype).view(*queries.shape[:2], 1, 1)
        self.scale = queries.shape[-1] ** -0.5 if of_rows.scale is None else of_rows.scale
        self.window, self.softcap = of_rows.window, of_rows.softcap

    @torch.autocast("cuda", enabled=False)
    def __call__(self, block: _Block) -> Weights:
        num_queries = block.queries.stop - block.queries.start
        rows = _rows(self.queries, block).to(self.dtype) * self.scale
        scores = torch.bmm(rows, self.keys[:, :, block.keys])  # (K, R, C)
        slope = None
        if self.softcap is not None:
            tanh = scores.div_(self.softcap).tanh_()
            slope = 1 - tanh.square()
            scores = tanh.mul_(self.softcap)
        by_query = scores.unflatten(1, (-1, num_queries))  # (K, G, queries of the block, C)
        num_last = block.keys.stop - block.place  # other keys are in no query's future
        if self.ends is None:
            future = torch.full((num_queries, num_last), float("-inf"), device=scores.device).triu(1)
            by_query[..., -num_last:] += future
        else:
            ends = self.ends[block.queries]
            ends = F.pad(ends, (0, num_queries - len(ends)), value=block.keys.stop)  # beyond the document's end
            hidden = torch.arange(block.place, block.keys.stop) >= ends[:, None]
            by_query[..., -num_last:].masked_fill_(hidden, float("-inf"))
        if self.window is not None:
            oldest = block.place - block.keys.start - self.window  # the last key before the first query's window
            num_hidden = oldest + num_queries
            if num_hidden > 0:
                past = torch.full((num_queries, num_hidden), float("-inf"), device=scores.device).tril(oldest)
                by_query[..., :num_hidden] += past
        if self.sinks is None:
            return Weights(scores.softmax(-1), slope, None)
        sinks = self.sinks.expand(-1, -1, num_queries, -1).flatten(1, 2)  # (K, R, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)
        return Weights(weights[..., :-1], slope, weights[..., -1:])


def _documents(cu_seqlens: Tensor, num_tokens: int, prefixes: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield the positions of each document with tokens, and of its prefix."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {num_tokens}; found {bounds[0]} to "
            f"{bounds[-1]} over {len(bounds) - 1} documents."
        )
    before = [[0, 0]] * (len(bounds) - 1) if prefixes is None else prefixes.tolist()
    is_valid = len(before) == len(bounds) - 1 and all(
        0 <= first <= last <= start or first == last for (first, last), start in zip(before, bounds, strict=False)
    )
    if not is_valid:
        raise ValueError(
            f"prefixes are {before}; expected for each of the {len(bounds) - 1} documents a start and an end before "
            "the document, or two equal numbers."
        )
    for (start, end), prefix in zip(pairwise(bounds), before, strict=True):
        if start < end:
            yield slice(start, end), slice(*prefix)


def _seen(x: Tensor, document: slice, prefix: slice) -> Tensor:
    """Keys or values of a document's prefix and of the document, from all (N, K, D)."""
    return torch.cat((x[prefix], x[document])) if prefix.start < prefix.stop else x[document]


def _ends(of_rows: Rows, document: slice, num_before: int) -> Tensor | None:
    """Where the keys of a document's queries end, counted in the keys that the document sees; None: after their own."""
    if of_rows.ends is None and not of_rows.num_ahead:
        return None
    if of_rows.ends is not None:
        return of_rows.ends[document] - document.start + num_before
    num_tokens = document.stop - document.start
    return num_before + torch.arange(1, num_tokens + 1).add_(of_rows.num_ahead).clamp_(max=num_tokens)


def _blocks(
    num_heads: int, num_queries: int, window: int | None, num_before: int, ends: Tensor | None = None
) -> list[_Block]:
    """Split a document's queries into blocks of one size, with few distinct numbers of keys. `num_before`: keys of a
    prefix."""
    num_tokens = num_before + num_queries
    step = _query_step(num_tokens)
    num_keys = num_tokens if window is None else min(num_tokens, window + step)
    key_step = _key_step(num_tokens, num_keys)
    while step > 1 and num_heads * step * num_keys > _BLOCK_SCORES:
        step //= 2
    blocks = []
    for start in range(0, num_queries, step):
        place = num_before + start
        first = 0 if window is None else max(0, place - window + 1)
        if num_before:  # prefixes have any length
            first -= first % key_step
        last = place + step if ends is None else max(place + step, int(ends[start : start + step].max()))
        last = -(-last // key_step) * key_step
        blocks.append(_Block(slice(start, start + step), slice(first, last), place))
    return blocks


def _query_step(num_tokens: int) -> int:
    return min(_BLOCK_QUERIES, max(_SHORTEST_BLOCK, _power_of_two(num_tokens)))


def _key_step(num_tokens: int, num_keys: int) -> int:
    """The number of a block's keys is a multiple of this."""
    return max(_query_step(num_tokens), _power_of_two(num_keys) // _KEY_SIZES)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _by_group(query: Tensor, key: Tensor) -> Tensor:
    """Views (T, H, D) as (K, G, T, D), with the K of a key (N, K, D)."""
    return query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)


def _filled(x: Tensor, blocks: list[_Block]) -> Tensor:
    """A document's keys or values (T, K, D), padded with zeros for its blocks: (K, P, D)."""
    missing = blocks[-1].keys.stop - len(x)
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x.contiguous()).transpose(0, 1)


def _rows(x: Tensor, block: _Block) -> Tensor:
    """The block's part (K, R, D) of x (K, G, T, D), padded with zeros beyond the document's end."""
    rows = x[:, :, block.queries]
    missing = block.queries.stop - block.queries.start - rows.shape[2]
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).flatten(1, 2)


def _put_rows(rows: Tensor, target: Tensor, block: _Block) -> None:
    """Copy rows (K, R, D) to the block's part of target (K, G, T, D), without rows beyond the document's end."""
    target = target[:, :, block.queries]
    target.copy_(rows.unflatten(1, (target.shape[1], -1))[:, :, : target.shape[2]])


def _in_three(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Split x (..., 1) into three numbers (..., 3) of `dtype` that add up to x with three times the precision."""
    first = x.to(dtype)
    second = (x - first).to(dtype)
    return torch.cat((first, second, (x - first - second).to(dtype)), -1)
