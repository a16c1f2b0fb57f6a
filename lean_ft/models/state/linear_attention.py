"""Linear attention with a decaying state, by the gated delta rule or as in Mamba-2, in chunks of tokens.

Each head has a state S, a matrix from keys to values. With the delta rule, a token decays the state, writes under its
key the part of its value that the state does not predict, and reads under its query: S_t = exp(g_t) S_{t-1} + k_t^T
beta_t (v_t - k_t exp(g_t) S_{t-1}), o_t = q_t S_t, with queries and keys scaled to length 1. Mamba-2 has no correction
and no scaling: S_t = exp(g_t) S_{t-1} + k_t^T beta_t v_t.

A document starts with an empty state. Decays from earlier documents are masked to zero, so no shape depends on the
boundaries and no document's numbers affect another's.

The tokens are processed in segments of chunks. A GPU computes all chunks of a segment at once, by Triton kernels
(`linear_attention_kernels`), or by PyTorch operations where these cannot run. A CPU goes chunk by chunk, which is twice
as fast there. The hand-written backward pass goes through the segments in reverse. It keeps the arguments and the state
before each segment, and computes the states in between again, so its working memory does not depend on the length. The
op is opaque to torch.compile.

Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), in chunks as Yang et al. 2024 (arXiv:2406.06484); Dao
and Gu 2024, Mamba-2 (arXiv:2405.21060). The backward pass is our own.

Shapes: B rows, T tokens of a row, G heads of queries and keys, H heads of values (H / G consecutive heads share a query
and key), K and V features of a head, S segments of chunks.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.layers import wide_dtype
from lean_ft.models.state.chunks import CHUNK, SEGMENT, Chunk, Tokens, chunks, document_numbers
from lean_ft.models.state.forms import choose_form, form_of, slow
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import Cost, Launched, SlowPath, register_cost

_AT_ONCE = 2  # segments, in PyTorch operations on a GPU, so that few are launched


@torch.library.custom_op("lean_ft::linear_attention", mutates_args=())
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, V), and the states (S + 1, B, H, K, V) before each segment and after the last token.

    Args:
        query, key: (B, T, G, K). value: (B, T, H, V). log_decay: (B, T, H) float32, at most 0.
        beta: (B, T, H), the fraction of the correction that is written, or of the value without `corrects`.
        cu_seqlens: (documents + 1,), boundaries of documents in a single row; None if each row is a document.
        state: (B, H, K, V), the state before the first token; None for zeros.
        corrects: True for the delta rule, False for Mamba-2.
    """
    documents = document_numbers(cu_seqlens, query.shape[1])
    tokens_of = Tokens(query, key, value, log_decay, beta, documents, corrects)
    form = form_of(key, value)
    if form == "kernels":
        from lean_ft.models.state import linear_attention_kernels

        return linear_attention_kernels.forward(tokens_of, state)
    with torch.autocast(query.device.type, enabled=False):
        return (_by_segments if form == "segments" else _by_chunks)(tokens_of, state)


def _by_chunks(tokens_of: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results of `linear_attention`, chunk by chunk."""
    out, states = torch.empty_like(tokens_of.value, memory_format=torch.contiguous_format), []
    state = tokens_of.empty_state() if state is None else state
    for tokens in chunks(0, out.shape[1], CHUNK):
        if tokens.start % SEGMENT == 0:
            states.append(state)
        chunk = Chunk(tokens_of.chunk(tokens), tokens_of.group, tokens_of.corrects).follow(state)
        out[:, tokens] = chunk.read().transpose(1, 2)
        state = chunk.next_state()
    return out, torch.stack([*states, state])


def _by_segments(tokens_of: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results of `linear_attention`, all chunks of two segments at once but for the scan over their states."""
    out, states = torch.empty_like(tokens_of.value, memory_format=torch.contiguous_format), []
    state = tokens_of.empty_state() if state is None else state
    for tokens in chunks(0, out.shape[1], _AT_ONCE * SEGMENT):
        segment, before = _segment(tokens_of, tokens, state)
        states += [each.view_as(state) for each in before[: -1 : SEGMENT // CHUNK]]
        out[:, tokens] = tokens_of.joined(segment.read(), tokens)
        state = before[-1].view_as(state)
    return out, torch.stack([*states, state])


def _segment(tokens_of: Tokens, tokens: slice, state: Tensor) -> tuple[Chunk, list[Tensor]]:
    """All chunks of consecutive tokens that follow a state, and the states before each and after the last."""
    segment = Chunk(tokens_of.all_chunks(tokens), tokens_of.group, tokens_of.corrects)
    states = segment.states_from(state)
    return segment.follow(torch.stack(states[:-1], 1).unflatten(0, state.shape[:2])), states


@linear_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value, memory_format=torch.contiguous_format), _room_for_states(key, value)


@register_flop_formula(torch.ops.lean_ft.linear_attention)
def _num_flops(
    query_shape: Sequence[int], key_shape: Sequence[int], value_shape: Sequence[int], *rest: object, **named: object
) -> int:
    """Per token and head: products within a chunk, 2 C (K + V), and two with the state, 4 K V. Corrections add C (2 K +
    V) and 2 K V."""
    corrects = False not in (*rest, *named.values())
    return _products(key_shape, value_shape, (4, 3, 6) if corrects else (2, 2, 4))


def _products(key_shape: Sequence[int], value_shape: Sequence[int], per_token: tuple[int, int, int]) -> int:
    """The operations of these numbers of C K, C V and K V products per token and head."""
    *positions, value_dim = value_shape
    key_dim, (with_key, with_value, with_both) = key_shape[-1], per_token
    by_token = CHUNK * (with_key * key_dim + with_value * value_dim) + with_both * key_dim * value_dim
    return math.prod(positions) * by_token


@torch.library.custom_op("lean_ft::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    states: Tensor,
    corrects: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, log_decay and beta from that of the output."""
    documents = document_numbers(cu_seqlens, query.shape[1])
    tokens_of = Tokens(query, key, value, log_decay, beta, documents, corrects)
    form = form_of(key, value)
    if form == "kernels":
        from lean_ft.models.state import linear_attention_kernels

        return linear_attention_kernels.backward(tokens_of, states, grad_out)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens_of[:5])
    with torch.autocast(query.device.type, enabled=False):
        (_by_segments_backward if form == "segments" else _by_chunks_backward)(tokens_of, states, grad_out, grads)
    return grads  # type: ignore[return-value]


def _by_chunks_backward(tokens_of: Tokens, states: Tensor, grad_out: Tensor, grads: tuple[Tensor, ...]) -> None:
    """Fill the gradients of queries, keys, values, log decays and betas, from the last chunk to the first."""
    num_tokens, grad_state = grad_out.shape[1], tokens_of.empty_state()

    def chunk_of(tokens: slice) -> Chunk:
        return Chunk(tokens_of.chunk(tokens), tokens_of.group, tokens_of.corrects)

    for start in reversed(range(0, num_tokens, SEGMENT)):
        state, before = states[start // SEGMENT], []
        segment = list(chunks(start, min(start + SEGMENT, num_tokens), CHUNK))
        for tokens in segment:
            before.append(state)
            if tokens != segment[-1]:
                state = chunk_of(tokens).follow(state).next_state()
        while segment:
            tokens = segment.pop()
            chunk = chunk_of(tokens).follow(before.pop())
            grad_state, of_chunk = chunk.backward(tokens_of.of(grad_out, tokens), grad_state)
            for grad, part in zip(grads, of_chunk, strict=True):
                grad[:, tokens] = part.transpose(1, 2)


def _by_segments_backward(tokens_of: Tokens, states: Tensor, grad_out: Tensor, grads: tuple[Tensor, ...]) -> None:
    """As `_by_chunks_backward`, all chunks of two segments at once but for the scans over states and gradients."""
    grad_after = tokens_of.empty_state().flatten(0, 1)
    for tokens in reversed(list(chunks(0, grad_out.shape[1], _AT_ONCE * SEGMENT))):
        segment, _ = _segment(tokens_of, tokens, states[tokens.start // SEGMENT])
        grad = tokens_of.chunks_of(grad_out, tokens)
        grad_after, *grads_after = segment.state_gradients(grad, grad_after)
        after = torch.stack(grads_after, 1).unflatten(0, grad.shape[:2])
        _, of_segment = segment.backward(grad, after)
        for of_argument, part in zip(grads, of_segment, strict=True):
            of_argument[:, tokens] = tokens_of.joined(part, tokens)


@linear_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, *_: object
) -> tuple[Tensor, ...]:
    differentiable = (query, key, value, log_decay, beta)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in differentiable)


@register_flop_formula(torch.ops.lean_ft.linear_attention_backward)
def _num_flops_backward(
    grad_shape: Sequence[int],
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    *rest: object,
    **named: object,
) -> int:
    """Two products for each of the forward pass, and each chunk computed twice again: for the states in between, and
    for the gradients."""
    corrects = False not in (*rest, *named.values())
    return _products(key_shape, value_shape, (14, 9, 18) if corrects else (8, 4, 10))


def _room_for_states(key: Tensor, value: Tensor) -> Tensor:
    num_rows, num_tokens, num_heads, size = value.shape
    shape = -(-num_tokens // SEGMENT) + 1, num_rows, num_heads, key.shape[-1], size
    return value.new_empty(shape, dtype=wide_dtype(value))


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]  # of `linear_attention`
_BackwardInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, bool]


def _launched(capability: tuple[int, int], *inputs: *_Inputs) -> Launched | SlowPath:
    query, key, value, log_decay, beta, cu_seqlens, state, *given = inputs
    corrects = False not in given  # a call without it does not pass the default
    form, why = choose_form(key, value, capability, compiles=True)
    if form != "kernels":
        tokens_of = Tokens(query, key, value, log_decay, beta, document_numbers(cu_seqlens, query.shape[1]), corrects)
        return SlowPath(partial(_by_segments, tokens_of, state), slow(why))
    num_segments, scratch = _scratch(key, value, corrects)
    # Two kernels read the keys again, and each part of a state's columns does.
    again = 4 * value[..., 0].numel() * key.shape[-1] * (1 + value.shape[-1] // 32) // 2
    return Launched(1 + num_segments * 3 + 2 * (cu_seqlens is not None), [4 * scratch], again)


def _launched_backward(capability: tuple[int, int], *inputs: *_BackwardInputs) -> Launched | SlowPath:
    grad_out, query, key, value, log_decay, beta, cu_seqlens, states, corrects = inputs
    form, why = choose_form(key, value, capability, compiles=True)
    if form != "kernels":
        tokens_of = Tokens(query, key, value, log_decay, beta, document_numbers(cu_seqlens, query.shape[1]), corrects)
        grads = tuple(torch.empty_like(x) for x in tokens_of[:5])
        return SlowPath(partial(_by_segments_backward, tokens_of, states, grad_out, grads), slow(why))
    num_segments, scratch = _scratch(key, value, corrects, backward=True)
    is_grouped, per_token = key.shape[2] < value.shape[2], 4 * value[..., 0].numel()  # bytes of float32 per head
    of_heads = per_token * key.shape[-1] * is_grouped  # gradients before their sum
    number = 1 + num_segments * (8 + corrects) + 4 * is_grouped + 2 * (cu_seqlens is not None)
    again = per_token * (key.shape[-1] * (6 + value.shape[-1] // 16) + 4 * value.shape[-1]) // 2
    return Launched(number, [4 * scratch, of_heads, of_heads], again)


def _scratch(key: Tensor, value: Tensor, corrects: bool, *, backward: bool = False) -> tuple[int, int]:
    """The number of segments, and how many float32 numbers the kernels keep of one: per token and head, rates, states
    and written values and inverses of the corrections; backward also their gradients."""
    num_tokens, key_dim, value_dim = value.shape[1], key.shape[-1], value.shape[-1]
    of_state = key_dim * value_dim // CHUNK
    numbers = 5 + of_state + corrects * (CHUNK + value_dim)
    if backward:
        numbers += 10 + of_state + value_dim + CHUNK * (1 + corrects)
    tokens = -(-min(num_tokens, SEGMENT) // CHUNK) * CHUNK
    return -(-num_tokens // SEGMENT), value.shape[0] * value.shape[2] * tokens * numbers


register_cost(torch.ops.lean_ft.linear_attention, Cost(_launched, is_attention=True))
register_cost(torch.ops.lean_ft.linear_attention_backward, Cost(_launched_backward, is_attention=True))


class _RecurrenceContext(
    # query, key, value, log_decay, beta, cu_seqlens, and the states
    AutogradContext[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]
):
    corrects: bool


def _save_for_backward(ctx: _RecurrenceContext, inputs: _Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, log_decay, beta, cu_seqlens, _, ctx.corrects = inputs
    ctx.save_for_backward(query, key, value, log_decay, beta, cu_seqlens, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: _RecurrenceContext, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *linear_attention_backward(grad_out, *ctx.saved_tensors, ctx.corrects), None, None, None


linear_attention.register_autograd(_backward, setup_context=_save_for_backward)
