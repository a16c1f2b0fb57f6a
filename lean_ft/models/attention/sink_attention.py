"""Attention with sinks (a learned logit per head that joins the softmax and has no value) by PyTorch's flash kernels, which have none.

The kernel computes the softmax without the sink and its log-sum-exp. The sink joins the log-sum-exp afterwards, and the output is
scaled by the share of the other weights. Backward, the kernel computes weights as exp(score - log-sum-exp) and needs the sum of output
times gradient, so it gives the right gradients for the joined log-sum-exp and the scaled output.

Shapes: N tokens, S keys, H query heads, K key-value heads, D features of a head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.torch_private import flash_attention_backward, flash_attention_forward


@torch.library.custom_op("lean_ft::sink_attention", mutates_args=())
def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention (N, H, D) of query (N, H, D) to key and value (S, K, D), and its log-sum-exp (H, N).

    sinks (H,). cu_seqlens and key_cu_seqlens (documents + 1,) int32: the documents' queries and keys; a document's last query is
    aligned with its last key. longest: at least the length of the longest document. window: positions that a query sees.
    """
    from lean_ft.models.attention import flash_kernels  # needs Triton

    sizes, windows = (cu_seqlens, key_cu_seqlens, longest, longest), _windows(window)
    out, lse, *_ = flash_attention_forward(
        query, key, value, *sizes, 0.0, window is None, False, scale=scale, **windows
    )
    flash_kernels.join_sinks(out, lse, sinks)
    return out, lse


@sink_attention.register_fake
def _(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@torch.library.custom_op("lean_ft::sink_attention_backward", mutates_args=())
def sink_attention_backward(
    grad_out: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    lse: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sinks (empty without them, for frozen sinks)."""
    from lean_ft.models.attention import flash_kernels  # needs Triton

    sizes = cu_seqlens, key_cu_seqlens, longest, longest, 0.0, window is None
    unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)  # state of dropout
    grads = flash_attention_backward(
        *(grad_out.contiguous(), query, key, value, out, lse, *sizes, *unused), scale=scale, **_windows(window)
    )
    if sinks is None:
        return *grads, query.new_empty(0)
    return *grads, flash_kernels.sink_gradients(grad_out, out, lse, sinks)


@sink_attention_backward.register_fake
def _(
    grad_out: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(torch.empty_like(x) for x in (query, key, value)), of_sinks


def _windows(window: int | None) -> dict[str, int]:
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _save_for_backward(ctx, inputs, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, *bounds, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(output[0], query, key, value, sinks, output[1], *bounds)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    out, query, key, value, sinks, *rest = ctx.saved_tensors
    trained_sinks = sinks if ctx.needs_input_grad[3] else None
    *grads, grad_sinks = sink_attention_backward(
        *(grad_out, out, query, key, value, trained_sinks, *rest, ctx.longest, ctx.scale, ctx.window)
    )
    return *grads, None if trained_sinks is None else grad_sinks, *(None,) * 5


sink_attention.register_autograd(_backward, setup_context=_save_for_backward)


@register_flop_formula([torch.ops.lean_ft.sink_attention, torch.ops.lean_ft.sink_attention_backward])
def _num_flops(query_shape: Any, *args: Any, **kwargs: Any) -> int:
    """As `document_attention`: two products of N * N * D multiplications and additions per head."""
    num_tokens, num_heads, head_dim = query_shape
    return 4 * num_tokens * num_tokens * num_heads * head_dim
