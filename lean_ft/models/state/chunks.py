"""The arithmetic of linear attention with a decaying state, of one chunk of tokens, or of many at once.

Within a chunk, tokens interact through one product of queries with keys; earlier tokens count through the state before
the chunk. The values that the delta rule writes, each of which depends on those before, are the solution of one
triangular system. They are linear in the state: written = from_value - from_key S, where both parts do not depend on S.
So many chunks are computed at once, except for two scans over their states.

Shapes: B rows, H heads of values, N chunks, C tokens of a chunk, K and V features of a head. Tensors of one chunk have
no dimension N.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lean_ft.models.layers import wide_dtype

CHUNK = 64
SEGMENT = 16 * CHUNK  # tokens whose states a GPU has in memory at once, and between two states that are kept
_LENGTH_EPS = 1e-6  # added to the squared length of queries and keys, as in flash-linear-attention
_solve = partial(torch.linalg.solve_triangular, unitriangular=True)


class ChunkInputs(NamedTuple):
    """The tokens of one chunk, or of many; `documents` (1, 1, N, C) number the documents, and `document_before`
    (1, 1, N, 1) is that of the token before the chunk."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    documents: Tensor | None
    document_before: Tensor | None


class Tokens(NamedTuple):
    """The arguments of `linear_attention`, from which chunks take their tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    documents: Tensor | None  # (1, T): the number of each token's document
    corrects: bool

    @property
    def group(self) -> int:
        """Number of heads of values that share a query and key."""
        return self.value.shape[2] // self.key.shape[2]

    def of(self, x: Tensor, tokens: slice) -> Tensor:
        """The tokens' part (B, H, C, ...) of x (B, T, G or H, ...), in float32 or wider."""
        x = x[:, tokens].transpose(1, 2).to(wide_dtype(self.value))
        return x if x.shape[1] == self.value.shape[2] else x.repeat_interleave(self.group, 1)

    def chunk(self, tokens: slice) -> ChunkInputs:
        """One chunk of these tokens."""
        query, key, value, log_decay, beta = (self.of(x, tokens) for x in self[:5])
        documents = before = None
        if self.documents is not None:
            documents, before = self.documents[:, None, tokens], self.documents[:, None, max(tokens.start - 1, 0), None]
        return ChunkInputs(query, key, value, log_decay, beta, documents, before)

    def chunks_of(self, x: Tensor, tokens: slice) -> Tensor:
        """The tokens' part (B, H, N, C, ...) of x (B, T, G or H, ...), whose last chunk is filled up with zeros."""
        x = x[:, tokens].to(wide_dtype(self.value))
        if missing := -x.shape[1] % CHUNK:
            x = torch.cat((x, x.new_zeros(len(x), missing, *x.shape[2:])), 1)
        x = x.unflatten(1, (-1, CHUNK)).movedim(3, 1)
        return (x if x.shape[1] == self.value.shape[2] else x.repeat_interleave(self.group, 1)).contiguous()

    def joined(self, x: Tensor, tokens: slice) -> Tensor:
        """The tokens' part (B, T, H, ...) of x (B, H, N, C, ...), without what fills up the last chunk."""
        return x.movedim(1, 3).flatten(1, 2)[:, : min(tokens.stop, self.value.shape[1]) - tokens.start]

    def all_chunks(self, tokens: slice) -> ChunkInputs:
        """All chunks of these tokens. A token that fills up the last chunk neither decays the state nor writes."""
        query, key, value, log_decay, beta = (self.chunks_of(x, tokens) for x in self[:5])
        if self.documents is None:
            return ChunkInputs(query, key, value, log_decay, beta, None, None)
        documents = self.documents[:, tokens]
        if missing := -documents.shape[1] % CHUNK:
            documents = torch.cat((documents, documents[:, -1:].expand(-1, missing)), 1)
        documents = documents.unflatten(1, (-1, CHUNK))[:, None]
        first = self.documents[:, None, max(tokens.start - 1, 0), None, None]
        before = torch.cat((first, documents[:, :, :-1, -1:]), 2)
        return ChunkInputs(query, key, value, log_decay, beta, documents, before)

    def empty_state(self) -> Tensor:
        """The state of a document that begins, (B, H, K, V)."""
        num_rows, _, num_heads, size = self.value.shape
        return self.value.new_zeros(num_rows, num_heads, self.key.shape[-1], size, dtype=wide_dtype(self.value))


class Chunk:
    """Consecutive tokens, or many chunks of them; `follow` gives it the state before."""

    def __init__(self, inputs: ChunkInputs, group: int, corrects: bool) -> None:
        query, key, self.value, log_decay, beta, documents, document_before = inputs
        self.group, self.corrects = group, corrects
        sees = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).tril()
        self.sees = sees if documents is None else sees & (documents[..., None] == documents[..., None, :])
        # Summed per document. Differences of a sum over all documents would depend on the others' rounding.
        total = (log_decay[..., None, :] * self.sees).sum(-1)  # since the start of the chunk or document
        self.decay = (total[..., None] - total[..., None, :]).masked_fill(~self.sees, float("-inf")).exp()
        self.of_state = (total.exp() if documents is None else total.exp() * (documents == document_before))[..., None]
        self.to_state = self.decay[..., -1, :, None]
        self.beta, self.scale = beta[..., None], query.shape[-1] ** -0.5
        if corrects:
            self.query_inverse, self.key_inverse = (_inverse_length(x) for x in (query, key))
            query, key = query * (self.query_inverse * self.scale), key * self.key_inverse
        self.query, self.key = query, key
        self.scores = (query @ key.mT) * self.decay
        if corrects:
            self.overlap = ((key @ key.mT) * self.decay).tril(-1)
            self.system = self.beta * self.overlap  # with ones on the diagonal

    def follow(self, state: Tensor) -> "Chunk":
        """Take the state before the chunk, (B, H, N, K, V), and write values."""
        self.state = state
        if not self.corrects:
            self.written = self.beta * self.value
            return self
        self.from_before = self.key @ state
        self.error = self.value - self.of_state * self.from_before
        self.written = _solve(self.system, self.beta * self.error, upper=False)
        return self

    def read(self) -> Tensor:
        """The output, (B, H, N, C, V)."""
        return self.of_state * (self.query @ self.state) + self.scores @ self.written

    def next_state(self) -> Tensor:
        """The state after the chunk, (B, H, N, K, V)."""
        return self.of_state[..., -1:, :] * self.state + (self.to_state * self.key).mT @ self.written

    def states_from(self, state: Tensor) -> list[Tensor]:
        """The states before each of many chunks, and after the last, from that before the first, (B H, K, V)."""
        kept, key = self.of_state[..., -1, :, None].flatten(0, 1), (self.to_state * self.key).mT.flatten(0, 1)
        from_value, from_key = self.beta * self.value, None
        if self.corrects:
            right = torch.cat((from_value, self.beta * self.of_state * self.key), -1)
            solved = _solve(self.system, right, upper=False)
            from_value, from_key = solved.split((self.value.shape[-1], self.key.shape[-1]), -1)
            from_key = from_key.flatten(0, 1)
        from_value, states = from_value.flatten(0, 1), [state.flatten(0, 1)]
        for n in range(key.shape[1]):
            written = from_value[:, n]
            if from_key is not None:
                written = torch.baddbmm(written, from_key[:, n], states[-1], alpha=-1)
            states.append(torch.baddbmm(kept[:, n] * states[-1], key[:, n], written))
        return states

    def state_gradients(self, grad: Tensor, grad_after: Tensor) -> list[Tensor]:
        """The gradients of the states before each of many chunks and after the last, from those of the outputs and of
        the last state (B H, K, V)."""
        kept, key = self.of_state[..., -1, :, None].flatten(0, 1), (self.to_state * self.key).flatten(0, 1)
        through_read = ((self.of_state * self.query).mT @ grad).flatten(0, 1)
        grads, from_key, of_written = [grad_after], None, None
        if self.corrects:
            from_key = _solve(self.system, self.beta * self.of_state * self.key, upper=False).mT.flatten(0, 1)
            of_written = (self.scores.mT @ grad).flatten(0, 1)
        for n in reversed(range(key.shape[1])):
            before = torch.addcmul(through_read[:, n], kept[:, n], grads[-1])
            if from_key is not None and of_written is not None:
                through_written = torch.baddbmm(of_written[:, n], key[:, n], grads[-1])
                before = torch.baddbmm(before, from_key[:, n], through_written, alpha=-1)
            grads.append(before)
        return grads[::-1]

    def backward(self, grad: Tensor, grad_next: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of the state before, and of (queries, keys, values, log decays, betas), from those of the
        output (B, H, N, C, V) and of the state after."""
        query, key, state = self.query, self.key, self.state
        # Through the output and the next state
        grad_scores = grad @ self.written.mT
        grad_written = self.scores.mT @ grad + (self.to_state * key) @ grad_next
        grad_state = self.of_state[..., -1:, :] * grad_next + (self.of_state * query).mT @ grad
        from_state = grad @ state.mT
        grad_query = self.of_state * from_state
        by_state = self.written @ grad_next.mT
        grad_key = self.to_state * by_state
        grad_of_state = (query * from_state).sum(-1)
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


def _inverse_length(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _through_length(grad: Tensor, scaled: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of x from that of `scaled`, which is x * inverse."""
    return inverse * (grad - scaled * (scaled * grad).sum(-1, keepdim=True))


def document_numbers(cu_seqlens: Tensor | None, num_tokens: int) -> Tensor | None:
    """The document's number for each token, (1, N); None without `cu_seqlens` (documents + 1,)."""
    if cu_seqlens is None:
        return None
    indices = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.bucketize(indices, cu_seqlens, right=True)[None]


def chunks(start: int, end: int, size: int) -> Iterator[slice]:
    """Slices of `size` from `start` to `end`; the last may be shorter."""
    return (slice(first, min(first + size, end)) for first in range(start, end, size))
