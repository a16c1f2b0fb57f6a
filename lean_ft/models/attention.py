"""Causal grouped-query attention over padded, packed and cached inputs.

A batch is either plain rows (each row is one document, padding on the right, where causality alone hides it) or packed
rows, whose documents `cu_seqlens` marks. Documents never see each other: they are computed one by one (a loop inside
one custom op, so that torch.compile sees a single opaque operation) or by CUDA's variable-length flash kernel, and
never with a (T, T) mask. So changing one document leaves the others' outputs bit-identical.

Nothing of shape (T, T) is kept, and keys and values are never copied once for each query head: memory is that of
query, key, value, output and one number a row and head.

Shapes: B batch, T tokens of a row, N = B * T tokens, H query heads, K key-value heads, D features of a head.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.cache import LayerCache
from lean_ft.models.rope import rotate

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Attention(nn.Module):
    """Projects to queries, keys and values, turns them by position, attends, and projects back."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=output_bias)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """hidden (B, T, hidden_size); cos and sin (B or 1, T, D); returns (B, T, hidden_size)."""
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))  # (B, T, K, D)
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None:
            attended = cache.attend(query, key, value)
        elif cu_seqlens is not None:
            attended = attend_documents(query, key, value, cu_seqlens)
        else:
            attended = attend_rows(query, key, value)
        return self.o_proj(attended.flatten(-2))


def attend_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends causally within each row: query (B, T, H, D), key and value (B, T, K, D), result (B, T, H, D)."""
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2)


def attend_documents(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attends causally within each document.

    query (B, T, H, D), key and value (B, T, K, D), result (B, T, H, D); cu_seqlens (documents + 1,) int32, the
    documents' boundaries in the N = B * T tokens. No document reaches over the end of a row.

    On CUDA float16 and bfloat16 go through `torch.nn.attention.varlen`, which knows no float32: that is computed
    document by document, exactly and more slowly.
    """
    row_length = query.shape[1]
    tokens = [x.flatten(0, 1) for x in (query, key, value)]  # (N, heads, D)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0:
        attended = _cuda_varlen(*tokens, cu_seqlens, row_length)
    else:
        attended = document_attention(*tokens, cu_seqlens)[0]
    return attended.view(query.shape)


def _cuda_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Before it took the flag, the kernel accepted fewer key-value heads without being told.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    # `longest` only sizes the kernel's grid: an upper bound costs nothing much, the true one a wait for the device.
    attended = varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **grouped
    )
    assert isinstance(attended, Tensor)
    return attended


@torch.library.custom_op("lean_ft::document_attention", mutates_args=())
def document_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Attends document by document: query (N, H, D), key and value (N, K, D), cu_seqlens (documents + 1,).

    Returns the output (N, H, D) and the logarithm of each softmax's denominator (H, N), which backward needs.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    log_sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    for document in _documents(cu_seqlens, query.shape[0]):
        q, k, v = _grouped(query[document], key[document], value[document])
        if query.device.type == "cpu":
            attended, log_sum = _flash(q, k, v, 0.0, True)
            log_sums[:, document] = log_sum.flatten(0, 1)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        _grouped_heads(out[document], key.shape[1]).copy_(attended)
    return out, log_sums


@document_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("lean_ft::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `document_attention`'s first output with respect to query, key and value."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    num_kv_heads = key.shape[1]
    for document in _documents(cu_seqlens, query.shape[0]):
        q, k, v = _grouped(query[document], key[document], value[document])
        grad = _grouped_heads(grad_out[document], num_kv_heads)
        if query.device.type == "cpu":
            attended = _grouped_heads(out[document], num_kv_heads)
            log_sum = log_sums[:, document].unflatten(0, (num_kv_heads, -1))
            grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, attended, log_sum, 0.0, True)
        else:
            with torch.enable_grad():
                q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            grad_q, grad_k, grad_v = torch.autograd.grad(attended, (q, k, v), grad)
        _grouped_heads(grads[0][document], num_kv_heads).copy_(grad_q)
        # The heads of a group share their key and value: their gradients add up.
        grads[1][document] = grad_k.sum(1).transpose(0, 1)
        grads[2][document] = grad_v.sum(1).transpose(0, 1)
    return grads[0], grads[1], grads[2]


@document_attention_backward.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    return grads[0], grads[1], grads[2]


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out: Tensor, _grad_log_sums: Tensor | None):
    query, key, value, out, log_sums, cu_seqlens = ctx.saved_tensors
    grads = document_attention_backward(grad_out, query, key, value, out, log_sums, cu_seqlens)
    return *grads, None


document_attention.register_autograd(_backward, setup_context=_save_for_backward)


def _documents(cu_seqlens: Tensor, num_tokens: int) -> list[slice]:
    bounds = cu_seqlens.tolist()
    if (
        bounds[0] != 0
        or bounds[-1] != num_tokens
        or any(a > b for a, b in zip(bounds, bounds[1:], strict=False))
    ):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({num_tokens}); it goes from {bounds[0]} to "
            f"{bounds[-1]} over {len(bounds) - 1} documents."
        )
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]


def _grouped_heads(x: Tensor, num_groups: int) -> Tensor:
    """Views (T, H, D) as (K, H / K, T, D): a batch of groups of heads."""
    return x.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views one document's tensors as (K, H / K, T, D), each key and value standing, uncopied, for its whole group."""
    grouped_query = _grouped_heads(query, key.shape[1])
    shape = grouped_query.shape
    return (
        grouped_query,
        key.transpose(0, 1).unsqueeze(1).expand(shape),
        value.transpose(0, 1).unsqueeze(1).expand(shape),
    )
