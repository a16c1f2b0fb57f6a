"""Causal grouped-query attention over padded, packed and cached inputs.

A batch is either plain rows (each row is one document, padding on the right, where causality alone hides it) or packed
rows, whose documents `cu_seqlens` marks. Documents never see each other, and never through a (T, T) mask: each is
computed by itself, so changing one leaves the others' outputs bit-identical.

What computes it:

| device | rows                         | documents                                               |
|--------|------------------------------|---------------------------------------------------------|
| CUDA   | PyTorch's fused kernels      | `varlen_attn` for 16-bit types, else the custom op      |
| CPU    | the custom op                | the custom op of `document_attention`                   |
| other  | PyTorch's fused kernels      | the custom op                                           |

None of them keeps anything of shape (T, T), or copies of keys and values for each query head.

Shapes: B batch, T tokens of a row, N = B * T tokens, H query heads, K key-value heads, D features of a head.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.cache import LayerCache
from lean_ft.models.document_attention import document_attention
from lean_ft.models.rope import rotate


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
    if query.device.type == "cpu":
        num_rows, num_tokens = query.shape[:2]
        row_ends = torch.arange(0, num_rows * num_tokens + 1, num_tokens, dtype=torch.int32)
        return _attend_flattened(query, key, value, row_ends)
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2)


def attend_documents(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attends causally within each document.

    query (B, T, H, D), key and value (B, T, K, D), result (B, T, H, D); cu_seqlens (documents + 1,) int32, the
    documents' boundaries in the N = B * T tokens. No document is longer than a row.
    """
    # The kernel computes in 16 bits only, and wants heads of a multiple of 8 features.
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0:
        return _attend_varlen(query, key, value, cu_seqlens)
    return _attend_flattened(query, key, value, cu_seqlens)


def _attend_flattened(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    return document_attention(*(x.flatten(0, 1) for x in (query, key, value)), cu_seqlens).view(query.shape)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}  # no look ahead
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    # The longest document's length only sizes the kernel's grid. A row's length bounds it; the true one would have
    # to be asked of the device, which would wait for it in every layer.
    longest = query.shape[1]
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))  # (N, heads, D)
    attended: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    return attended.view(query.shape)
