"""Rows of documents to batches of tensors: shuffled for training, in order for evaluation.

Labels are already shifted: labels[b, t] is what position t has to predict, so a loss compares position by
position, and no document's first token is ever a label (but in `wrapped` rows, which are one text). Padding carries
no label because of where it is; its id plays no part.

Legend: B rows of a batch, T positions of a row, S tokens of all documents, P pieces that rows are made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lean_ft.data.grouping import Plan, plan_by_count, plan_by_tokens
from lean_ft.data.report import DataReport
from lean_ft.settings import SFTDataConfig

IGNORED = -100  # the label of positions that are not trained
PADDED_TO_MULTIPLE_OF = 8


@dataclass(frozen=True)
class Batch:
    """One forward pass of input."""

    input_ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, already shifted; -100 where nothing is trained
    positions: Tensor  # (B, T) int64, from 0 in every document
    cu_seqlens: Tensor | None
    """When packed, int32: where documents begin in the B * T flattened positions, then B * T, once or more often. It is
    as long for every batch of a run, so that compiled code sees one shape; the repeats are documents of no tokens.
    None: every row is one document, padded on the right."""
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
    """The rows that batches are made of, and how these are laid out."""

    tokens: np.ndarray  # (S,) int32: the documents', in memory or in a file
    trained: np.ndarray  # (S,) bool
    starts: np.ndarray  # (P,) the pieces in `tokens`: whole documents, or what packing cut of them
    lengths: np.ndarray  # (P,)
    order: np.ndarray  # (P,) indices of pieces, row after row
    offsets: np.ndarray  # (rows + 1,) into `order`
    layout: Literal["padded", "packed", "flat"]
    """Rows of one document each, padded to the longest; rows of max_length; or a batch of documents as one row."""
    max_length: int
    batch_size: int
    pad_id: int
    batch_tokens: int | None = None
    """A budget a batch of padded rows, in place of `batch_size`."""
    goes_on: np.ndarray | None = None  # (P,) bool: a piece with more of its document behind it in `tokens`
    joined: bool = False
    """What stands in one row is one text: positions go on, and its documents see each other."""
    most_in_a_row: int = 1
    """Documents in a packed row, a stretch of padding counted as one."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def plan(self, generator: np.random.Generator | None, largest_first: bool = False) -> Plan:
        """Which rows come in which batch; in fixed order where there is no `generator`."""
        if self.batch_tokens is None:
            plan = plan_by_count(len(self), self.batch_size, generator)
        else:
            widths = np.minimum(_rounded_up(self.lengths[self.order]), self.max_length)
            plan = plan_by_tokens(widths, self.batch_tokens, generator)
        return self._with_largest_first(plan) if largest_first else plan

    def _with_largest_first(self, plan: Plan) -> Plan:
        """The plan with a batch of the most positions at its beginning."""
        lengths, starts = self.lengths[self.order][plan.rows], plan.offsets[:-1]
        if self.layout == "packed":
            return plan  # all have as many
        if self.layout == "flat":
            return plan.with_first(int(np.add.reduceat(lengths, starts).argmax()))
        if (
            self.batch_tokens is None
        ):  # the longest row makes it so, whatever the number of rows: for any batch_size the
            return plan.with_first_row(int(lengths.argmax()))  # same rows make a step
        return plan.with_first(int((np.maximum.reduceat(lengths, starts) * np.diff(plan.offsets)).argmax()))

    def batch(self, rows: np.ndarray) -> Batch:
        """The batch of the rows numbered `rows`. Packed ones are filled up with empty rows to `batch_size`, so that
        compiled code sees one shape."""
        contents = [self.order[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        packed = self.layout != "padded"
        if self.layout == "flat":
            contents = [np.concatenate(contents)]
            num_columns = int(_rounded_up(self.lengths[contents[0]].sum()))
            num_boundaries = self.batch_size + 2  # of the documents, one stretch of padding, and the end
        elif self.layout == "packed":
            contents += [np.empty(0, dtype=np.int64)] * (self.batch_size - len(contents))
            num_columns = self.max_length
            num_boundaries = self.batch_size * self.most_in_a_row + 1
        else:
            longest = self.lengths[np.concatenate(contents)].max()
            num_columns = min(int(_rounded_up(longest)), self.max_length)
            num_boundaries = 0
        shape = (len(contents), num_columns)
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.tile(np.arange(num_columns), (len(contents), 1))
        is_token = np.zeros(shape, dtype=bool)
        boundaries = [0]
        for row, pieces in enumerate(contents):
            column = 0
            for ids, targets in self._texts(pieces):
                end = column + len(ids)
                input_ids[row, column:end] = ids
                labels[row, column:end] = targets
                if packed:
                    positions[row, column:end] = np.arange(len(ids))
                    boundaries.append(row * num_columns + end)
                column = end
            is_token[row, :column] = True
            if packed and column < num_columns:
                positions[row, column:] = np.arange(num_columns - column)
                boundaries.append((row + 1) * num_columns)
        cu_seqlens = None
        if packed:
            assert len(boundaries) <= num_boundaries
            cu_seqlens = torch.full((num_boundaries,), input_ids.size, dtype=torch.int32)
            cu_seqlens[: len(boundaries)] = torch.tensor(boundaries, dtype=torch.int32)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            positions=torch.from_numpy(positions),
            cu_seqlens=cu_seqlens,
            num_targets=int((labels != IGNORED).sum()),
            num_tokens=input_ids.size,
            is_token=torch.from_numpy(is_token),
        )

    def _texts(self, pieces: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and shifted labels of what a row holds: of each of its pieces, or of all of them joined."""
        spans = [slice(self.starts[piece], self.starts[piece] + self.lengths[piece]) for piece in pieces]
        some = [(self.tokens[span], self.trained[span]) for span in spans]
        if self.joined and some:
            some = [(np.concatenate([ids for ids, _ in some]), np.concatenate([trained for _, trained in some]))]
        for i, (ids, trained) in enumerate(some):
            targets = np.full(len(ids), IGNORED, dtype=np.int64)
            targets[:-1] = np.where(trained[1:], ids[1:], IGNORED)
            if self.goes_on is not None and self.goes_on[pieces[i]] and self.trained[spans[i].stop]:
                targets[-1] = self.tokens[spans[i].stop]
            yield ids, targets


def _rounded_up(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF


class Batches:
    """Training batches without end, shuffled anew each epoch by the seed and the epoch alone.

    The first one of all is the epoch's largest: a run that has too little memory ends there, and not hours later.
    """

    def __init__(self, rows: Rows, *, seed: int, report: DataReport, fingerprint: str):
        self._rows = rows
        self._seed = seed
        self.report = report
        self.fingerprint = fingerprint
        self.epoch = 0
        """The epoch (from 0) that the last batch came from."""
        self._num_taken = 0  # batches of this epoch
        self._plan = self._draw(0)

    @property
    def batches_per_epoch(self) -> int:
        return len(self._plan)

    def take(self, n: int) -> list[Batch]:
        """The next `n` batches, or those that the epoch still has; after its end, the first of the next."""
        if n < 1:
            raise ValueError(f"take({n}): expected a number of batches from 1.")
        if self._num_taken == self.batches_per_epoch:
            self.epoch += 1
            self._num_taken = 0
            self._plan = self._draw(self.epoch)
        first = self._num_taken
        self._num_taken = min(first + n, self.batches_per_epoch)
        return [self._rows.batch(self._plan[i]) for i in range(first, self._num_taken)]

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
        self._plan = self._draw(self.epoch)

    def _draw(self, epoch: int) -> Plan:
        return self._rows.plan(np.random.default_rng([self._seed, epoch]), largest_first=epoch == 0)


def longest_batch(config: SFTDataConfig, batch_size: int) -> Batch:
    """The largest batch that the settings allow, zeros all of it: every row is `max_length` tokens and each a target."""
    columns = config.max_length
    rows = batch_size if config.batch_tokens is None else config.batch_tokens // columns
    return Batch(
        input_ids=torch.zeros(rows, columns, dtype=torch.int64),
        labels=torch.zeros(rows, columns, dtype=torch.int64),
        positions=torch.zeros(rows, columns, dtype=torch.int64),
        cu_seqlens=None if config.packing == "none" else torch.zeros(rows + 1, dtype=torch.int32),
        num_targets=rows * columns,
        num_tokens=rows * columns,
    )


class EvalBatches:
    """The held-out rows in fixed order, as often as they are iterated."""

    def __init__(self, rows: Rows, report: DataReport):
        self._rows = rows
        self._plan = rows.plan(None)
        self.report = report

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return (self._rows.batch(self._plan[i]) for i in range(len(self)))
