"""Rows of documents to batches of tensors: shuffled for training, in order for evaluation.

Labels are already shifted: labels[b, t] is what position t has to predict, so a loss compares position by
position, and no document's first token is ever a label. Padding carries no label because of where it is; its
id plays no part.

Legend: B rows of a batch, T positions of a row, N documents of a batch, each stretch of padding being one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lean_ft.data.documents import DataReport, Documents

IGNORED = -100  # the label of positions that are not trained
PADDED_TO_MULTIPLE_OF = 8


@dataclass(frozen=True)
class Batch:
    """One forward pass of input."""

    input_ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, already shifted; -100 where nothing is trained
    positions: Tensor  # (B, T) int64, from 0 in every document
    cu_seqlens: Tensor | None
    """(N + 1,) int32 when packed: where documents begin in the B * T flattened positions, with B * T at the
    end. None: every row is one document, padded on the right."""
    num_targets: int
    """Labels that are not -100."""
    num_tokens: int
    """B * T: all positions that are computed."""
    is_token: Tensor | None = None
    """(B, T) bool: False on padding. None: nothing is padding."""

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on `device`; copies to a GPU from pinned memory, without waiting for them."""
        device = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return replace(
            self,
            input_ids=move(self.input_ids),
            labels=move(self.labels),
            positions=move(self.positions),
            cu_seqlens=None if self.cu_seqlens is None else move(self.cu_seqlens),
            is_token=None if self.is_token is None else move(self.is_token),
        )


@dataclass(frozen=True)
class Rows:
    """The rows that batches are made of: one document each, or packed ones of `row_tokens` positions."""

    documents: Documents
    order: np.ndarray  # (documents,) their indices, row after row
    offsets: np.ndarray  # (rows + 1,) into `order`
    packed: bool
    max_length: int
    batch_size: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_batches(self) -> int:
        return -(-len(self) // self.batch_size)

    def batch(self, rows: np.ndarray) -> Batch:
        """The batch of the rows numbered `rows`, at most `batch_size` of them. Packed ones are filled up with
        empty rows, so that compiled code sees one shape."""
        contents = [self.order[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        if self.packed:
            contents += [np.empty(0, dtype=np.int64)] * (self.batch_size - len(contents))
            num_columns = self.max_length
        else:
            longest = int(self.documents.lengths[np.concatenate(contents)].max())
            num_columns = min(-(-longest // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF, self.max_length)
        shape = (len(contents), num_columns)
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.tile(np.arange(num_columns), (len(contents), 1))
        is_token = np.zeros(shape, dtype=bool)
        boundaries = [0]
        for row, documents in enumerate(contents):
            column = 0
            for document in documents:
                ids, trained = self.documents[document]
                end = column + len(ids)
                input_ids[row, column:end] = ids
                labels[row, column : end - 1] = np.where(trained[1:], ids[1:], IGNORED)
                if self.packed:
                    positions[row, column:end] = np.arange(len(ids))
                    boundaries.append(row * num_columns + end)
                column = end
            is_token[row, :column] = True
            if self.packed and column < num_columns:
                positions[row, column:] = np.arange(num_columns - column)
                boundaries.append((row + 1) * num_columns)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.tensor(boundaries, dtype=torch.int32) if self.packed else None,
            num_targets=int((labels != IGNORED).sum()),
            num_tokens=input_ids.size,
            is_token=torch.from_numpy(is_token),
        )


class Batches:
    """Training batches without end, shuffled anew each epoch by the seed and the epoch alone."""

    def __init__(self, rows: Rows, *, seed: int, report: DataReport, fingerprint: str):
        self._rows = rows
        self._seed = seed
        self.report = report
        self.fingerprint = fingerprint
        self.epoch = 0
        """The epoch (from 0) that the last batch came from."""
        self._num_taken = 0  # batches of this epoch
        self._shuffled = self._shuffle(0)

    @property
    def batches_per_epoch(self) -> int:
        return self._rows.num_batches

    def take(self, n: int) -> list[Batch]:
        """The next `n` batches, or those that the epoch still has; after its end, the first of the next."""
        if n < 1:
            raise ValueError(f"take({n}): expected a number of batches from 1.")
        if self._num_taken == self.batches_per_epoch:
            self.epoch += 1
            self._num_taken = 0
            self._shuffled = self._shuffle(self.epoch)
        first = self._num_taken
        self._num_taken = min(first + n, self.batches_per_epoch)
        size = self._rows.batch_size
        return [self._rows.batch(self._shuffled[i * size : (i + 1) * size]) for i in range(first, self._num_taken)]

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, as plain JSON values."""
        return {
            "epoch": self.epoch,
            "num_taken": self._num_taken,
            "seed": self._seed,
            "batch_size": self._rows.batch_size,
            "batches_per_epoch": self.batches_per_epoch,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place `state`; the next `take` gives what it would have given there.

        Raises ValueError where the data, the seed or the batch size differ, since no such place exists then.
        """
        here = self.state_dict()
        for key, name in (
            ("seed", "seed"),
            ("batch_size", "batch_size"),
            ("fingerprint", "data (source files, tokenizer or data settings)"),
            ("batches_per_epoch", "number of batches an epoch"),
        ):
            if state[key] != here[key]:
                raise ValueError(
                    f"cannot resume: the {name} changed since the checkpoint ({state[key]} then, {here[key]} "
                    "now), so the place in the data is gone. Restore it, or begin a new run from the "
                    "checkpoint's weights."
                )
        self.epoch, self._num_taken = state["epoch"], state["num_taken"]
        self._shuffled = self._shuffle(self.epoch)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))


class EvalBatches:
    """The held-out rows in fixed order, as often as they are iterated."""

    def __init__(self, rows: Rows, report: DataReport):
        self._rows = rows
        self.report = report

    def __len__(self) -> int:
        return self._rows.num_batches

    def __iter__(self) -> Iterator[Batch]:
        size = self._rows.batch_size
        for first in range(0, len(self._rows), size):
            yield self._rows.batch(np.arange(first, min(first + size, len(self._rows))))
