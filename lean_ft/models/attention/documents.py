"""Which documents a CPU computes attention for at once, and in which blocks.

A long document is computed alone, in blocks of its queries, on views of the tensors. Short documents have one block
each; those whose blocks have one size are stacked along the heads and computed together, since products of a few tokens
take less time than calling them.

Blocks and stacks are padded with zeros to a few sizes, because a CPU's library compiles code for each new shape, which
takes as long as a dozen products and a third of a megabyte.

Shapes: N tokens of all documents, T of one, H query heads, K key-value heads, G = H / K heads of a group, D features of
a head, P keys of a document including padding, B = K for one document and K * documents for a stack.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.models.attention.row_attention import Rows

_BLOCK_QUERIES = 64
_SHORTEST_BLOCK = 16  # queries per block of shorter documents
_KEY_SIZES = 32  # the most distinct numbers of keys among the blocks of a long document
# Scores of one block over all heads, 16 MiB in float32; very long documents have smaller blocks.
_BLOCK_SCORES = 2**22
_STACKED = 2**18  # scores, and elements of queries, of a stack: 1 MiB each in float32, near a CPU's cache
_STACK = 4  # documents of a stack: one number, because each new one is a new shape of products


class QueryBlock(NamedTuple):
    queries: slice  # may exceed the document's end in the last block
    keys: slice  # at least those that any of the queries sees
    place: int  # the index of the first query's own key


class Documents(Protocol):
    """Documents that are computed at once."""

    def blocks(self, num_heads: int, window: int | None, ends: Tensor | None) -> list[QueryBlock]:
        """The blocks of each document, with few distinct numbers of keys. ends: as `ends` returns them."""
        ...

    def ends(self, of_rows: Rows, num_groups: int) -> Tensor | None:
        """(1 or B, T): where the keys of each query end, counted in the keys that its document sees; None: after its
        own."""
        ...

    def queries(self, x: Tensor, num_groups: int) -> Tensor:
        """Their part (B, G, T, D) of queries (N, H, D) of K groups."""
        ...

    def seen(self, x: Tensor, blocks: Sequence[QueryBlock]) -> Tensor:
        """The keys or values that they see (B, P, D), of all (N, K, D), padded with zeros for the blocks."""
        ...

    def room(self, x: Tensor, num_groups: int) -> Tensor:
        """Room for results (B, G, T, D) of their queries. `put` then writes them to x."""
        ...

    def put(self, room: Tensor, x: Tensor) -> None:
        """Write the results in `room` to their part of x (N, H, D)."""

    def put_seen(self, gradients: Tensor, x: Tensor) -> None:
        """Write gradients (B, P, D) of what they see to x (N, K, D); add those of a prefix."""


class OneDocument:
    """A document at positions `own`, which continues the earlier positions `prefix`."""

    def __init__(self, own: slice, prefix: slice) -> None:
        self._own, self._prefix = own, prefix
        self._num_before, self._num_tokens = prefix.stop - prefix.start, own.stop - own.start

    def blocks(self, num_heads: int, window: int | None, ends: Tensor | None) -> list[QueryBlock]:
        num_tokens = self._num_before + self._num_tokens
        step = _query_step(num_tokens)
        num_keys = num_tokens if window is None else min(num_tokens, window + step)
        key_step = _key_step(num_tokens, num_keys)
        while step > 1 and num_heads * step * num_keys > _BLOCK_SCORES:
            step //= 2
        blocks = []
        for start in range(0, self._num_tokens, step):
            place = self._num_before + start
            first = 0 if window is None else max(0, place - window + 1)
            if self._num_before:  # prefixes have any length
                first -= first % key_step
            last = place + step if ends is None else max(place + step, int(ends[0, start : start + step].max()))
            last = -(-last // key_step) * key_step
            blocks.append(QueryBlock(slice(start, start + step), slice(first, last), place))
        return blocks

    def ends(self, of_rows: Rows, num_groups: int) -> Tensor | None:
        if of_rows.ends is not None:
            return of_rows.ends[None, self._own] - self._own.start + self._num_before
        if not of_rows.num_ahead:
            return None
        own = torch.arange(1, self._num_tokens + 1).add_(of_rows.num_ahead).clamp_(max=self._num_tokens)
        return self._num_before + own[None]

    def queries(self, x: Tensor, num_groups: int) -> Tensor:
        return _by_group(x[self._own], num_groups)

    def seen(self, x: Tensor, blocks: Sequence[QueryBlock]) -> Tensor:
        own = torch.cat((x[self._prefix], x[self._own])) if self._num_before else x[self._own]
        missing = blocks[-1].keys.stop - len(own)
        return (F.pad(own, (0, 0, 0, 0, 0, missing)) if missing else own.contiguous()).transpose(0, 1)

    def room(self, x: Tensor, num_groups: int) -> Tensor:
        return _by_group(x[self._own], num_groups)  # x itself

    def put(self, room: Tensor, x: Tensor) -> None:
        pass

    def put_seen(self, gradients: Tensor, x: Tensor) -> None:
        before, within, _ = gradients.transpose(0, 1).tensor_split(
            (self._num_before, self._num_before + self._num_tokens)
        )
        x[self._own] = within
        x[self._prefix] += before  # the prefix's document was put before


class Stack:
    """Documents of at most `size` tokens, which continue none. Tokens beyond a document's end are zeros."""

    def __init__(self, documents: Sequence[slice], size: int) -> None:
        self._documents, self._size = documents, size

    def blocks(self, num_heads: int, window: int | None, ends: Tensor | None) -> list[QueryBlock]:
        return [QueryBlock(slice(0, self._size), slice(0, self._size), 0)]

    def ends(self, of_rows: Rows, num_groups: int) -> Tensor | None:
        padded = []
        for own in self._documents:
            if (ends := OneDocument(own, slice(0, 0)).ends(of_rows, num_groups)) is None:
                return None
            padded.append(F.pad(ends, (0, self._size - ends.shape[1]), value=self._size))
        return torch.cat(padded).repeat_interleave(num_groups, 0)

    def queries(self, x: Tensor, num_groups: int) -> Tensor:
        room = self.room(x, num_groups).zero_()
        for own, rows in self._parts(room):
            rows.copy_(_by_group(x[own], num_groups))
        return room

    def seen(self, x: Tensor, blocks: Sequence[QueryBlock]) -> Tensor:
        return self.queries(x, x.shape[1]).squeeze(1)

    def room(self, x: Tensor, num_groups: int) -> Tensor:
        num_stacked = len(self._documents) * num_groups
        return x.new_empty(num_stacked, x.shape[1] // num_groups, self._size, x.shape[2])

    def put(self, room: Tensor, x: Tensor) -> None:
        for own, rows in self._parts(room):
            _by_group(x[own], len(rows)).copy_(rows)

    def put_seen(self, gradients: Tensor, x: Tensor) -> None:
        self.put(gradients.unsqueeze(1), x)

    def _parts(self, room: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The positions of each document, and its part (K, G, T, D) of (B, G, size, D)."""
        for own, rows in zip(self._documents, room.unflatten(0, (len(self._documents), -1)), strict=True):
            yield own, rows[:, :, : own.stop - own.start]


def documents_at_once(
    cu_seqlens: Tensor, num_tokens: int, prefixes: Tensor | None, num_heads: int, head_dim: int
) -> Iterator[Documents]:
    """Yield all documents with tokens. One that continues a prefix comes after the prefix's document."""
    short, continued = dict[int, list[slice]](), list[OneDocument]()
    for own, prefix in _documents(cu_seqlens, num_tokens, prefixes):
        length = own.stop - own.start
        if prefix.start < prefix.stop:
            continued.append(OneDocument(own, prefix))
        elif length <= _BLOCK_QUERIES:
            short.setdefault(_query_step(length), []).append(own)
        else:
            yield OneDocument(own, prefix)
    for size, documents in short.items():
        fits = _STACK * num_heads * size * max(size, head_dim) <= _STACKED
        num_stacked = len(documents) // _STACK * _STACK if fits else 0
        for start in range(0, num_stacked, _STACK):
            yield Stack(documents[start : start + _STACK], size)
        yield from (OneDocument(own, slice(0, 0)) for own in documents[num_stacked:])
    yield from continued


def _documents(cu_seqlens: Tensor, num_tokens: int, prefixes: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield the positions of each document with tokens, and of its prefix."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {num_tokens}; found {bounds[0]} to "
            f"{bounds[-1]} over {len(bounds) - 1} documents."
        )
    before = [[0, 0]] * (len(bounds) - 1) if prefixes is None else prefixes.tolist()
    is_valid = len(before) == len(bounds) - 1 and all(
        0 <= first <= last <= start or first == last for (first, last), start in zip(before, bounds, strict=False)
    )
    if not is_valid:
        raise ValueError(
            f"prefixes are {before}; expected for each of the {len(bounds) - 1} documents a start and an end before "
            "the document, or two equal numbers."
        )
    for (start, end), prefix in zip(pairwise(bounds), before, strict=True):
        if start < end:
            yield slice(start, end), slice(*prefix)


def rows_of(x: Tensor, block: QueryBlock) -> Tensor:
    """The block's part (B, R, D) of x (B, G, T, D), padded with zeros beyond the document's end."""
    rows = x[:, :, block.queries]
    missing = block.queries.stop - block.queries.start - rows.shape[2]
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).flatten(1, 2)


def put_rows(rows: Tensor, target: Tensor, block: QueryBlock) -> None:
    """Copy rows (B, R, D) to the block's part of target (B, G, T, D), without rows beyond the document's end."""
    target = target[:, :, block.queries]
    target.copy_(rows.unflatten(1, (target.shape[1], -1))[:, :, : target.shape[2]])


def num_product_shapes(longest: int) -> int:
    """The number of shapes of 16-bit products, forward and backward, for documents of up to `longest` tokens."""
    lengths = {min(2**n, longest) for n in range(_power_of_two(longest).bit_length())}
    sizes = {size for n in lengths for step in [_key_step(n, n)] for size in range(step, n + step, step)}
    # With C keys: (R, C) @ (C, D), (C, R) @ (R, D) and (R, D + 3) @ (D + 3, C).
    return 3 * (len(sizes) + len({_query_step(n) for n in lengths}))  # of single documents, and of stacks


def _by_group(query: Tensor, num_groups: int) -> Tensor:
    """Views (T, H, D) as (K, G, T, D)."""
    return query.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)


def _query_step(num_tokens: int) -> int:
    return min(_BLOCK_QUERIES, max(_SHORTEST_BLOCK, _power_of_two(num_tokens)))


def _key_step(num_tokens: int, num_keys: int) -> int:
    """The number of a block's keys is a multiple of this."""
    return max(_query_step(num_tokens), _power_of_two(num_keys) // _KEY_SIZES)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
