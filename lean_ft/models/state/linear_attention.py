"""Attention to a state, by the gated delta rule or as in Mamba-2, in chunks of tokens: exact, packed, and lean.

Each head has a state, a matrix from keys to values. A token lets it decay, writes under its key what of its value the state does
not know yet, and reads what lies under its query: S_t = exp(g_t) S_{t-1} + k_t^T beta_t (v_t - k_t exp(g_t) S_{t-1}), o_t = q_t S_t,
of queries and keys that are first scaled to length 1. A chunk's tokens see each other through one product of queries with keys, and
what came before through the state; the corrections, each of which depends on those before it, are the solution of one triangular
system. Mamba-2 is the same without the correction, of queries and keys as they are: S_t = exp(g_t) S_{t-1} + k_t^T beta_t v_t.

A document begins with an empty state, wherever in a chunk that is: decays to it from before are zero, which is a mask and no
shape, so a GPU's host need not know the boundaries, and nothing of one document's numbers reaches another's.

Backward is written by hand, chunk by chunk from behind. What is kept of the forward pass is its arguments and the state in
front of every eighth chunk; the states between are computed again. So memory is a chunk's, whatever the length. It is one custom
op, opaque to torch.compile. In it, on CUDA in 16 bits, flash-linear-attention computes the delta rule where it is installed.

Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), in chunks as Yang et al. 2024 (arXiv:2406.06484); Dao and
Gu 2024, Mamba-2 (arXiv:2405.21060). The backward pass is our own. Left out: kernels of Mamba-2.

Shapes: B rows, T tokens of a row, G heads of queries and keys, H heads of values, each with the query and key of one of G (H / G
neighbours share one), K and V features of a head, C tokens of a chunk, S segments of chunks.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.layers import wide_dtype
from lean_ft.system.log import say

CHUNK = 64
SEGMENT = 8 * CHUNK  # tokens between two states that are kept
_solve = partial(torch.linalg.solve_triangular, unitriangular=True)
_LENGTH_EPS = 1e-6  # under the root of a query's or key's length, as in flash-linear-attention


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
    """Returns what the queries read (B, T, H, V), and the states (S + 1, B, H, K, V): in front of each segment, and the last.

    query and key (B, T, G, K), value (B, T, H, V); log_decay (B, T, H) in float32, at most 0; beta (B, T, H): how much of
    a correction is written, or without `corrects` of the value itself. cu_seqlens (documents + 1,): boundaries of documents, which are one row
    then; None where each row is one. state (B, H, K, V): that before the first token, or None for an empty one.
    """
    if corrects and (kernel := delta_rule_kernel(value)) is not None:
        query, key = (_for_each_head(x, value) for x in (query, key))
        out, last = kernel(query, key, value, log_decay, beta, cu_seqlens, state)
        states = _room_for_states(key, value)
        if cu_seqlens is None:
            states[-1] = last
        return out, states
    tokens_of = _Tokens(query, key, value, log_decay, beta, document_numbers(cu_seqlens, query.shape[1]), corrects)
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    states = []
    if state is None:
        state = tokens_of.empty_state()
    with torch.autocast(query.device.type, enabled=False):
        for tokens in chunks(0, query.shape[1], CHUNK):
            if tokens.start % SEGMENT == 0:
                states.append(state)
            chunk = _Chunk(tokens_of, tokens, state)
            out[:, tokens] = chunk.read().transpose(1, 2)
            state = chunk.next_state()
    return out, torch.stack([*states, state])


@linear_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value, memory_format=torch.contiguous_format), _room_for_states(key, value)


@register_flop_formula(torch.ops.lean_ft.linear_attention)
def _num_flops(query_shape: Any, key_shape: Any, value_shape: Any, *rest: Any, **named: Any) -> int:
    """Products among a chunk's tokens, 2 C (K + V) a token, and two with the state, 4 K V, in every head; corrections take
    another C (2 K + V) and 2 K V."""
    corrects = False not in (*rest, *named.values())
    return _products(key_shape, value_shape, (4, 3, 6) if corrects else (2, 2, 4))


def _products(key_shape: Any, value_shape: Any, a_token: tuple[int, int, int]) -> int:
    """So many C K, C V and K V a token and head."""
    *positions, size = value_shape
    width, (by_width, by_size, by_both) = key_shape[-1], a_token
    return math.prod(positions) * (CHUNK * (by_width * width + by_size * size) + by_both * width * size)


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
    """Returns the gradients of query, key, value, log_decay and beta from that of what was read."""
    if corrects and (kernel := delta_rule_kernel(value)) is not None:
        arguments = [_for_each_head(query, value), _for_each_head(key, value), value, log_decay, beta]
        grads = gradients_of(lambda *leaves: kernel(*leaves, cu_seqlens, None)[0], arguments, grad_out)
        return *(grad.unflatten(2, (key.shape[2], -1)).sum(3) for grad in grads[:2]), *grads[2:]  # type: ignore[return-value]
    tokens_of = _Tokens(query, key, value, log_decay, beta, document_numbers(cu_seqlens, query.shape[1]), corrects)
    given = (query, key, value, log_decay, beta)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)
    num_tokens, grad_state = query.shape[1], tokens_of.empty_state()
    with torch.autocast(query.device.type, enabled=False):
        for start in reversed(range(0, num_tokens, SEGMENT)):
            state, before = states[start // SEGMENT], []
            segment = list(chunks(start, min(start + SEGMENT, num_tokens), CHUNK))
            for tokens in segment:
                before.append(state)
                if tokens != segment[-1]:
                    state = _Chunk(tokens_of, tokens, state).next_state()
            while segment:
                tokens = segment.pop()
                chunk = _Chunk(tokens_of, tokens, before.pop())
                grad_state, of_chunk = chunk.backward(tokens_of.of(grad_out, tokens), grad_state)
                for grad, part in zip(grads, of_chunk, strict=True):
                    grad[:, tokens] = part.transpose(1, 2)
    return grads  # type: ignore[return-value]


@linear_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, *_: Any) -> Any:
    given = (query, key, value, log_decay, beta)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)


@register_flop_formula(torch.ops.lean_ft.linear_attention_backward)
def _num_flops_backward(
    grad_shape: Any, query_shape: Any, key_shape: Any, value_shape: Any, *rest: Any, **named: Any
) -> int:
    """Two products for each of forward's but that of the reads, of which gradients take the same; and what a chunk is made of
    twice: for the states between, and for its gradients."""
    corrects = False not in (*rest, *named.values())
    return _products(key_shape, value_shape, (14, 9, 18) if corrects else (8, 4, 10))


def _save_for_backward(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    *given, _, ctx.corrects = inputs
    ctx.save_for_backward(*given, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *linear_attention_backward(grad_out, *ctx.saved_tensors, ctx.corrects), None, None, None


linear_attention.register_autograd(_backward, setup_context=_save_for_backward)


class _Tokens:
    """The arguments of a call, of which chunks take their tokens'."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        documents: Tensor | None,
        corrects: bool,
    ) -> None:
        self.corrects = corrects
        self.query, self.key, self.value, self.log_decay, self.beta = query, key, value, log_decay, beta
        self.documents, self.dtype = documents, wide_dtype(value)
        self.num_heads, self.group = value.shape[2], value.shape[2] // key.shape[2]

    def of(self, x: Tensor, tokens: slice) -> Tensor:
        """Those of x (B, T, G or H, ...), in the type of sums: (B, H, C, ...)."""
        x = x[:, tokens].transpose(1, 2).to(self.dtype)
        return x if x.shape[1] == self.num_heads else x.repeat_interleave(self.group, 1)

    def empty_state(self) -> Tensor:
        num_rows, _, num_heads, size = self.value.shape
        return self.value.new_zeros(num_rows, num_heads, self.key.shape[-1], size, dtype=self.dtype)


class _Chunk:
    """Some neighbouring tokens behind a state; everything is (B, H, C, ...)."""

    def __init__(self, given: _Tokens, tokens: slice, state: Tensor) -> None:
        self.state, self.group, self.corrects = state, given.group, given.corrects
        query, key, value = (given.of(x, tokens) for x in (given.query, given.key, given.value))
        log_decay = given.of(given.log_decay, tokens)  # (B, H, C)
        sees = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        self.sees, continues = sees, None
        if given.documents is not None:
            own = given.documents[:, None, tokens]  # (B or 1, 1, C)
            self.sees = sees & (own[..., None] == own[..., None, :])
            continues = own == given.documents[:, None, max(tokens.start - 1, 0), None]
        # Summed by document and not as differences of a sum over all, which would round with the others' numbers.
        total = (log_decay[..., None, :] * self.sees).sum(-1)  # (B, H, C): since the chunk or the document began
        self.decay = (total[..., None] - total[..., None, :]).masked_fill(~self.sees, float("-inf")).exp()
        self.of_state = (total.exp() if continues is None else total.exp() * continues)[..., None]  # (B, H, C, 1)
        self.to_state = self.decay[..., -1, :, None]  # (B, H, C, 1)
        self.beta, self.scale = given.of(given.beta, tokens)[..., None], query.shape[-1] ** -0.5
        if self.corrects:
            self.query_inverse, self.key_inverse = (_inverse_length(x) for x in (query, key))
            query, key = query * (self.query_inverse * self.scale), key * self.key_inverse
        self.query, self.key = query, key
        self.scores = (query @ key.mT) * self.decay
        if not self.corrects:
            self.value, self.written = value, self.beta * value
            return
        self.from_before = key @ state
        self.error = value - self.of_state * self.from_before
        self.overlap = ((key @ key.mT) * self.decay).tril(-1)
        self.system = self.beta * self.overlap  # and ones on the diagonal
        self.written = _solve(self.system, self.beta * self.error, upper=False)

    def read(self) -> Tensor:
        """What the queries read, (B, H, C, V)."""
        return self.of_state * (self.query @ self.state) + self.scores @ self.written

    def next_state(self) -> Tensor:
        """The state behind the chunk, (B, H, K, V)."""
        return self.of_state[..., -1:, :] * self.state + (self.to_state * self.key).mT @ self.written

    def backward(self, grad: Tensor, grad_next: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """From the gradients of what was read (B, H, C, V) and of the state behind that of the state before, and those of
        the tokens' queries, keys, values, decays and betas."""
        query, key, state = self.query, self.key, self.state
        # What was read, and the next state
        grad_scores = grad @ self.written.mT
        grad_written = self.scores.mT @ grad + (self.to_state * key) @ grad_next
        grad_state = self.of_state[..., -1:, :] * grad_next + (self.of_state * query).mT @ grad
        from_state = grad @ state.mT
        grad_query = self.of_state * from_state
        by_state = self.written @ grad_next.mT
        grad_key = self.to_state * by_state
        grad_of_state = (query * from_state).sum(-1)  # (B, H, C)
        grad_of_state[..., -1] += (grad_next * state).sum((-1, -2))
        grad_decay = grad_scores * self.scores  # of the decay's logarithm
        grad_decay[..., -1, :] += (key * by_state).sum(-1) * self.to_state[..., 0]
        grad_scores *= self.decay
        grad_query += grad_scores @ key
        grad_key += grad_scores.mT @ query
        # What was written
        if not self.corrects:
            grad_value, grad_beta = self.beta * grad_written, (grad_written * self.value).sum(-1)
            grad_log_decay = self._through_sums(grad_decay, grad_of_state)
            return grad_state, (*map(self._of_groups, (grad_query, grad_key)), grad_value, grad_log_decay, grad_beta)
        grad_written = _solve(self.system.mT, grad_written, upper=True)
        grad_value = self.beta * grad_written
        grad_beta = (grad_written * self.error).sum(-1)
        grad_system = -(grad_written @ self.written.mT)
        grad_beta += (grad_system * self.overlap).sum(-1)
        grad_before = self.of_state * grad_value
        grad_key -= grad_before @ state.mT
        grad_state -= key.mT @ grad_before
        grad_of_state -= (grad_value * self.from_before).sum(-1)
        grad_decay += grad_system * self.system
        grad_overlap = (self.beta * grad_system * self.decay).tril_(-1)
        grad_key += (grad_overlap + grad_overlap.mT) @ key
        grad_query = self.scale * _through_length(grad_query, query / self.scale, self.query_inverse)
        grad_key = _through_length(grad_key, key, self.key_inverse)
        grad_log_decay = self._through_sums(grad_decay, grad_of_state)
        return grad_state, (*map(self._of_groups, (grad_query, grad_key)), grad_value, grad_log_decay, grad_beta)

    def _through_sums(self, grad_decay: Tensor, grad_of_state: Tensor) -> Tensor:
        """The gradient of the decays' logarithms from those of the logarithms of `decay`, and of `of_state`."""
        grad_total = grad_decay.sum(-1) - grad_decay.sum(-2) + grad_of_state * self.of_state[..., 0]
        return (grad_total[..., None] * self.sees).sum(-2)

    def _of_groups(self, grad: Tensor) -> Tensor:
        """The gradient of queries or keys, of which a group of heads has one."""
        return grad if self.group == 1 else grad.unflatten(1, (-1, self.group)).sum(2)


def chunks(start: int, end: int, size: int) -> Iterator[slice]:
    """From `start` to `end` in slices of `size`, the last of what is left."""
    return (slice(first, min(first + size, end)) for first in range(start, end, size))


def _inverse_length(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _through_length(grad: Tensor, scaled: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of x from that of x * inverse, which is `scaled`."""
    return inverse * (grad - scaled * (scaled * grad).sum(-1, keepdim=True))


def _room_for_states(key: Tensor, value: Tensor) -> Tensor:
    num_rows, num_tokens, num_heads, size = value.shape
    shape = -(-num_tokens // SEGMENT) + 1, num_rows, num_heads, key.shape[-1], size
    return value.new_empty(shape, dtype=wide_dtype(value))


def document_numbers(cu_seqlens: Tensor | None, num_tokens: int) -> Tensor | None:
    """The number of each token's document, (1, N), of documents `cu_seqlens` (documents + 1,); None without."""
    if cu_seqlens is None:
        return None
    indices = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return (torch.bucketize(indices, cu_seqlens, right=True) - 1)[None]


# Kernels ------------------------------------------------------------------------------------------------------------


def delta_rule_kernel(value: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """What computes the delta rule of such values in the place of what is above, of as many queries as values; None for
    nothing."""
    if not value.is_cuda or value.itemsize != 2 or not has_kernels():
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Any, state: Any
    ) -> tuple[Tensor, Tensor]:
        return chunk_gated_delta_rule(
            *(query, key, value),
            g=log_decay,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        )

    return kernel


def _for_each_head(x: Tensor, value: Tensor) -> Tensor:
    return x.repeat_interleave(value.shape[2] // x.shape[2], 2)


def gradients_of(kernel: Callable[..., Tensor], arguments: list[Any], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of arguments, by an autograd function that a kernel is, from inside a custom op: autograd sees such a
    function here, and nothing else."""
    leaves = [x.detach().contiguous().requires_grad_() for x in arguments]
    with torch.enable_grad():
        out = kernel(*leaves)
    return torch.autograd.grad(out, leaves, grad)


@cache
def has_kernels() -> bool:
    """Whether flash-linear-attention and causal-conv1d are installed; says so once where they are not."""
    found = all(importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d"))
    if not found:
        say(
            "WARNING",
            "layers with a state run slowly here: pip install 'lean-ft[hybrid]' brings their kernels for CUDA",
        )
    return found
