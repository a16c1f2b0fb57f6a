"""Causal grouped-query attention over padded, packed and cached inputs.

A batch is either plain rows (each row is one document, padding on the right, where causality alone hides it) or packed
rows, whose documents `cu_seqlens` marks. Documents never see each other, and never through a (T, T) mask: each is
computed by itself, so changing one leaves the others' outputs bit-identical.

On CUDA in 16 bits PyTorch's own kernels compute it (fused for rows, `varlen_attn` for documents). Everything else,
CPUs and float32 on CUDA, goes through the custom op of `document_attention`: PyTorch has no kernel for documents
there, and for rows its own are slower on a CPU, and copy all scores where float32 meets grouped heads on CUDA. None
of these keeps anything of shape (T, T), or copies of keys and values for each query head.

Shapes: B batch, T tokens of a row, N = B * T tokens, H query heads, K key-value heads, D features of a head.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from lean_ft.models.cache import LayerCache
from lean_ft.models.document_attention import document_attention
from lean_ft.models.rope import rotate

# No look ahead. Grouped heads have to be asked for since there is a flag for it; before, they were simply taken.
_VARLEN_OPTIONS: dict[str, Any] = {"window_size": (-1, 0)}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _VARLEN_OPTIONS["enable_gqa"] = True


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
    if _has_kernels(query):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, heads, T, D)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    num_rows, num_tokens = query.shape[:2]
    return _attend_by_op(query, key, value, torch.arange(num_rows + 1) * num_tokens)


def attend_documents(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attends causally within each document.

    query (B, T, H, D), key and value (B, T, K, D), result (B, T, H, D); cu_seqlens (documents + 1,) int32, the
    documents' boundaries in the N = B * T tokens. No document is longer than a row.
    """
    if _has_kernels(query) and query.shape[-1] % 8 == 0:  # what `varlen_attn` wants of a head
        return _attend_varlen(query, key, value, cu_seqlens)
    return _attend_by_op(query, key, value, cu_seqlens)


def _has_kernels(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _attend_by_op(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    return document_attention(*(x.flatten(0, 1) for x in (query, key, value)), cu_seqlens).view(query.shape)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    # The longest document's length only sizes the kernel's grid. A row's length bounds it; the true one would have
    # to be asked of the device, which would wait for it in every layer.
    longest = query.shape[1]
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))  # (N, heads, D)
    attended: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **_VARLEN_OPTIONS)
    return attended.view(query.shape)
