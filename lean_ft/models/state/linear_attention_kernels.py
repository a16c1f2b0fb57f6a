"""Triton kernels of linear attention with a decaying state, for all chunks of a segment at once.

The values that the delta rule writes are written = T (beta (value - decay key S)), where T, the inverse of the chunk's
triangular system, does not depend on the state S before the chunk. So one kernel computes T for all chunks, one walks
over the chunks with a part of the state in registers, and one computes the output of all chunks. Backward has one more
walk, from the last chunk to the first. Without corrections, as in Mamba-2, written = beta value.

Operands of products are TensorFloat-32 for inputs of 16 bits; sums, states and T are float32. No sum uses atomics, so
equal inputs give equal bits. Imported only with Triton and a GPU.

Shapes: as in `linear_attention`; N chunks of a segment, and C tokens of a chunk. Tensors of a segment have the heads
of all rows in their first dimension.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.models.state.chunks import CHUNK, SEGMENT, Tokens
from lean_ft.system.triton_compiler import launch

_C = tl.constexpr(CHUNK)
_EPS = tl.constexpr(1e-6)
_RATES, _SUMS = tl.constexpr(5), tl.constexpr(10)  # rows of C numbers per chunk
# For all cards since Ampere: within 99 KiB of shared memory, and without spilled registers. "PART" features of a key
# are read at a time, and "COLUMNS" of a value.
_OPTIONS = {
    "prepare": {"num_warps": 8, "num_stages": 1},
    "scan": {"num_warps": 8, "num_stages": 2},
    "all": {"num_warps": 4, "num_stages": 2},
    "sums": {"num_warps": 8, "num_stages": 1},
    "keys": {"num_warps": 4, "num_stages": 1, "PART": 32},
}


class _Chunks(NamedTuple):
    """What a kernel reads of consecutive chunks. `rates` (B H, N, 5, C): of each token, the sum of log decays since
    the start of the chunk or document, the decays since the state before the chunk and until that after it, and what
    the query and the key are multiplied by."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    documents: Tensor | None
    rates: Tensor
    query_strides: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    first: int
    num_tokens: int
    num_chunks: int
    num_heads: int
    group: int


class _Segment:
    """Consecutive chunks, and the launches that both passes need."""

    def __init__(self, tokens_of: Tokens, index: int) -> None:
        query, key, value, log_decay, *_, self.corrects = tokens_of
        num_rows, num_tokens, num_heads, self.value_dim = value.shape
        self.key_dim, self.num_states = key.shape[-1], num_rows * num_heads
        self.num_chunks = triton.cdiv(min(num_tokens - index * SEGMENT, SEGMENT), CHUNK)
        rates = log_decay.new_empty(self.num_states, self.num_chunks, _RATES.value, CHUNK)
        strides = (x.stride()[:3] for x in (query, key, value))
        sizes = index * SEGMENT, num_tokens, self.num_chunks, num_heads, tokens_of.group
        self.chunks = _Chunks._make((*tokens_of[:6], rates, *strides, *sizes))
        self.columns = _largest(self.value_dim, 32)
        self.constants = {"KEY": self.key_dim, "VALUE": self.value_dim, "COLUMNS": self.columns}
        self.constants |= {"CORRECTS": self.corrects, "PRECISION": "tf32" if value.itemsize == 2 else "ieee"}

    def scratch(self, *shape: int) -> Tensor:
        """Room for float32 numbers of each chunk, (B H, N, *shape)."""
        return self.chunks.rates.new_empty(self.num_states, self.num_chunks, *shape)

    def of_corrections(self, *shape: int) -> Tensor | None:
        """The same, or None without corrections."""
        return self.scratch(*shape) if self.corrects else None

    def launch(
        self, options: str, kernel: Callable[..., None], *tensors: Tensor | None, is_by_part: bool = False
    ) -> None:
        """Launch programs for each chunk and head, and each part of a key's features."""
        chosen = {"PART": 64, **_OPTIONS[options]}
        chosen["PART"] = _largest(self.key_dim, chosen["PART"])
        grid = self.num_chunks, self.num_states, self.key_dim // chosen["PART"] if is_by_part else 1
        launch(kernel, grid, self.chunks, *tensors, **self.constants, **chosen)

    def walk(self, kernel: Callable[..., None], *tensors: Tensor | None) -> None:
        """Launch programs for each head and some columns of its state, which go from chunk to chunk."""
        grid = self.num_states, self.value_dim // self.columns
        launch(kernel, grid, self.chunks, *tensors, **self.constants, **_OPTIONS["scan"])

    def scan(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The inverses of the systems, the states before the chunks, and the written values; `after` becomes the state
        after them. Without corrections, inverses and written values are None."""
        inverses, written = self.of_corrections(CHUNK, CHUNK), self.of_corrections(CHUNK, self.value_dim)
        states = self.scratch(self.key_dim, self.value_dim)
        self.launch("prepare", _prepare, inverses)
        self.walk(_scan, inverses, before, after, states, written)
        return inverses, states, written


def _largest(size: int, most: int) -> int:
    """The largest power of two that divides `size`, and is at most `most`."""
    return min(size & -size, most)


def _readable(tokens_of: Tokens) -> Tokens:
    """The arguments in layouts that the kernels read."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in tokens_of[:3])
    log_decay, beta = tokens_of.log_decay.contiguous(), tokens_of.beta.contiguous()
    documents = None if tokens_of.documents is None else tokens_of.documents[0]
    return Tokens(query, key, value, log_decay, beta, documents, tokens_of.corrects)


def forward(tokens_of: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, V), and the states before each segment and after the last token, (S + 1, B, H, K, V)."""
    x = _readable(tokens_of)
    num_rows, num_tokens, num_heads, value_dim = x.value.shape
    out = torch.empty_like(x.value, memory_format=torch.contiguous_format)
    num_segments = triton.cdiv(num_tokens, SEGMENT)
    kept = x.log_decay.new_empty(num_segments + 1, num_rows, num_heads, x.key.shape[-1], value_dim)
    kept[0] = 0.0 if state is None else state
    for index in range(num_segments):
        segment = _Segment(x, index)
        _, states, written = segment.scan(kept[index], kept[index + 1])
        segment.launch("all", _read, states, written, out)
    return out, kept


def backward(tokens_of: Tokens, kept: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, log_decay and beta from that of the output, and the kept states."""
    x, grad_out = _readable(tokens_of), grad_out.contiguous()
    *positions, num_heads, _ = x.value.shape
    dtype = x.query.dtype if x.group == 1 else torch.float32
    of_query, of_key = (part.new_empty(*positions, num_heads, part.shape[-1], dtype=dtype) for part in (x.query, x.key))
    of_value, of_decay, of_beta = (
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in (x.value, x.log_decay, x.beta)
    )
    grads = of_query, of_key, of_value, of_decay, of_beta
    of_state = torch.zeros_like(kept[0])  # of the state after a segment
    for index in reversed(range(len(kept) - 1)):
        of_state = _segment_backward(_Segment(x, index), kept[index], of_state, grad_out, grads)
    if x.group > 1:
        of_query, of_key = (part.unflatten(2, (-1, x.group)).sum(3).to(x.query.dtype) for part in (of_query, of_key))
    return of_query, of_key, of_value, of_decay, of_beta


def _segment_backward(
    segment: _Segment, before: Tensor, grad_after: Tensor, grad_out: Tensor, grads: tuple[Tensor, ...]
) -> Tensor:
    """Fill the gradients of queries, keys, values, decays and betas of a segment; returns that of the state before."""
    of_query, of_key, of_value, of_decay, of_beta = grads
    grad_before = torch.empty_like(before)  # first, the state after the segment
    inverses, states, written = segment.scan(before, grad_before)
    of_states = segment.scratch(segment.key_dim, segment.value_dim)
    of_written = segment.scratch(CHUNK, segment.value_dim)
    segment.launch("all", _read_backward, grad_out, of_states, of_written)
    segment.walk(_scan_backward, inverses, grad_after, grad_before, of_states, of_written)
    sums, of_scores = segment.scratch(_SUMS.value, CHUNK), segment.scratch(CHUNK, CHUNK)
    of_overlaps = segment.of_corrections(CHUNK, CHUNK)
    through_states = states, written, of_states, grad_after, grad_out, of_written
    segment.launch("sums", _write_backward, inverses, *through_states, of_value, sums)
    if segment.corrects:
        segment.launch("sums", _system_backward, written, of_written, sums, of_overlaps)
    segment.launch("sums", _decay_backward, written, grad_out, sums, of_scores, of_decay, of_beta)
    segment.launch("keys", _query_backward, states, grad_out, sums, of_scores, of_query, is_by_part=True)
    segment.launch("keys", _key_backward, *through_states, sums, of_scores, of_overlaps, of_key, is_by_part=True)
    return grad_before


# fmt: off
@triton.jit
def _here(x, n, state):
    """The row, head, first token and number of a chunk."""
    return state // x.num_heads, state % x.num_heads, x.first + n * _C, state * x.num_chunks + n


@triton.jit
def _features(source, strides, row, head, start, num_tokens, first, SIZE: tl.constexpr):
    """(C, SIZE) features of a chunk's tokens, from the feature `first`."""
    token = start + tl.arange(0, _C).to(tl.int64)
    places = row * strides[0] + token[:, None] * strides[1] + head * strides[2] + first + tl.arange(0, SIZE)[None, :]
    return tl.load(source + places, mask=(token < num_tokens)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _queries(x, row, head, start, first, SIZE: tl.constexpr):
    return _features(x.query, x.query_strides, row, head // x.group, start, x.num_tokens, first, SIZE)


@triton.jit
def _keys(x, row, head, start, first, SIZE: tl.constexpr):
    return _features(x.key, x.key_strides, row, head // x.group, start, x.num_tokens, first, SIZE)


@triton.jit
def _values(x, row, head, start, first, SIZE: tl.constexpr):
    return _features(x.value, x.value_strides, row, head, start, x.num_tokens, first, SIZE)


@triton.jit
def _gradients(grad_out, x, row, head, start, first, VALUE: tl.constexpr, SIZE: tl.constexpr):
    strides = (x.num_tokens * x.num_heads * VALUE, x.num_heads * VALUE, VALUE)
    return _features(grad_out, strides, row, head, start, x.num_tokens, first, SIZE)


@triton.jit
def _store_features(target, x, row, head, start, first, values, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Store (C, SIZE) features of a chunk's tokens into (B, T, H, WIDTH)."""
    token = start + tl.arange(0, _C).to(tl.int64)
    places = ((row * x.num_tokens + token) * x.num_heads + head)[:, None] * WIDTH + first + tl.arange(0, SIZE)[None, :]
    tl.store(target + places, values.to(target.dtype.element_ty), mask=(token < x.num_tokens)[:, None])


@triton.jit
def _scalars(source, x, row, head, start):
    """A number of each token, from (B, T, H)."""
    token = start + tl.arange(0, _C)
    places = (row * x.num_tokens + token) * x.num_heads + head
    return tl.load(source + places, mask=token < x.num_tokens, other=0.0).to(tl.float32)


@triton.jit
def _store_scalars(target, x, row, head, start, values):
    token = start + tl.arange(0, _C)
    places = (row * x.num_tokens + token) * x.num_heads + head
    tl.store(target + places, values.to(target.dtype.element_ty), mask=token < x.num_tokens)


@triton.jit
def _rate(x, chunk, kind):
    return tl.load(x.rates + (chunk * _RATES + kind) * _C + tl.arange(0, _C))


@triton.jit
def _tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr, stride):
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _sees(x, start):
    """Whether a token sees another of its chunk: it is not later, and in the same document."""
    c = tl.arange(0, _C)
    sees = c[:, None] >= c[None, :]
    if x.documents is not None:
        number = tl.load(x.documents + tl.minimum(start + c, x.num_tokens - 1))
        sees = sees & (number[:, None] == number[None, :])
    return sees


@triton.jit
def _between(x, chunk, start):
    """The decay between two tokens of a chunk, 0 if the first does not see the second."""
    total = _rate(x, chunk, 0)
    return tl.exp(tl.where(_sees(x, start), total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _prepare(
    x, inverses, KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Store the rates, and T: the inverse of 1 + beta times the chunk's decayed products of keys below the diagonal."""
    n, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head, start, chunk = _here(x, n, state)
    c = tl.arange(0, _C)
    sees = _sees(x, start)
    total = tl.sum(tl.where(sees, _scalars(x.log_decay, x, row, head, start)[None, :], 0.0), 1)
    of_state = tl.exp(total)
    if x.documents is not None:
        number = tl.load(x.documents + tl.minimum(start + c, x.num_tokens - 1))
        of_state = tl.where(number == tl.load(x.documents + tl.maximum(start - 1, 0)), of_state, 0.0)
    between = tl.exp(tl.where(sees, total[:, None] - total[None, :], float("-inf")))
    to_state = tl.sum(tl.where((c == _C - 1)[:, None], between, 0.0), 0)
    rates = x.rates + chunk * _RATES * _C + c
    tl.store(rates, total)
    tl.store(rates + _C, of_state)
    tl.store(rates + 2 * _C, to_state)
    query_scale, key_scale = tl.full((_C,), 1.0, tl.float32), tl.full((_C,), 1.0, tl.float32)
    products = tl.zeros((_C, _C), tl.float32)
    if CORRECTS:
        of_query, of_key = tl.zeros((_C,), tl.float32), tl.zeros((_C,), tl.float32)
        for first in range(0, KEY, PART):
            query, key = _queries(x, row, head, start, first, PART), _keys(x, row, head, start, first, PART)
            of_query += tl.sum(query * query, 1)
            of_key += tl.sum(key * key, 1)
            products += tl.dot(key, tl.trans(key), input_precision=PRECISION)
        query_scale = tl.rsqrt(of_query + _EPS) / tl.sqrt(KEY * 1.0)
        key_scale = tl.rsqrt(of_key + _EPS)
    tl.store(rates + 3 * _C, query_scale)
    tl.store(rates + 4 * _C, key_scale)
    if CORRECTS:
        left = key_scale * _scalars(x.beta, x, row, head, start)
        system = tl.where(c[:, None] > c[None, :], products * between * left[:, None] * key_scale[None, :], 0.0)
        inverse = _inverse(system, PRECISION)
        tl.store(inverses + chunk * _C * _C + _tile(_C, _C, _C), inverse)


@triton.jit
def _inverse(system, PRECISION: tl.constexpr):
    """The inverse of 1 + system, which is zero on and above the diagonal: of blocks of 16 on the diagonal, row by row;
    then with the rest, whose fourth power is zero after the blocks are divided out."""
    exact: tl.constexpr = "tf32x3" if PRECISION == "tf32" else PRECISION
    c = tl.arange(0, _C)
    is_inside, place = (c // 16)[:, None] == (c // 16)[None, :], c % 16
    blocks, rest = tl.trans(tl.where(is_inside, system, 0.0)), tl.where(is_inside, 0.0, system)
    one = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    inverse = one
    for i in range(1, 16):
        factors = tl.sum(tl.where((place == i)[None, :], blocks, 0.0), 1)
        row = one - tl.sum(factors[:, None] * inverse, 0)[None, :]
        inverse = tl.where(is_inside & (place == i)[:, None], row, inverse)
    rest = -tl.dot(inverse, rest, input_precision=exact)
    whole = inverse
    for _ in range(3):
        whole = tl.dot(rest, whole, inverse, input_precision=exact)
    return whole


@triton.jit
def _scan(
    x, inverses, before, after, states, writes,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
):
    """From chunk to chunk: store the state before each, and the values that it writes."""
    state, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    whole = _tile(KEY, COLUMNS, VALUE) + column
    s = tl.load(before + state * KEY * VALUE + whole)
    for n in range(x.num_chunks):
        row, head, start, chunk = _here(x, n, state)
        tl.store(states + chunk * KEY * VALUE + whole, s)
        of_state, key_scale = _rate(x, chunk, 1), _rate(x, chunk, 4)
        key = _keys(x, row, head, start, 0, KEY)
        written = _values(x, row, head, start, column, COLUMNS)
        if CORRECTS:
            written -= (of_state * key_scale)[:, None] * tl.dot(key, s, input_precision=PRECISION)
        written *= _scalars(x.beta, x, row, head, start)[:, None]
        if CORRECTS:
            inverse = tl.load(inverses + chunk * _C * _C + _tile(_C, _C, _C))
            written = tl.dot(inverse, written, input_precision=PRECISION)
            tl.store(writes + chunk * _C * VALUE + _tile(_C, COLUMNS, VALUE) + column, written)
        written *= (_rate(x, chunk, 2) * key_scale)[:, None]
        kept = tl.load(x.rates + (chunk * _RATES + 2) * _C - 1)  # the last token's decay since the state before
        s = kept * s + tl.dot(tl.trans(key), written, input_precision=PRECISION)
    tl.store(after + state * KEY * VALUE + whole, s)


@triton.jit
def _written(
    x, writes, row, head, start, chunk, column, VALUE: tl.constexpr, COLUMNS: tl.constexpr, CORRECTS: tl.constexpr,
):
    if CORRECTS:
        written = tl.load(writes + chunk * _C * VALUE + _tile(_C, COLUMNS, VALUE) + column)
    else:
        written = _scalars(x.beta, x, row, head, start)[:, None] * _values(x, row, head, start, column, COLUMNS)
    return written


@triton.jit
def _products(x, row, head, start, chunk, KEY: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr):
    """A chunk's products of queries with keys."""
    products = tl.zeros((_C, _C), tl.float32)
    for first in range(0, KEY, PART):
        query, key = _queries(x, row, head, start, first, PART), _keys(x, row, head, start, first, PART)
        products += tl.dot(query, tl.trans(key), input_precision=PRECISION)
    return products * _rate(x, chunk, 3)[:, None] * _rate(x, chunk, 4)[None, :]


@triton.jit
def _read(
    x, states, writes, out,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The output: from the state before the chunk, and from the values that the chunk writes."""
    n, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head, start, chunk = _here(x, n, state)
    scores = _products(x, row, head, start, chunk, KEY, PART, PRECISION) * _between(x, chunk, start)
    scale = _rate(x, chunk, 1) * _rate(x, chunk, 3)
    for column in range(0, VALUE, COLUMNS):
        read = tl.zeros((_C, COLUMNS), tl.float32)
        for first in range(0, KEY, PART):
            s = tl.load(states + chunk * KEY * VALUE + first * VALUE + _tile(PART, COLUMNS, VALUE) + column)
            read += tl.dot(_queries(x, row, head, start, first, PART), s, input_precision=PRECISION)
        written = _written(x, writes, row, head, start, chunk, column, VALUE, COLUMNS, CORRECTS)
        read = scale[:, None] * read + tl.dot(scores, written, input_precision=PRECISION)
        _store_features(out, x, row, head, start, column, read, VALUE, COLUMNS)


@triton.jit
def _read_backward(
    x, grad_out, grads, grad_writes,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The gradients, through the chunk's output alone, of the state before it and of the values that it writes."""
    n, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head, start, chunk = _here(x, n, state)
    scores = tl.trans(_products(x, row, head, start, chunk, KEY, PART, PRECISION) * _between(x, chunk, start))
    scale = _rate(x, chunk, 1) * _rate(x, chunk, 3)
    for column in range(0, VALUE, COLUMNS):
        grad = _gradients(grad_out, x, row, head, start, column, VALUE, COLUMNS)
        of_written = tl.dot(scores, grad, input_precision=PRECISION)
        tl.store(grad_writes + chunk * _C * VALUE + _tile(_C, COLUMNS, VALUE) + column, of_written)
        grad *= scale[:, None]
        for first in range(0, KEY, PART):
            of_state = tl.dot(tl.trans(_queries(x, row, head, start, first, PART)), grad, input_precision=PRECISION)
            tl.store(grads + chunk * KEY * VALUE + first * VALUE + _tile(PART, COLUMNS, VALUE) + column, of_state)


@triton.jit
def _scan_backward(
    x, inverses, grad_after, grad_before, grads, grad_writes,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
):
    """From the last chunk to the first: add to each state's gradient what comes through the states after it."""
    state, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    whole = _tile(KEY, COLUMNS, VALUE) + column
    grad = tl.load(grad_after + state * KEY * VALUE + whole)
    for i in range(x.num_chunks):
        row, head, start, chunk = _here(x, x.num_chunks - 1 - i, state)
        kept = tl.load(x.rates + (chunk * _RATES + 2) * _C - 1)
        through_read = tl.load(grads + chunk * KEY * VALUE + whole)
        if CORRECTS:
            key, key_scale = _keys(x, row, head, start, 0, KEY), _rate(x, chunk, 4)
            of_written = (_rate(x, chunk, 2) * key_scale)[:, None] * tl.dot(key, grad, input_precision=PRECISION)
            of_written += tl.load(grad_writes + chunk * _C * VALUE + _tile(_C, COLUMNS, VALUE) + column)
            inverse = tl.load(inverses + chunk * _C * _C + _tile(_C, _C, _C))
            of_written = tl.dot(tl.trans(inverse), of_written, input_precision=PRECISION)
            of_written *= (_scalars(x.beta, x, row, head, start) * _rate(x, chunk, 1) * key_scale)[:, None]
            through_read -= tl.dot(tl.trans(key), of_written, input_precision=PRECISION)
        grad = through_read + kept * grad
        tl.store(grads + chunk * KEY * VALUE + whole, grad)
    tl.store(grad_before + state * KEY * VALUE + whole, grad)


@triton.jit
def _after(x, grads, grad_after, n, state, chunk, SIZE: tl.constexpr):
    """Where the gradient of the state after a chunk is."""
    is_last = n == x.num_chunks - 1
    return tl.where(is_last, grad_after + state * SIZE, grads + (chunk + 1) * SIZE)


@triton.jit
def _write_backward(
    x, inverses, states, writes, grads, grad_after, grad_out, grad_writes, grad_value, sums,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The gradients of values; of the right side of the chunk's system, in place of `grad_writes`; and sums over
    values: of the decay since the state before, through queries and through keys; of that until the state after; and
    of beta."""
    n, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head, start, chunk = _here(x, n, state)
    rate = _scalars(x.beta, x, row, head, start)
    of_state, key_scale = _rate(x, chunk, 1), _rate(x, chunk, 4)
    by_query, by_key = tl.zeros((_C,), tl.float32), tl.zeros((_C,), tl.float32)
    by_after, of_rate, of_kept = tl.zeros((_C,), tl.float32), tl.zeros((_C,), tl.float32), 0.0
    after = _after(x, grads, grad_after, n, state, chunk, KEY * VALUE)
    for column in range(0, VALUE, COLUMNS):
        tile = _tile(_C, COLUMNS, VALUE) + column
        read, through_state = tl.zeros((_C, COLUMNS), tl.float32), tl.zeros((_C, COLUMNS), tl.float32)
        known = tl.zeros((_C, COLUMNS), tl.float32)
        for first in range(0, KEY, PART):
            key, part = _keys(x, row, head, start, first, PART), first * VALUE + _tile(PART, COLUMNS, VALUE) + column
            s, grad_s = tl.load(states + chunk * KEY * VALUE + part), tl.load(after + part)
            of_kept += tl.sum(tl.sum(s * grad_s, 1), 0)
            read += tl.dot(_queries(x, row, head, start, first, PART), s, input_precision=PRECISION)
            through_state += tl.dot(key, grad_s, input_precision=PRECISION)
            if CORRECTS:
                known += tl.dot(key, s, input_precision=PRECISION)
        by_query += tl.sum(_gradients(grad_out, x, row, head, start, column, VALUE, COLUMNS) * read, 1)
        through_state *= (_rate(x, chunk, 2) * key_scale)[:, None]
        written = _written(x, writes, row, head, start, chunk, column, VALUE, COLUMNS, CORRECTS)
        by_after += tl.sum(written * through_state, 1)
        grad = tl.load(grad_writes + chunk * _C * VALUE + tile) + through_state
        value = _values(x, row, head, start, column, COLUMNS)
        if CORRECTS:
            inverse = tl.load(inverses + chunk * _C * _C + _tile(_C, _C, _C))
            grad = tl.dot(tl.trans(inverse), grad, input_precision=PRECISION)
            known *= key_scale[:, None]
            by_key -= rate * tl.sum(grad * known, 1)
            value -= of_state[:, None] * known
        of_rate += tl.sum(grad * value, 1)
        tl.store(grad_writes + chunk * _C * VALUE + tile, grad)
        _store_features(grad_value, x, row, head, start, column, rate[:, None] * grad, VALUE, COLUMNS)
    c = tl.arange(0, _C)
    sums += chunk * _SUMS * _C + c
    tl.store(sums, by_query * _rate(x, chunk, 3))
    tl.store(sums + _C, by_key)
    tl.store(sums + 2 * _C, by_after)
    tl.store(sums + 3 * _C, of_rate)
    tl.store(sums + 4 * _C, tl.where(c == _C - 1, of_kept, 0.0))


@triton.jit
def _system_backward(
    x, writes, grad_writes, sums, of_overlaps,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The gradients of a chunk's products of keys with keys, added to their transpose; and, in `sums`, what the system
    adds to the gradients of betas and of the sums of log decays."""
    n, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head, start, chunk = _here(x, n, state)
    c = tl.arange(0, _C)
    of_system, products = tl.zeros((_C, _C), tl.float32), tl.zeros((_C, _C), tl.float32)
    for column in range(0, VALUE, COLUMNS):
        written = tl.trans(tl.load(writes + chunk * _C * VALUE + _tile(_C, COLUMNS, VALUE) + column))
        grad = tl.load(grad_writes + chunk * _C * VALUE + _tile(_C, COLUMNS, VALUE) + column)
        of_system -= tl.dot(grad, written, input_precision=PRECISION)
    for first in range(0, KEY, PART):
        key = _keys(x, row, head, start, first, PART)
        products += tl.dot(key, tl.trans(key), input_precision=PRECISION)
    key_scale, rate = _rate(x, chunk, 4), _scalars(x.beta, x, row, head, start)
    of_system = tl.where(c[:, None] > c[None, :], of_system * _between(x, chunk, start), 0.0)
    products *= of_system * key_scale[:, None] * key_scale[None, :]
    sums += chunk * _SUMS * _C + c
    of_rate, by_later = tl.sum(products, 1), tl.sum(rate[:, None] * products, 0)
    tl.store(sums + 5 * _C, of_rate)
    tl.store(sums + 6 * _C, rate * of_rate - by_later)
    # What a gradient has along its key, whose length is always 1.
    through_state = tl.load(sums + 2 * _C) + _rate(x, chunk, 1) * tl.load(sums + _C)
    tl.store(sums + 8 * _C, rate * of_rate + by_later + through_state)
    of_system *= rate[:, None]
    tl.store(of_overlaps + chunk * _C * _C + _tile(_C, _C, _C), of_system + tl.trans(of_system))


@triton.jit
def _decay_backward(
    x, writes, grad_out, sums, of_scores, grad_decay, grad_beta,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The gradients of log decays and betas, and of a chunk's products of queries with keys."""
    n, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head, start, chunk = _here(x, n, state)
    c = tl.arange(0, _C)
    of_products = tl.zeros((_C, _C), tl.float32)
    for column in range(0, VALUE, COLUMNS):
        written = tl.trans(_written(x, writes, row, head, start, chunk, column, VALUE, COLUMNS, CORRECTS))
        grad = _gradients(grad_out, x, row, head, start, column, VALUE, COLUMNS)
        of_products += tl.dot(grad, written, input_precision=PRECISION)
    of_products *= _between(x, chunk, start)
    tl.store(of_scores + chunk * _C * _C + _tile(_C, _C, _C), of_products)
    of_products *= _products(x, row, head, start, chunk, KEY, PART, PRECISION)
    by_query, by_key = tl.sum(of_products, 1), tl.sum(of_products, 0)
    sums += chunk * _SUMS * _C + c
    of_state, through_query, by_after = _rate(x, chunk, 1), tl.load(sums), tl.load(sums + 2 * _C)
    of_rate, of_total = tl.load(sums + 3 * _C), by_query - by_key - by_after
    of_total += (through_query + tl.load(sums + _C) + tl.load(sums + 4 * _C)) * of_state
    of_total += tl.where(c == _C - 1, tl.sum(by_after, 0), 0.0)
    if CORRECTS:
        of_rate += tl.load(sums + 5 * _C)
        of_total += tl.load(sums + 6 * _C)
        tl.store(sums + 7 * _C, by_query + of_state * through_query)
        tl.store(sums + 9 * _C, by_key)
    _store_scalars(grad_decay, x, row, head, start, tl.sum(tl.where(_sees(x, start), of_total[:, None], 0.0), 0))
    _store_scalars(grad_beta, x, row, head, start, of_rate)


@triton.jit
def _query_backward(
    x, states, grad_out, sums, of_scores, grad_query,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The gradients of some features of queries."""
    n, state, first = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * PART
    row, head, start, chunk = _here(x, n, state)
    total = tl.zeros((_C, PART), tl.float32)
    for column in range(0, VALUE, COLUMNS):
        s = tl.load(states + chunk * KEY * VALUE + first * VALUE + _tile(PART, COLUMNS, VALUE) + column)
        grad = _gradients(grad_out, x, row, head, start, column, VALUE, COLUMNS)
        total += tl.dot(grad, tl.trans(s), input_precision=PRECISION)
    key = _keys(x, row, head, start, first, PART) * _rate(x, chunk, 4)[:, None]
    of_products = tl.load(of_scores + chunk * _C * _C + _tile(_C, _C, _C))
    total = _rate(x, chunk, 1)[:, None] * total + tl.dot(of_products, key, input_precision=PRECISION)
    if CORRECTS:  # the query's length is always 1
        scale = _rate(x, chunk, 3)
        query = _queries(x, row, head, start, first, PART) * scale[:, None]
        along = tl.load(sums + (chunk * _SUMS + 7) * _C + tl.arange(0, _C)) * KEY
        total = scale[:, None] * (total - query * along[:, None])
    _store_features(grad_query, x, row, head, start, first, total, KEY, PART)


@triton.jit
def _key_backward(
    x, states, writes, grads, grad_after, grad_out, grad_writes, sums, of_scores, of_overlaps, grad_key,
    KEY: tl.constexpr, VALUE: tl.constexpr, CORRECTS: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The gradients of some features of keys."""
    n, state, first = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * PART
    row, head, start, chunk = _here(x, n, state)
    total = tl.zeros((_C, PART), tl.float32)
    to_state, of_known = _rate(x, chunk, 2), _scalars(x.beta, x, row, head, start) * _rate(x, chunk, 1)
    after = _after(x, grads, grad_after, n, state, chunk, KEY * VALUE) + first * VALUE
    for column in range(0, VALUE, COLUMNS):
        written = to_state[:, None] * _written(x, writes, row, head, start, chunk, column, VALUE, COLUMNS, CORRECTS)
        grad_s = tl.load(after + _tile(PART, COLUMNS, VALUE) + column)
        total += tl.dot(written, tl.trans(grad_s), input_precision=PRECISION)
        if CORRECTS:
            s = tl.load(states + chunk * KEY * VALUE + first * VALUE + _tile(PART, COLUMNS, VALUE) + column)
            grad = tl.load(grad_writes + chunk * _C * VALUE + _tile(_C, COLUMNS, VALUE) + column)
            total -= tl.dot(of_known[:, None] * grad, tl.trans(s), input_precision=PRECISION)
    query = _queries(x, row, head, start, first, PART) * _rate(x, chunk, 3)[:, None]
    of_products = tl.load(of_scores + chunk * _C * _C + _tile(_C, _C, _C))
    total += tl.dot(tl.trans(of_products), query, input_precision=PRECISION)
    if CORRECTS:  # the key's length is always 1
        scale = _rate(x, chunk, 4)
        key = _keys(x, row, head, start, first, PART) * scale[:, None]
        of_overlap = tl.load(of_overlaps + chunk * _C * _C + _tile(_C, _C, _C))
        total += tl.dot(of_overlap, key, input_precision=PRECISION)
        along = sums + (chunk * _SUMS + 8) * _C + tl.arange(0, _C)
        total = scale[:, None] * (total - key * (tl.load(along) + tl.load(along + _C))[:, None])
    _store_features(grad_key, x, row, head, start, first, total, KEY, PART)
# fmt: on
