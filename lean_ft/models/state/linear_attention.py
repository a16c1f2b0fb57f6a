"""Linear attention with a decaying state, by the gated delta rule or as in Mamba-2, in chunks of tokens.

Each head has a state S, a matrix from keys to values. With the delta rule, a token decays the state, writes under its
key the part of its value that the state does not predict, and reads under its query: S_t = exp(g_t) S_{t-1} + k_t^T
beta_t (v_t - k_t exp(g_t) S_{t-1}), o_t = q_t S_t, with queries and keys scaled to length 1. Mamba-2 has no correction
and no scaling: S_t = exp(g_t) S_{t-1} + k_t^T beta_t v_t. Within a chunk, tokens interact through one product of
queries with keys; earlier tokens count through the state. The corrections, each of which depends on those before, are
the solution of one triangular system.

A document starts with an empty state. Decays from earlier documents are masked to zero, so no shape depends on the
boundaries and no document's numbers affect another's.

The hand-written backward pass goes through the chunks in reverse. It keeps the arguments and the state before every
eighth chunk, and recomputes the states in between, so its working memory does not depend on the length. The op is
opaque to torch.compile. On CUDA in 16 bits flash-linear-attention computes the delta rule if it is installed.

Source: Yang et al. 2024, Gated Delta Networks (arXiv:2412.06464), in chunks as Yang et al. 2024 (arXiv:2406.06484); Dao
and Gu 2024, Mamba-2 (arXiv:2405.21060). The backward pass is our own. Left out: kernels of Mamba-2.

Shapes: B rows, T tokens of a row, G heads of queries and keys, H heads of values (H / G consecutive heads share a query
and key), K and V features of a head, C tokens of a chunk, S segments of chunks.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.models.layers import wide_dtype
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import Cost, Launched, SlowPath, register_cost
from lean_ft.system.installation import install_command
from lean_ft.system.log import say
from lean_ft.torch_private import python_function

CHUNK = 64
SEGMENT = 8 * CHUNK  # tokens between two stored states
_solve = partial(torch.linalg.solve_triangular, unitriangular=True)
_LENGTH_EPS = 1e-6  # added to the squared length of queries and keys, as in flash-linear-attention


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
    if corrects and (kernel := delta_rule_kernel(value)) is not None:
        query, key = (_for_each_head(x, value) for x in (query, key))
        out, last = kernel(query, key, value, log_decay, beta, cu_seqlens, state)
        states = _room_for_states(key, value)
        if cu_seqlens is None:
            states[-1] = last
        return out, states
    tokens_of = _Tokens(query, key, value, log_decay, beta, document_numbers(cu_seqlens, query.shape[1]), corrects)
    out, states = torch.empty_like(value, memory_format=torch.contiguous_format), []
    state = tokens_of.empty_state() if state is None else state
    with torch.autocast(query.device.type, enabled=False):
        for tokens in chunks(0, query.shape[1], CHUNK):
            if tokens.start % SEGMENT == 0:
                states.append(state)
            chunk = _Chunk(tokens_of, tokens, state)
            out[:, tokens] = chunk.read().transpose(1, 2)
            state = chunk.next_state()
    return out, torch.stack([*states, state])


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
    if corrects and (kernel := delta_rule_kernel(value)) is not None:
        arguments = [_for_each_head(query, value), _for_each_head(key, value), value, log_decay, beta]
        grads = gradients_of(lambda *leaves: kernel(*leaves, cu_seqlens, None)[0], arguments, grad_out)
        return *(grad.unflatten(2, (key.shape[2], -1)).sum(3) for grad in grads[:2]), *grads[2:]  # type: ignore[return-value]
    tokens_of = _Tokens(query, key, value, log_decay, beta, document_numbers(cu_seqlens, query.shape[1]), corrects)
    differentiable = (query, key, value, log_decay, beta)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in differentiable)
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


def recurrent_cost(operator: Any, *, is_attention: bool = False) -> Cost:
    """The cost of an operator of a recurrent layer: plain operations without the CUDA kernels."""

    def on_gpu(capability: tuple[int, int], *args: Any) -> Launched | SlowPath:
        if has_kernels() and args[-1] is not False:  # without corrections there is no kernel
            return Launched()
        why = f"recurrent layers run without their CUDA kernels (slow). Run {install_command('hybrid')}"
        return SlowPath(partial(python_function(operator), *args), why)

    return Cost(on_gpu, is_attention=is_attention)


register_cost(torch.ops.lean_ft.linear_attention, recurrent_cost(linear_attention, is_attention=True))
register_cost(torch.ops.lean_ft.linear_attention_backward, recurrent_cost(linear_attention_backward, is_attention=True))


class _RecurrenceContext(
    # query, key, value, log_decay, beta, cu_seqlens, and the states
    AutogradContext[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]
):
    corrects: bool


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]  # of `linear_attention`


def _save_for_backward(ctx: _RecurrenceContext, inputs: _Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, log_decay, beta, cu_seqlens, _, ctx.corrects = inputs
    ctx.save_for_backward(query, key, value, log_decay, beta, cu_seqlens, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: _RecurrenceContext, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *linear_attention_backward(grad_out, *ctx.saved_tensors, ctx.corrects), None, None, None


linear_attention.register_autograd(_backward, setup_context=_save_for_backward)


class _Tokens(NamedTuple):
    """The arguments of a call, from which chunks take their tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    documents: Tensor | None
    corrects: bool

    @property
    def group(self) -> int:
        """Number of heads of values that share a query and key."""
        return self.value.shape[2] // self.key.shape[2]

    def of(self, x: Tensor, tokens: slice) -> Tensor:
        """The tokens' part (B, H, C, ...) of x (B, T, G or H, ...), in float32 or wider."""
        x = x[:, tokens].transpose(1, 2).to(wide_dtype(self.value))
        return x if x.shape[1] == self.value.shape[2] else x.repeat_interleave(self.group, 1)

    def empty_state(self) -> Tensor:
        num_rows, _, num_heads, size = self.value.shape
        return self.value.new_zeros(num_rows, num_heads, self.key.shape[-1], size, dtype=wide_dtype(self.value))


class _Chunk:
    """Consecutive tokens and the state before them; all tensors are (B, H, C, ...)."""

    def __init__(self, arguments: _Tokens, tokens: slice, state: Tensor) -> None:
        self.state, self.group, self.corrects = state, arguments.group, arguments.corrects
        query, key, value = (arguments.of(x, tokens) for x in (arguments.query, arguments.key, arguments.value))
        log_decay = arguments.of(arguments.log_decay, tokens)  # (B, H, C)
        sees = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        self.sees, continues = sees, None
        if arguments.documents is not None:
            documents = arguments.documents[:, None, tokens]  # (B or 1, 1, C)
            self.sees = sees & (documents[..., None] == documents[..., None, :])
            continues = documents == arguments.documents[:, None, max(tokens.start - 1, 0), None]
        # Summed per document. Differences of a sum over all documents would depend on the others' rounding.
        total = (log_decay[..., None, :] * self.sees).sum(-1)  # (B, H, C): since the start of the chunk or document
        self.decay = (total[..., None] - total[..., None, :]).masked_fill(~self.sees, float("-inf")).exp()
        self.of_state = (total.exp() if continues is None else total.exp() * continues)[..., None]  # (B, H, C, 1)
        self.to_state = self.decay[..., -1, :, None]  # (B, H, C, 1)
        self.beta, self.scale = arguments.of(arguments.beta, tokens)[..., None], query.shape[-1] ** -0.5
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
        self.system = self.beta * self.overlap  # with ones on the diagonal
        self.written = _solve(self.system, self.beta * self.error, upper=False)

    def read(self) -> Tensor:
        """The output, (B, H, C, V)."""
        return self.of_state * (self.query @ self.state) + self.scores @ self.written

    def next_state(self) -> Tensor:
        """The state after the chunk, (B, H, K, V)."""
        return self.of_state[..., -1:, :] * self.state + (self.to_state * self.key).mT @ self.written

    def backward(self, grad: Tensor, grad_next: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of the state before, and of (queries, keys, values, log decays, betas), from those of the
        output (B, H, C, V) and of the state after."""
        query, key, state = self.query, self.key, self.state
        # Through the output and the next state
        grad_scores = grad @ self.written.mT
        grad_written = self.scores.mT @ grad + (self.to_state * key) @ grad_next
        grad_state = self.of_state[..., -1:, :] * grad_next + (self.of_state * query).mT @ grad
        from_state = grad @ state.mT
        grad_query = self.of_state * from_state
        by_state = self.written @ grad_next.mT
        grad_key = self.to_state * by_state
        grad_of_state = (query * from_state).sum(-1)  # (B, H, C)
        grad_of_state[..., -1] += (grad_next * state).sum((-1, -2))
        grad_decay = grad_scores * self.scores  # of the log decay
        grad_decay[..., -1, :] += (key * by_state).sum(-1) * self.to_state[..., 0]
        grad_scores *= self.decay
        grad_query += grad_scores @ key
        grad_key += grad_scores.mT @ query
        # Through the written values
        if not self.corrects:
            grad_value, grad_beta = self.beta * grad_written, (grad_written * self.value).sum(-1)
            return grad_state, self._of_tokens(grad_query, grad_key, grad_value, grad_decay, grad_of_state, grad_beta)
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
        return grad_state, self._of_tokens(grad_query, grad_key, grad_value, grad_decay, grad_of_state, grad_beta)

    def _of_tokens(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, of_state: Tensor, beta: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of the tokens' arguments; `decay` is that of its logarithm."""
        if self.group > 1:  # sum over the heads that share a query and key
            query, key = (grad.unflatten(1, (-1, self.group)).sum(2) for grad in (query, key))
        grad_total = decay.sum(-1) - decay.sum(-2) + of_state * self.of_state[..., 0]
        return query, key, value, (grad_total[..., None] * self.sees).sum(-2), beta


def chunks(start: int, end: int, size: int) -> Iterator[slice]:
    """Slices of `size` from `start` to `end`; the last may be shorter."""
    return (slice(first, min(first + size, end)) for first in range(start, end, size))


def _inverse_length(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _through_length(grad: Tensor, scaled: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of x from that of `scaled`, which is x * inverse."""
    return inverse * (grad - scaled * (scaled * grad).sum(-1, keepdim=True))


def _room_for_states(key: Tensor, value: Tensor) -> Tensor:
    num_rows, num_tokens, num_heads, size = value.shape
    shape = -(-num_tokens // SEGMENT) + 1, num_rows, num_heads, key.shape[-1], size
    return value.new_empty(shape, dtype=wide_dtype(value))


def document_numbers(cu_seqlens: Tensor | None, num_tokens: int) -> Tensor | None:
    """The document's number for each token, (1, N); None without `cu_seqlens` (documents + 1,)."""
    if cu_seqlens is None:
        return None
    indices = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return (torch.bucketize(indices, cu_seqlens, right=True) - 1)[None]


def delta_rule_kernel(value: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """flash-linear-attention's delta rule for as many query heads as value heads; None if it cannot compute these
    values."""
    if not value.is_cuda or value.itemsize != 2 or not has_kernels():
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None,
        state: Tensor | None,
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
    """The gradients of a kernel's arguments inside a custom op, where autograd otherwise sees nothing."""
    leaves = [x.detach().contiguous().requires_grad_() for x in arguments]
    with torch.enable_grad():
        out = kernel(*leaves)
    return torch.autograd.grad(out, leaves, grad)


@cache
def has_kernels() -> bool:
    """Whether flash-linear-attention and causal-conv1d are installed; logs a warning once if not."""
    are_installed = all(importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d"))
    if not are_installed:
        say(
            "WARNING",
            f"recurrent layers are slow without their CUDA kernels. Run {install_command('hybrid')}",
        )
    return are_installed
