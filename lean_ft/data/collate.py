"""Tensors of a batch: the columns of its documents, arranged in rows.

`Placed` computes once where each token is in the batch, its position in its text, and the token that it predicts. Then
each column is filled in.

Legend: B rows of a batch, T positions of a row, M texts of the batch, K tokens of the texts, N labels.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NotRequired, TypedDict, Unpack

import numpy as np
import torch

from lean_ft.data.arrangement import Arrangement, whole_documents
from lean_ft.data.batch import Batch
from lean_ft.data.columns import Columns, Document
from lean_ft.data.objective import PLAIN, Objective
from lean_ft.data.rows import IGNORED


class Placed:
    """The texts of a batch and the places of their tokens in its B * T positions.

    A text is a document or a piece of one, or with `joined` all pieces of a row. The tokens of a shared prompt are
    where the first text with this prompt has them.
    """

    def __init__(self, arrangement: Arrangement, columns: Columns, rows: np.ndarray) -> None:
        of_rows, width, self._num_boundaries = arrangement.of_batch(rows)
        self.shape, self.sides = (len(of_rows), width), arrangement.sides
        self.arrangement, self._columns = arrangement, columns
        pieces, row = np.concatenate(of_rows), np.repeat(np.arange(len(of_rows)), [len(some) for some in of_rows])
        self.documents = arrangement.documents[pieces]
        """(M,) documents in the columns."""
        continued, shared = arrangement.continued(pieces)
        lengths = arrangement.lengths[pieces]
        taken = lengths - shared
        used = _sums(taken, row, len(of_rows))
        begins = row * width + np.cumsum(taken) - taken - (np.cumsum(used) - used)[row]
        prompts = begins[continued]
        self._rest = width - used  # (B,) padding

        text = row if arrangement.joined else np.arange(len(pieces))
        self._row = row[np.append(True, text[1:] != text[:-1])]  # (M,)
        self._taken, self._shared = (_sums(numbers, text, len(self._row)) for numbers in (taken, shared))
        self._prefixes = np.stack([prompts, prompts + shared], 1)  # (M, 2) unless texts are joined

        self.text = np.repeat(text, lengths)
        """(K,) text of each token."""
        self.token = ranges(arrangement.firsts[pieces], lengths)
        """(K,) number of each token in its document."""
        self.source = np.repeat(columns.starts[self.documents], lengths) + self.token
        """(K,) index of each token in the per-token columns."""
        in_prompt = ranges(np.zeros_like(lengths), lengths) < np.repeat(shared, lengths)
        self.place = np.where(in_prompt, ranges(prompts, lengths), ranges(begins - shared, lengths))
        """(K,) position of each token."""
        self.is_own = ~in_prompt
        """(K,) bool: the token is not in the shared prompt of an earlier text."""
        self._is_last = np.append(self.text[1:] != self.text[:-1], True)
        # A token predicts the next of its text. The last token before a cut predicts the next of its document.
        self._next = np.append(self.source[1:], 0)
        is_cut = self.token + 1 < np.repeat(columns.lengths[self.documents], lengths)
        is_cut &= self._is_last & (not arrangement.joined)
        self._next[self._is_last] = np.where(is_cut, self.source + 1, 0)[self._is_last]
        self.is_target = columns.values["trained"][self._next] & (is_cut | ~self._is_last)
        """(K,) bool: the token predicts a label."""

    @property
    def num_labels(self) -> np.ndarray:
        """(M,)"""
        return _sums(self.is_target, self.text, len(self._row))

    @property
    def index(self) -> np.ndarray:
        """(N,) position that predicts each label, text after text."""
        return self.place[self.is_target]

    @cached_property
    def label(self) -> np.ndarray:
        """(N,)"""
        return self.of_labels("ids").astype(np.int64)

    def of_tokens(self, name: str) -> np.ndarray:
        """(K, ...) values of a column of tokens. Raises ValueError if the documents have no such column."""
        return self._of_all_tokens(name)[self.source]

    @property
    def label_index(self) -> np.ndarray:
        """(N,) index of each label in the per-token columns."""
        return self._next[self.is_target]

    def of_labels(self, name: str) -> np.ndarray:
        """(N, ...) values that a column of tokens has at the labels, which are the tokens that `index` predicts."""
        return self._of_all_tokens(name)[self.label_index]

    def in_rows(self, name: str) -> np.ndarray:
        """(B, T, ...) values of a column of tokens in the rows of the batch; padding has `pad_id` or 0."""
        pad, values = (self._columns.pad_id if name == "ids" else 0), self.of_tokens(name)
        return self.filled(self.place[self.is_own], values[self.is_own], pad, values.dtype)

    def filled(self, places: np.ndarray, values: Any, fill: int, dtype: Any) -> np.ndarray:
        """(B, T, ...) filled with `fill`, but for `values` at flattened positions."""
        grid = np.full((self.shape[0] * self.shape[1], *np.shape(values)[1:]), fill, dtype=dtype)
        grid[places] = values
        return grid.reshape(*self.shape, *grid.shape[1:])

    def _of_all_tokens(self, name: str) -> np.ndarray:
        if name not in self._columns.values:
            raise ValueError(
                f"no column `{name}` of tokens. `RowReader.with_columns` adds a column to the documents of rows, and "
                "`Objective.full` to those of a plan; a column that some rows lack must be added to all of them."
            )
        return self._columns.values[name]

    @property
    def last(self) -> np.ndarray:
        """(M,) position of each text's last token."""
        return self.place[self._is_last]

    @property
    def num_shared(self) -> np.ndarray:
        """(M,) tokens of each text that an earlier text has in its place."""
        return self._shared

    def bounds(self) -> dict[str, Any]:
        """Arguments of the forward pass: the position of each token in its text, the boundaries of packed texts, and
        the prompts that texts share. Padding at the end of a packed row is a text too."""
        found = {"cu_seqlens": None, "prefixes": None, "num_prefix_tokens": 0}
        if not self._num_boundaries:
            return {"positions": np.tile(np.arange(self.shape[1]), (self.shape[0], 1)), **found}
        padded = np.flatnonzero(self._rest)
        at = np.searchsorted(self._row, padded, side="right")
        lengths = np.insert(self._taken, at, self._rest[padded])
        assert len(lengths) < self._num_boundaries
        boundaries = np.full(self._num_boundaries, self.shape[0] * self.shape[1], dtype=np.int32)
        boundaries[: len(lengths) + 1] = np.append(0, np.cumsum(lengths))
        if self.arrangement.shared is not None:
            prefixes = np.zeros((self._num_boundaries - 1, 2), dtype=np.int32)
            prefixes[: len(lengths)] = np.insert(self._prefixes, at, 0, axis=0)
            found |= {"prefixes": prefixes, "num_prefix_tokens": int(self._shared.sum())}
        positions = ranges(np.insert(self._shared, at, 0), lengths).reshape(self.shape)
        return found | {"positions": positions, "cu_seqlens": boundaries}


def collate(
    arrangement: Arrangement, columns: Columns, objective: Objective, rows: np.ndarray, epoch: int = 0
) -> Batch:
    """Build the batch of `rows`, with the fields of the objective."""
    placed = Placed(arrangement, columns, rows)
    own, num_tokens = placed.is_own, placed.shape[0] * placed.shape[1]
    inputs: dict[str, Any] = placed.bounds() | {"is_token": placed.filled(placed.place[own], True, False, bool)}
    counted, replaced = dict[str, int](), {*objective.of_loss}
    for kind in columns.kinds:
        added = kind.of_batch(columns, placed)
        inputs |= added.inputs()
        counted |= added.counts
        replaced |= {*kind.replaced}
    for name in columns.per_token:
        if name not in replaced:
            values = placed.in_rows(name)
            inputs |= {"input_ids": values.astype(np.int64)} if name == "ids" else {name: values}
    is_own_label = own[placed.is_target]
    fields: dict[str, Any] = {
        "inputs": as_tensors(inputs),
        "labels": placed.filled(placed.index[is_own_label], placed.label[is_own_label], IGNORED, np.int64),
        "num_targets": len(placed.label),
        "num_tokens": num_tokens,
        "counted": counted,
    }
    fields |= objective.row_fields(columns, placed) | objective.token_fields(columns, placed, epoch)
    documents = None
    if arrangement.whole and columns.first is not None:
        documents = columns.first + placed.documents
    texts = None if not columns.kinds else [columns[int(document)] for document in placed.documents]
    return objective.batch_type(**as_tensors(fields), texts=texts, documents=documents)


def counted_in(columns: Columns, placed: Placed) -> dict[str, int]:
    """`Batch.counted`, without building the batch."""
    return {name: n for kind in columns.kinds for name, n in kind.of_batch(columns, placed).counts.items()}


class Layout(TypedDict):
    """How rows are laid out, in the terms of `Arrangement`."""

    kind: Literal["padded", "flat"]
    row_tokens: int
    shared: NotRequired[np.ndarray | None]


def batch_of(
    documents: Sequence[Document],
    objective: Objective = PLAIN,
    *,
    pad_id: int,
    sides: int = 1,
    batch_size: int | None = None,
    **layout: Unpack[Layout],
) -> Batch:
    """Build one batch of `documents`, such as sampled completions; `sides` of them form a row of data. The layout is as
    in `Arrangement`."""
    columns = Columns.join(documents, pad_id)
    pieces, firsts, lengths, offsets = whole_documents(columns.lengths, sides)
    arrangement = Arrangement(
        documents=pieces,
        firsts=firsts,
        lengths=lengths,
        offsets=offsets,
        batch_size=batch_size or len(documents) // sides,
        sides=sides,
        **layout,
    )
    return collate(arrangement, columns, objective, np.arange(len(arrangement)))


def as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in fields.items()}


def ranges(firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges of `lengths` that begin at `firsts`."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(firsts - (ends - lengths), lengths)


def _sums(numbers: np.ndarray, groups: np.ndarray, num_groups: int) -> np.ndarray:
    """(num_groups,) sum of the numbers of each group."""
    return np.bincount(groups, numbers, num_groups).astype(np.int64)
