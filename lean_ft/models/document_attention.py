"""Causal attention document by document, in plain matrix products: exact, lean, and fast on a CPU.

Queries go through in blocks. A block's scores against the keys up to it exist in float32 just long enough for their
softmax; the products with values and gradients run in the tensors' own dtype. Backward computes the softmax again
rather than keeping it, so nothing of shape (T, T) outlives a block, and the heads of a group are stacked as rows of
one product, so keys and values are never copied once for each query head.

On CPUs with bfloat16 instructions this takes less than half the time of PyTorch's own flash kernel, which does not
use them, at the same accuracy. It is one custom op, which torch.compile sees as one opaque operation.

Source: blocks and recomputation are FlashAttention's (Dao et al. 2022, https://arxiv.org/abs/2205.14135).

Shapes: N tokens of all documents, T of one, H query heads, K key-value heads, G = H / K heads of a group, D features
of a head, R = G * (queries of a block) rows, C keys up to a block's end.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

_BLOCK_QUERIES = 64
# Scores of one block over all heads, 16 MiB in float32: very long documents take smaller blocks.
_BLOCK_SCORES = 2**22


@torch.library.custom_op("lean_ft::document_attention", mutates_args=())
def document_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the attention (N, H, D) of query (N, H, D) to key and value (N, K, D).

    cu_seqlens (documents + 1,) integers: the documents' boundaries, from 0 to N. Raises ValueError for others.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for document in _documents(cu_seqlens, len(query)):
        queries, keys, values = _by_group(query[document], key[document], value[document])
        keys_float = keys.float().transpose(1, 2)  # (K, D, T)
        outs = _by_group(out[document], key[document])[0]
        for block in _blocks(queries):
            weights = _softmax(queries[:, :, block], keys_float, block).to(query.dtype)  # (K, R, C)
            attended = torch.bmm(weights, values[:, : block.stop])  # (K, R, D)
            outs[:, :, block] = attended.view(outs[:, :, block].shape)
    return out


@document_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("lean_ft::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad_out: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value from that of `out`, what `document_attention` returned."""
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    scale = query.shape[-1] ** -0.5
    for document in _documents(cu_seqlens, len(query)):
        queries, keys, values = _by_group(query[document], key[document], value[document])
        grads, outs, grad_queries = (_by_group(x[document], key[document])[0] for x in (grad_out, out, grad_query))
        keys_float = keys.float().transpose(1, 2)  # (K, D, T)
        # The softmax's gradient is weight * (grad of weight - delta), with one delta a query.
        delta = (grads.float() * outs.float()).sum(-1, keepdim=True)  # (K, G, T, 1)
        # (K, D + 3, T)
        values_and_ones = torch.cat((values, values.new_ones(*values.shape[:2], 3)), -1).transpose(1, 2)
        grad_keys, grad_values = torch.zeros_like(keys_float.mT), torch.zeros_like(keys_float.mT)  # (K, T, D)
        for block in _blocks(queries):
            end = block.stop
            weights = _softmax(queries[:, :, block], keys_float, block).to(query.dtype)  # (K, R, C)
            grad_rows = grads[:, :, block].flatten(1, 2)  # (K, R, D)
            grad_values[:, :end] += torch.bmm(weights.mT, grad_rows)
            # Delta rides along as three more features, whose sum is it to 24 bits: subtracted inside the product,
            # where sums are float32, not after the difference of two large numbers has been rounded.
            minus_delta = _in_three(-delta[:, :, block].flatten(1, 2), query.dtype)
            grad_scores = torch.bmm(torch.cat((grad_rows, minus_delta), -1), values_and_ones[:, :, :end])
            grad_scores *= weights
            grad_rows = torch.bmm(grad_scores, keys[:, :end])
            grad_queries[:, :, block] = grad_rows.view(grad_queries[:, :, block].shape) * scale
            grad_keys[:, :end] += torch.bmm(grad_scores.mT, queries[:, :, block].flatten(1, 2))
        grad_key[document] = (grad_keys * scale).transpose(0, 1)
        grad_value[document] = grad_values.transpose(0, 1)
    return grad_query, grad_key, grad_value


@document_attention_backward.register_fake
def _(
    grad_out: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    return grads[0], grads[1], grads[2]


def _save_for_backward(ctx, inputs, output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs)


def _backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return *document_attention_backward(grad_out, *ctx.saved_tensors), None


document_attention.register_autograd(_backward, setup_context=_save_for_backward)


@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def _softmax(queries: Tensor, keys: Tensor, block: slice) -> Tensor:
    """The attention weights (K, R, C), float32, of a block's queries (K, G, block, D) to keys (K, D, T)."""
    num_queries, scale = queries.shape[2], queries.shape[-1] ** -0.5
    rows = (queries.float() * scale).flatten(1, 2)
    scores = torch.bmm(rows, keys[:, :, : block.stop])
    # Only the block's own keys can lie in a query's future.
    future = torch.full((num_queries, num_queries), float("-inf"), device=scores.device).triu(1)
    scores.unflatten(1, (-1, num_queries))[..., block] += future
    return scores.softmax(-1)


def _documents(cu_seqlens: Tensor, num_tokens: int) -> Iterator[slice]:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {num_tokens}; it goes from {bounds[0]} to "
            f"{bounds[-1]} over {len(bounds) - 1} documents."
        )
    return (slice(start, end) for start, end in pairwise(bounds) if start < end)


def _blocks(queries: Tensor) -> Iterator[slice]:
    num_groups, group, num_tokens, _ = queries.shape
    step = min(_BLOCK_QUERIES, max(1, _BLOCK_SCORES // (num_groups * group * num_tokens)))
    return (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step))


def _by_group(query: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
    """Views (T, H, D) as (K, G, T, D), and each (T, K, D) as (K, T, D)."""
    num_groups = keys_and_values[0].shape[1]
    grouped = query.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)
    return [grouped, *(x.transpose(0, 1) for x in keys_and_values)]


def _in_three(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Splits x (..., 1) into three numbers of `dtype` (..., 3) whose sum is x to about three times its precision."""
    first = x.to(dtype)
    second = (x - first).to(dtype)
    return torch.cat((first, second, (x - first - second).to(dtype)), -1)
