"""Documents to batches of tensors: shuffled for training unless `data.shuffle=false`, in order for evaluation.

A batch has `batch_size` rows, or as many as a budget of tokens allows. A budget groups rows of one width, so little is
padded and every batch costs about the same; which rows of one width come together, and in which order the batches come,
is drawn anew in each epoch, but where batches begin in the sorted widths is not, so all epochs have the same number.

Where the two documents of a pair share their prompt, it is computed once: the chosen one stands whole, and the rejected one
behind it in the same row begins where they part. `Layout.shared` says how many tokens that leaves out, `Layout.taken` how many
positions a piece takes.

Legend: S tokens of all documents, P pieces that rows are made of, R rows in all.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch

from lean_ft.data.batch import Batch, rounded_up
from lean_ft.data.objective import PLAIN, Objective, Placed, objective_of
from lean_ft.data.report import DataReport
from lean_ft.data.rows import IGNORED
from lean_ft.settings import DataConfig

KEPT_BYTES = 32 * 2**20  # of held-out batches that stay built between evaluations
BYTES_A_POSITION = 25  # of a Batch: ids, labels and positions of 8, and whether it is a token


@dataclass(frozen=True)
class Plan:
    """One epoch: which rows each of its K batches holds."""

    rows: np.ndarray  # (R,) batch after batch
    offsets: np.ndarray  # (K + 1,) into `rows`
    sequence: np.ndarray  # (K,) the order in which the batches come

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, i: int) -> np.ndarray:
        """The rows of the i-th batch."""
        batch = self.sequence[i]
        return self.rows[self.offsets[batch] : self.offsets[batch + 1]]

    def with_first(self, batch: int) -> "Plan":
        """The same with `batch` and the first to come exchanged."""
        sequence = self.sequence.copy()
        sequence[self.sequence == batch], sequence[0] = sequence[0], batch
        return replace(self, sequence=sequence)


@dataclass(frozen=True)
class Layout:
    """Which documents, or pieces of them, stand in which row of a batch.

    Rows that are padded hold one document, but what one row of data became stays together: such a row is a row of the
    batch for each of its documents.
    """

    tokens: np.ndarray  # (S,) int32: the documents', in memory or in a file
    trained: np.ndarray  # (S,) bool
    starts: np.ndarray  # (P,) the pieces in `tokens`: whole documents, or what packing cut of them
    lengths: np.ndarray  # (P,)
    order: np.ndarray  # (P,) indices of pieces, row after row
    offsets: np.ndarray  # (R + 1,) into `order`
    kind: Literal["padded", "packed", "flat"]
    """Rows padded to the longest; rows of `row_tokens`; or a batch of documents as one row."""
    row_tokens: int
    """Positions of a packed row, and the most of a padded one."""
    batch_size: int
    pad_id: int
    batch_tokens: int | None = None
    """A budget a batch of padded rows, in place of `batch_size`."""
    goes_on: np.ndarray | None = None  # (P,) bool: a piece with more of its document behind it in `tokens`
    joined: bool = False
    """What stands in one row is one text: positions go on, and its documents see each other."""
    most_in_a_row: int = 1
    """Documents in a packed row, a stretch of padding counted as one."""
    sides: int = 1
    """Documents that a row of data became."""
    objective: Objective = PLAIN
    """It adds its fields to the batches."""
    first_row: int = 0
    """The number of the first row of data: held-out rows are numbered after the training rows."""
    num_rows_in_all: int = 0
    """Number of rows of data, trained and held out."""
    values: np.ndarray | None = None  # (P, V) float32: what the row of a document says beside its text; None: zeros
    shared: np.ndarray | None = None  # (P,) tokens at a piece's start that are left out
    """They are those of the last whole piece before it in the row."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of_texts(
        cls, texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, sides: int = 1, **settings: Any
    ) -> "Layout":
        """The layout of prompts and their answers, which are trained, as one batch: a row for each or, of several `sides`, for
        so many of them."""
        lengths = np.array([len(prompt) + len(answer) for prompt, answer in texts])
        return cls(
            np.array([token for prompt, answer in texts for token in (*prompt, *answer)], dtype=np.int32),
            np.concatenate([[False] * len(prompt) + [True] * len(answer) for prompt, answer in texts]),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            order=np.arange(len(texts)),
            offsets=np.arange(0, len(texts) + 1, sides),
            batch_size=len(texts) // sides,
            sides=sides,
            **settings,
        )

    @property
    def cuts(self) -> bool:
        """Whether what stands in a row may be a part of a document, or several in one text."""
        return self.joined or self.goes_on is not None

    @property
    def taken(self) -> np.ndarray:
        """(P,) positions that each piece takes."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    @property
    def widths(self) -> np.ndarray:
        """(R,) positions of each row's widest row of a batch: of padded ones a document has its own, unless it shares."""
        reduce = np.maximum if self.kind == "padded" and self.shared is None else np.add
        return reduce.reduceat(self.taken[self.order], self.offsets[:-1])

    def plan(self, generator: np.random.Generator | None, largest_first: bool = False) -> Plan:
        """Which rows come in which batch, in fixed order where there is no `generator`; `largest_first` puts one of the
        most positions at the beginning."""
        lengths = self.widths
        if self.batch_tokens is not None:
            documents = np.diff(self.offsets) if self.shared is None else 1
            widths = np.minimum(rounded_up(lengths), self.row_tokens) * documents
            plan = plan_by_tokens(widths, self.batch_tokens, generator)
            sizes = np.maximum.reduceat((lengths * documents)[plan.rows], plan.offsets[:-1]) * np.diff(plan.offsets)
        else:
            # The longest row makes its batch the largest, whatever the number of rows: for any batch_size the same rows
            # make a step.
            rows = row_order(lengths, generator, longest_first=largest_first and self.kind == "padded")
            offsets = np.append(np.arange(0, len(rows), self.batch_size), len(rows))
            plan = Plan(rows, offsets, np.arange(len(offsets) - 1))
            if self.kind != "flat":
                return plan
            sizes = np.add.reduceat(lengths[rows], offsets[:-1])
        return plan.with_first(int(sizes.argmax())) if largest_first else plan

    def batch(self, rows: np.ndarray, epoch: int = 0) -> Batch:
        """The batch of the rows numbered `rows`. Packed ones are filled up with empty rows to `batch_size`, so that
        compiled code sees one shape."""
        contents, num_columns, num_boundaries = self.contents(rows)
        packed, is_plain = num_boundaries > 0, self.objective.batch_type is Batch
        shape = (len(contents), num_columns)
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.tile(np.arange(num_columns), (len(contents), 1))
        is_token = np.zeros(shape, dtype=bool)
        boundaries, prefixes, num_labels, last = [0], [(0, 0)] * num_boundaries, list[int](), list[int]()
        index, label = list[np.ndarray](), list[np.ndarray]()
        for row, pieces in enumerate(contents):
            column = before = 0  # before: the start of the last whole document
            for ids, targets, shared in self._texts(pieces):
                before = before if shared else column
                end = column + len(ids) - shared
                input_ids[row, column:end] = ids[shared:]
                labels[row, column:end] = targets[shared:]
                is_target, first = targets != IGNORED, row * num_columns
                num_labels.append(int(is_target.sum()))
                if not is_plain:  # where the text's tokens stand, and so what predicts its labels
                    places = np.concatenate([np.arange(before, before + shared), np.arange(column, end)]) + first
                    index.append(places[is_target])
                    label.append(targets[is_target])
                    last.append(first + end - 1)
                if packed:
                    positions[row, column:end] = np.arange(shared, len(ids))
                    prefixes[len(boundaries) - 1] = (first + before, first + before + shared)
                    boundaries.append(first + end)
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
        sharing: dict[str, Any] = {}
        if self.shared is not None:
            bounds = torch.tensor(prefixes[:-1], dtype=torch.int32)
            sharing = {"prefixes": bounds, "num_prefix_tokens": int(bounds.diff(dim=1).sum())}
        batch = Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            positions=torch.from_numpy(positions),
            cu_seqlens=cu_seqlens,
            num_targets=sum(num_labels),
            num_tokens=input_ids.size,
            is_token=torch.from_numpy(is_token),
            documents=None if self.cuts else self.first_row * self.sides + np.concatenate(list(contents)),
            **sharing,
        )
        if is_plain:
            return batch
        documents, counts = np.concatenate(list(contents)), np.array(num_labels, dtype=np.int64)
        placed = Placed(
            documents,
            counts,
            index=np.concatenate(index),
            label=np.concatenate(label),
            last=np.array(last, dtype=np.int64),
        )
        fields = self.objective.row_fields(self, documents, counts)
        fields |= self.objective.token_fields(self, placed, epoch)
        return self.objective.batch_type(**vars(batch), **as_tensors(fields))

    def contents(self, rows: np.ndarray) -> tuple[list[np.ndarray], int, int]:
        """What the batch of `rows` is: of each of its rows the pieces, how wide they are, and how long cu_seqlens, or 0."""
        contents = [self.order[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        if self.kind == "flat":
            contents = [np.concatenate(contents)]
            # One stretch of padding, and the end.
            return contents, int(rounded_up(self.taken[contents[0]].sum())), self.batch_size * self.most_in_a_row + 2
        if self.kind == "packed":
            contents += [np.empty(0, dtype=np.int64)] * (self.batch_size - len(contents))
            return contents, self.row_tokens, self.batch_size * self.most_in_a_row + 1
        if self.shared is not None:  # each row with its padding
            num_columns = min(int(rounded_up(self.widths[rows].max())), self.row_tokens)
            return contents, num_columns, len(contents) * (self.sides + 1) + 1
        alone = np.concatenate(contents)[:, None]
        return list(alone), min(int(rounded_up(self.lengths[alone].max())), self.row_tokens), 0

    def num_targets(self, pieces: np.ndarray) -> list[int]:
        """The labels of each text that a row of these pieces has."""
        counts = []
        for piece in pieces:
            start, stop = self.starts[piece], self.starts[piece] + self.lengths[piece]
            counts.append(int(self.trained[start + 1 : stop].sum()))
            if self.joined and len(counts) > 1:  # the first token is a label of what stands before it
                counts[-1] += int(self.trained[start])
            elif self.goes_on is not None and self.goes_on[piece]:
                counts[-1] += int(self.trained[stop])
        return [sum(counts)] if self.joined else counts

    def row_numbers(self, documents: np.ndarray) -> np.ndarray:
        """(P,): the numbers of the rows of data that these documents, all of each row, became."""
        return self.first_row + documents[:: self.sides] // self.sides

    def row_values(self, documents: np.ndarray) -> np.ndarray:
        """(P, V) float32: what those rows say beside their text."""
        rows = documents[:: self.sides]
        return np.zeros((len(rows), 1), dtype=np.float32) if self.values is None else self.values[rows]

    def content(self) -> str:
        """A hash of the documents, in their own order and whatever rows they stand in."""
        digest = hashlib.blake2b(self.lengths.tobytes(), digest_size=16)
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            span = slice(start, start + length)
            digest.update(np.ascontiguousarray(self.tokens[span]).data)
            digest.update(np.ascontiguousarray(self.trained[span]).data)
        return digest.hexdigest()

    def _texts(self, pieces: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Ids and shifted labels of what a row holds: of each of its pieces, or of all of them joined; and how many of the
        ids are those of the piece before, and stand there."""
        spans = [slice(self.starts[piece], self.starts[piece] + self.lengths[piece]) for piece in pieces]
        some = [(self.tokens[span], self.trained[span]) for span in spans]
        if self.joined and some:
            some = [(np.concatenate([ids for ids, _ in some]), np.concatenate([trained for _, trained in some]))]
        for i, (ids, trained) in enumerate(some):
            targets = np.full(len(ids), IGNORED, dtype=np.int64)
            targets[:-1] = np.where(trained[1:], ids[1:], IGNORED)
            if self.goes_on is not None and self.goes_on[pieces[i]] and self.trained[spans[i].stop]:
                targets[-1] = self.tokens[spans[i].stop]
            yield ids, targets, 0 if self.shared is None else int(self.shared[pieces[i]])


def row_order(lengths: np.ndarray, generator: np.random.Generator | None, *, longest_first: bool) -> np.ndarray:
    """The rows of `lengths` (R,) as they are or shuffled, with the longest exchanged with the first if it is to be."""
    rows = np.arange(len(lengths)) if generator is None else generator.permutation(len(lengths))
    if longest_first:
        place = int(lengths[rows].argmax())
        rows[[0, place]] = rows[[place, 0]]
    return rows


def plan_by_tokens(widths: np.ndarray, batch_tokens: int, generator: np.random.Generator | None) -> Plan:
    """Batches of as many rows as fit: rows times the widest of `widths` (R,) is at most `batch_tokens`.

    The widest come first where there is no `generator`. No row may be wider than `batch_tokens`.
    """
    assert widths.max() <= batch_tokens
    rows = row_order(widths, generator, longest_first=False)
    rows = rows[np.argsort(-widths[rows], kind="stable")]
    offsets = [0]
    while offsets[-1] < len(rows):
        offsets.append(offsets[-1] + batch_tokens // int(widths[rows[offsets[-1]]]))
    offsets[-1] = len(rows)
    num_batches = len(offsets) - 1
    sequence = np.arange(num_batches) if generator is None else generator.permutation(num_batches)
    return Plan(rows, np.array(offsets), sequence)


def longest_batch(config: DataConfig, batch_size: int, share_prompts: bool = False) -> Batch:
    """The largest batch, without contents: each row has `max_length` tokens, and each token is a label."""
    return objective_of(config).longest(config, batch_size, share_prompts)


def as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in fields.items()}


class UnbuiltBatch:
    """A batch that is built when one of its tensors is needed. Each of many ranks builds its own batches, and knows the row
    counts of the others."""

    def __init__(self, layout: Layout, rows: np.ndarray, epoch: int) -> None:
        self._layout, self._rows, self._epoch = layout, rows, epoch

    @cached_property
    def built(self) -> Batch:
        return self._layout.batch(self._rows, self._epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of any object
            raise AttributeError(name)
        return self._row_fields[name] if name in self._row_fields else getattr(self.built, name)

    @cached_property
    def num_tokens(self) -> int:
        contents, num_columns, _ = self._layout.contents(self._rows)
        return len(contents) * num_columns

    @cached_property
    def _texts(self) -> tuple[np.ndarray, np.ndarray]:
        """Which documents, and how many labels each has."""
        contents, _, _ = self._layout.contents(self._rows)
        num_targets = [number for pieces in contents for number in self._layout.num_targets(pieces)]
        return np.concatenate(contents), np.array(num_targets, dtype=np.int64)

    @property
    def num_targets(self) -> int:
        return int(self._texts[1].sum())

    @cached_property
    def _row_fields(self) -> dict[str, Any]:
        return as_tensors(self._layout.objective.row_fields(self._layout, *self._texts))


class Batches:
    """Endless training batches. Each epoch draws an order from the seed and the epoch's number.

    The first batch of a run is the epoch's largest, so that a run with too little memory stops there and not hours later.
    With `shuffle=False` every epoch has the rows in order.
    """

    def __init__(self, layout: Layout, *, seed: int, report: DataReport, fingerprint: str, shuffle: bool = True):
        self.layout = layout
        """Which documents stand in which rows."""
        self._seed, self._shuffle = seed, shuffle
        self.report = report
        self.fingerprint = fingerprint
        self.epoch = 0
        """The epoch (from 0) that the last batch came from."""
        self._num_taken = 0  # batches of this epoch
        self._plan = self._draw(0)

    @property
    def batches_per_epoch(self) -> int:
        return len(self._plan)

    @property
    def num_rows(self) -> int:
        """Of all batches of an epoch; a pair, or one of whatever a row of data became, counts once."""
        return len(self.layout)

    @property
    def longest(self) -> int:
        """Positions that the longest sequence takes in a batch that is padded."""
        return int(rounded_up(self.layout.lengths[self.layout.order].max()))

    @property
    def longest_answer(self) -> int | None:
        """Tokens of the longest answer, where prompts are shared; None where they are not."""
        shared = self.layout.shared
        if shared is None:
            return None
        prompts = shared[1::2].repeat(2)
        return int((self.layout.lengths - prompts)[self.layout.order].max())

    def take(self, n: int) -> list[Batch]:
        """The next `n` batches, or those that the epoch still has; after its end, the first of the next. Each is built when
        its tensors are asked for."""
        if n < 1:
            raise ValueError(f"take({n}): expected a number of batches from 1.")
        if self._num_taken == self.batches_per_epoch:
            self.epoch += 1
            self._num_taken = 0
            self._plan = self._draw(self.epoch)
        first = self._num_taken
        self._num_taken = min(first + n, self.batches_per_epoch)
        return [self._unbuilt(self._plan, i, self.epoch) for i in range(first, self._num_taken)]

    def _unbuilt(self, plan: Plan, i: int, epoch: int) -> Batch:
        return cast(Batch, UnbuiltBatch(self.layout, plan[i], epoch))

    def first(self, n: int) -> Iterator[Batch]:
        """The `n` batches that a run begins with; takes none."""
        for epoch in range(-(-n // self.batches_per_epoch)):
            plan = self._draw(epoch)
            for i in range(min(n - epoch * self.batches_per_epoch, len(plan))):
                yield self._unbuilt(plan, i, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, as plain JSON values."""
        return {
            "epoch": self.epoch,
            "num_taken": self._num_taken,
            "seed": self._seed,
            "batch_size": self.layout.batch_size,
            "batches_per_epoch": self.batches_per_epoch,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place `state`; the next `take` gives what it would have given there.

        With another batch size that is the place after the same rows. Raises ValueError where the data or the seed
        differ, or those rows are no whole batches, since no such place exists then.
        """
        counts = [state[name] for name in ("epoch", "num_taken", "batch_size", "batches_per_epoch")]
        if not all(type(number) is int and number >= 0 for number in counts) or state["batch_size"] == 0:
            raise ValueError(f"cannot resume: the place in the data is damaged ({counts}).")
        here, state = self.state_dict(), self._with_own_batch_size(state)
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

    def _with_own_batch_size(self, state: dict[str, Any]) -> dict[str, Any]:
        """The place after the same rows in batches of the own size, if there is one; `state` as it is otherwise."""
        layout, theirs, num_taken = self.layout, state["batch_size"], state["num_taken"]
        own = layout.batch_size
        # Batches by tokens, and those that are one row, are not cut from one order of rows.
        if theirs == own or layout.kind == "flat" or layout.batch_tokens is not None:
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

    def _draw(self, epoch: int) -> Plan:
        if not self._shuffle:
            return self.layout.plan(None)
        return self.layout.plan(np.random.default_rng([self._seed, epoch]), largest_first=epoch == 0)


class EvalBatches:
    """The held-out rows in fixed order, as often as they are iterated.

    Batches are built when they are first asked for. The first 32 MiB of them (1.3 million positions) then stay built;
    what is behind these is built anew each time.
    """

    def __init__(self, layout: Layout, report: DataReport):
        self.layout = layout
        self._plan = layout.plan(None)
        self._built: dict[int, Batch] = {}
        self._bytes_left = KEPT_BYTES
        self.report = report

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> Batch:
        if i in self._built:
            return self._built[i]
        if not 0 <= i < len(self):
            raise IndexError(i)
        batch = self.layout.batch(self._plan[i])
        num_bytes = batch.num_tokens * BYTES_A_POSITION
        if num_bytes <= self._bytes_left:
            self._built[i] = batch
            self._bytes_left -= num_bytes
        return batch
