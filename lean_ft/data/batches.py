"""Batches of documents: shuffled for training unless `data.shuffle=false`, in order for evaluation."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from lean_ft.data.arrangement import Arrangement, EpochPlan
from lean_ft.data.batch import Batch, rounded_up
from lean_ft.data.by_source import with_sources
from lean_ft.data.collate import Placed, as_tensors, collate, counted_in
from lean_ft.data.columns import Columns
from lean_ft.data.objective import Objective
from lean_ft.data.report import DataReport
from lean_ft.system.contents import UNRECORDED, Contents


@dataclass(frozen=True)
class ArrangedDocuments:
    """Documents arranged in rows, and the objective of their batches."""

    arrangement: Arrangement
    columns: Columns
    objective: Objective

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.arrangement)

    def batch(self, rows: np.ndarray, epoch: int = 0) -> Batch:
        return collate(self.arrangement, self.columns, self.objective, rows, epoch)

    @cached_property
    def build(self) -> Callable[[EpochPlan, int, int], Batch]:
        """Return batch i of a plan and an epoch; with kinds of columns, which may read files, build the next one
        ahead."""
        if self.columns.kinds:
            return BuiltAhead(self.batch)
        return lambda plan, i, epoch: self.batch(plan[i], epoch)


class BuiltAhead:
    """Builds the batch that this rank needs next in a thread, so that files are read and decoded during a step."""

    def __init__(self, build: Callable[[np.ndarray, int], Batch]) -> None:
        self._build, self._thread = build, ThreadPoolExecutor(1, "batch")
        self._next: tuple[int, int, Future[Batch]] | None = None
        self._last, self._stride = 0, 1

    def __call__(self, plan: EpochPlan, i: int, epoch: int) -> Batch:
        """Return batch `i` of an epoch, and begin the next one."""
        ahead, self._next = self._next, None
        if i > self._last:  # ranks take turns
            self._stride = i - self._last
        self._last, following = i, i + self._stride
        if following < len(plan):
            self._next = epoch, following, self._thread.submit(self._build, plan[following], epoch)
        return ahead[2].result() if ahead and ahead[:2] == (epoch, i) else self._build(plan[i], epoch)


class UnbuiltBatch:
    """A batch built on first access to one of its tensors. A rank builds only its own batches; the counts of other
    ranks' batches need no building."""

    def __init__(self, layout: ArrangedDocuments, plan: EpochPlan, i: int, epoch: int) -> None:
        self._layout, self._plan, self._i, self._epoch = layout, plan, i, epoch

    @cached_property
    def built(self) -> Batch:
        return self._layout.build(self._plan, self._i, self._epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's protocol lookups
            raise AttributeError(name)
        return self._counted[name] if name in self._counted else getattr(self.built, name)

    @cached_property
    def _counted(self) -> dict[str, Any]:
        """Fields that need no tensors."""
        placed = Placed(self._layout.arrangement, self._layout.columns, self._plan[self._i])
        counts: dict[str, Any] = {"num_targets": len(placed.index), "num_tokens": placed.shape[0] * placed.shape[1]}
        counts["counted"] = counted_in(self._layout.columns, placed)
        return counts | as_tensors(self._layout.objective.row_fields(self._layout.columns, placed))


class Batches:
    """Endless training batches. The order of an epoch depends on the seed and the epoch number.

    The first batch of a run is the largest, and the next one has the most other work, such as patches to embed, unless
    the first has. So a run without enough memory fails at once. With `shuffle=False`, every epoch keeps the rows
    in order.
    """

    def __init__(
        self,
        layout: ArrangedDocuments,
        *,
        seed: int,
        report: DataReport,
        fingerprint: str,
        contents: Contents = UNRECORDED,
        shuffle: bool = True,
    ):
        self.layout = layout
        self._seed, self._shuffle = seed, shuffle
        self.report, self.unit = report, report.unit
        self.fingerprint, self.contents = fingerprint, contents
        self.epoch = 0
        """Epoch of the last batch, from 0."""
        self._num_taken = 0  # batches taken in this epoch
        self._plan = self._draw(0)

    @property
    def batches_per_epoch(self) -> int:
        return len(self._plan)

    @property
    def num_rows(self) -> int:
        """Number of rows per epoch. A row of data counts once, even if it has several sequences, such as a pair."""
        return len(self.layout)

    @property
    def longest(self) -> int:
        """Padded length of the longest sequence."""
        return int(rounded_up(self.layout.arrangement.lengths.max()))

    @property
    def longest_answer(self) -> int | None:
        """Length of the longest answer in tokens; None without shared prompts."""
        arrangement = self.layout.arrangement
        return (
            None
            if arrangement.shared is None
            else int((arrangement.lengths - arrangement.shared[1::2].repeat(2)).max())
        )

    def take(self, n: int) -> list[Batch]:
        """Return the next `n` batches, fewer at the end of an epoch. Each is built on first access to its tensors."""
        if n < 1:
            raise ValueError(f"take({n}): expected 1 or more batches.")
        if self._num_taken == self.batches_per_epoch:
            self.epoch += 1
            self._num_taken = 0
            self._plan = self._draw(self.epoch)
        first = self._num_taken
        self._num_taken = min(first + n, self.batches_per_epoch)
        return [self._unbuilt(self._plan, i, self.epoch) for i in range(first, self._num_taken)]

    def _unbuilt(self, plan: EpochPlan, i: int, epoch: int) -> Batch:
        return cast(Batch, UnbuiltBatch(self.layout, plan, i, epoch))

    def first(self, n: int) -> Iterator[Batch]:
        """Yield the first `n` batches of a run without advancing."""
        for epoch in range(-(-n // self.batches_per_epoch)):
            plan = self._draw(epoch)
            for i in range(min(n - epoch * self.batches_per_epoch, len(plan))):
                yield self._unbuilt(plan, i, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, as JSON values."""
        return {
            "epoch": self.epoch,
            "num_taken": self._num_taken,
            "seed": self._seed,
            "batch_size": self.layout.arrangement.batch_size,
            "batches_per_epoch": self.batches_per_epoch,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position from `state_dict`. With another batch size, this is the position after the same rows.

        Raises ValueError if the data or the seed differ, or if these rows do not fill whole batches.
        """
        counts = [state[name] for name in ("epoch", "num_taken", "batch_size", "batches_per_epoch")]
        if not all(type(number) is int and number >= 0 for number in counts) or state["batch_size"] == 0:
            raise ValueError(f"cannot resume: the checkpoint's position in the data is invalid ({counts}).")
        here, state = self.state_dict(), self._with_own_batch_size(state)
        for key, name in (
            ("seed", "seed"),
            ("batch_size", "batch_size"),
            ("fingerprint", "data (source files, tokenizer or data settings)"),
            ("batches_per_epoch", "number of batches per epoch"),
        ):
            if state[key] != here[key]:
                values = "" if key == "fingerprint" else f" (from {state[key]} to {here[key]})"
                raise ValueError(
                    f"cannot resume: the {name} changed since the checkpoint{values}, so the position in the data is "
                    "lost. Change it back, or start a new run from the checkpoint's weights."
                )
        self.epoch, self._num_taken = state["epoch"], state["num_taken"]
        self._plan = self._draw(self.epoch)

    def _with_own_batch_size(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert `state` to this batch size; return it unchanged if the same rows do not fill whole batches."""
        layout, theirs, num_taken = self.layout.arrangement, state["batch_size"], state["num_taken"]
        own = layout.batch_size
        # Flat batches and batches by token budget are not consecutive slices of one row order.
        if theirs == own or layout.kind == "flat" or layout.batch_tokens is not None:
            return state
        if layout.work and state["epoch"] == 0:  # its second batch is the one with the most work
            return state
        if -(-len(layout) // theirs) != state["batches_per_epoch"]:
            return state
        if num_taken == state["batches_per_epoch"]:
            num_taken = self.batches_per_epoch
        elif num_taken * theirs % own == 0:
            num_taken = num_taken * theirs // own
        else:
            return state
        return state | {"batch_size": own, "num_taken": num_taken, "batches_per_epoch": self.batches_per_epoch}

    def _draw(self, epoch: int) -> EpochPlan:
        if not self._shuffle:
            return self.layout.arrangement.plan(None)
        return self.layout.arrangement.plan(np.random.default_rng([self._seed, epoch]), largest_first=epoch == 0)


class EvalBatches:
    """Held-out batches in fixed order, for repeated iteration. Each is built when it is needed."""

    def __init__(self, layout: ArrangedDocuments, report: DataReport):
        self.layout = layout
        self._plan = layout.arrangement.plan(None)
        self.report = report

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> Batch:
        if not 0 <= i < len(self):
            raise IndexError(i)
        batch = self.layout.build(self._plan, i, 0)
        if self.layout.columns.sources is None:
            return batch
        return with_sources(batch, self.layout, Placed(self.layout.arrangement, self.layout.columns, self._plan[i]))
