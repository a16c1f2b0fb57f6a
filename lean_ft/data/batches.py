"""Batches of tensors built from documents: shuffled for training unless `data.shuffle=false`, in order for evaluation.

A batch has `batch_size` rows, or as many rows as fit a token budget. A budget groups rows of similar width, which
limits padding and makes all batches cost about the same. Each epoch redraws which rows of equal width share a batch and
the order of the batches. Batch boundaries in the sorted widths are fixed, so all epochs have the same number of
batches.

With shared prompts, the prompt of a pair is computed once: the row holds the whole chosen document, then the rejected
document from its first differing token on. `Layout.shared` is the number of tokens left out, `Layout.taken` the number
of positions a piece occupies.

Legend: S tokens of all documents, P pieces that rows consist of, R rows in total.
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


@dataclass(frozen=True)
class Plan:
    """Assignment of rows to the K batches of one epoch."""

    rows: np.ndarray  # (R,) batch after batch
    offsets: np.ndarray  # (K + 1,) into `rows`
    sequence: np.ndarray  # (K,) order of the batches

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, i: int) -> np.ndarray:
        """The rows of the i-th batch."""
        batch = self.sequence[i]
        return self.rows[self.offsets[batch] : self.offsets[batch + 1]]

    def with_first(self, batch: int) -> "Plan":
        """Return a copy that swaps `batch` with the first batch."""
        sequence = self.sequence.copy()
        sequence[self.sequence == batch], sequence[0] = sequence[0], batch
        return replace(self, sequence=sequence)


@dataclass(frozen=True)
class Layout:
    """Assignment of documents, or pieces of documents, to rows.

    A row of a padded layout holds all documents of one row of data. In the batch, each document gets its own row unless
    prompts are shared.
    """

    tokens: np.ndarray  # (S,) int32: tokens of all documents, in memory or memory-mapped
    trained: np.ndarray  # (S,) bool
    starts: np.ndarray  # (P,) start of each piece in `tokens`; a piece is a document or, after packing, a part of one
    lengths: np.ndarray  # (P,)
    order: np.ndarray  # (P,) indices of pieces, row after row
    offsets: np.ndarray  # (R + 1,) into `order`
    kind: Literal["padded", "packed", "flat"]
    """padded: rows padded to the longest; packed: rows of `row_tokens`; flat: one row per batch."""
    row_tokens: int
    """Width of a packed row; maximum width of a padded row."""
    batch_size: int
    pad_id: int
    batch_tokens: int | None = None
    """Token budget per batch of padded rows; replaces `batch_size`."""
    continues: np.ndarray | None = None  # (P,) bool: the piece's document continues after it in `tokens`
    joined: bool = False
    """Whether a row is one text: positions continue across its documents, which attend to each other."""
    most_in_a_row: int = 1
    """Maximum number of documents in a packed row; padding counts as one."""
    sides: int = 1
    """Documents per row of data."""
    objective: Objective = PLAIN
    """Objective that adds its fields to the batches."""
    first_row: int = 0
    """Number of the first row of data. Held-out rows are numbered after the training rows."""
    num_rows_in_all: int = 0
    """Number of rows of data, training and held-out."""
    values: np.ndarray | None = None  # (P, V) float32: values of each document's row (labels, margins); None: zeros
    shared: np.ndarray | None = None  # (P,) tokens left out at the start of each piece
    """They equal the first tokens of the last whole piece before it in the row."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of_texts(
        cls, texts: Sequence[tuple[Sequence[int], Sequence[int]]], *, sides: int = 1, **settings: Any
    ) -> "Layout":
        """Return a layout of one batch. `texts` are pairs of a prompt and a trained answer; `sides` texts form a
        row."""
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
        """Whether rows may hold parts of documents, or several documents joined into one text."""
        return self.joined or self.continues is not None

    @property
    def taken(self) -> np.ndarray:
        """(P,) number of positions of each piece."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    @property
    def widths(self) -> np.ndarray:
        """(R,) width of each row in a batch: the longest document of a padded row without shared prompts, otherwise the
        sum of its pieces."""
        reduce = np.maximum if self.kind == "padded" and self.shared is None else np.add
        return reduce.reduceat(self.taken[self.order], self.offsets[:-1])

    def plan(self, generator: np.random.Generator | None, largest_first: bool = False) -> Plan:
        """Plan one epoch, in fixed order without a `generator`; `largest_first` moves a batch with the most positions
        to the start."""
        lengths = self.widths
        if self.batch_tokens is not None:
            documents = np.diff(self.offsets) if self.shared is None else 1
            widths = np.minimum(rounded_up(lengths), self.row_tokens) * documents
            plan = plan_by_tokens(widths, self.batch_tokens, generator)
            sizes = np.maximum.reduceat((lengths * documents)[plan.rows], plan.offsets[:-1]) * np.diff(plan.offsets)
        else:
            # Move only the longest row, which makes its batch the largest. A training step then has the same rows for
            # any batch_size.
            rows = row_order(lengths, generator, longest_first=largest_first and self.kind == "padded")
            offsets = np.append(np.arange(0, len(rows), self.batch_size), len(rows))
            plan = Plan(rows, offsets, np.arange(len(offsets) - 1))
            if self.kind != "flat":
                return plan
            sizes = np.add.reduceat(lengths[rows], offsets[:-1])
        return plan.with_first(int(sizes.argmax())) if largest_first else plan

    def batch(self, rows: np.ndarray, epoch: int = 0) -> Batch:
        """Build the batch of `rows`. A packed batch is filled up to `batch_size` with empty rows, so that compiled code
        sees one shape."""
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
                if not is_plain:  # positions of the text's tokens, which predict its labels
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
        """Return the pieces of each row of the batch, the row width, and the length of cu_seqlens (0 if padded)."""
        contents = [self.order[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        if self.kind == "flat":
            contents = [np.concatenate(contents)]
            # +2: padding and the end.
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
        """Number of labels of each text in a row of `pieces`."""
        counts = []
        for piece in pieces:
            start, stop = self.starts[piece], self.starts[piece] + self.lengths[piece]
            counts.append(int(self.trained[start + 1 : stop].sum()))
            if self.joined and len(counts) > 1:  # the token before the piece predicts its first token
                counts[-1] += int(self.trained[start])
            elif self.continues is not None and self.continues[piece]:
                counts[-1] += int(self.trained[stop])
        return [sum(counts)] if self.joined else counts

    def row_numbers(self, documents: np.ndarray) -> np.ndarray:
        """(P,) numbers of the rows of data that `documents` come from; `documents` holds all documents of each row."""
        return self.first_row + documents[:: self.sides] // self.sides

    def row_values(self, documents: np.ndarray) -> np.ndarray:
        """(P, V) float32: values (labels, margins) of the rows of data that `documents` come from."""
        rows = documents[:: self.sides]
        return np.zeros((len(rows), 1), dtype=np.float32) if self.values is None else self.values[rows]

    def content(self) -> str:
        """Hash of the documents, independent of the rows that hold them."""
        digest = hashlib.blake2b(self.lengths.tobytes(), digest_size=16)
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            span = slice(start, start + length)
            digest.update(np.ascontiguousarray(self.tokens[span]).data)
            digest.update(np.ascontiguousarray(self.trained[span]).data)
        return digest.hexdigest()

    def _texts(self, pieces: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield ids, shifted labels and the number of shared prompt tokens of each piece, or of all pieces joined."""
        spans = [slice(self.starts[piece], self.starts[piece] + self.lengths[piece]) for piece in pieces]
        some = [(self.tokens[span], self.trained[span]) for span in spans]
        if self.joined and some:
            some = [(np.concatenate([ids for ids, _ in some]), np.concatenate([trained for _, trained in some]))]
        for i, (ids, trained) in enumerate(some):
            targets = np.full(len(ids), IGNORED, dtype=np.int64)
            targets[:-1] = np.where(trained[1:], ids[1:], IGNORED)
            if self.continues is not None and self.continues[pieces[i]] and self.trained[spans[i].stop]:
                targets[-1] = self.tokens[spans[i].stop]
            yield ids, targets, 0 if self.shared is None else int(self.shared[pieces[i]])


def row_order(lengths: np.ndarray, generator: np.random.Generator | None, *, longest_first: bool) -> np.ndarray:
    """Return row indices for `lengths` (R,), shuffled if there is a `generator`; `longest_first` swaps the longest row
    with the first."""
    rows = np.arange(len(lengths)) if generator is None else generator.permutation(len(lengths))
    if longest_first:
        place = int(lengths[rows].argmax())
        rows[[0, place]] = rows[[place, 0]]
    return rows


def plan_by_tokens(widths: np.ndarray, batch_tokens: int, generator: np.random.Generator | None) -> Plan:
    """Fill each batch with as many rows as fit: number of rows times the largest of their `widths` <= `batch_tokens`.

    widths: (R,), each at most `batch_tokens`. Without a `generator`, the widest rows come first.
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
    """Return the largest batch, filled with zeros: each row has `max_length` tokens, and each token is a label."""
    return objective_of(config).longest(config, batch_size, share_prompts)


def as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in fields.items()}


class UnbuiltBatch:
    """A batch built on first access to one of its tensors. A rank builds only its own batches; the counts of other
    ranks' batches need no building."""

    def __init__(self, layout: Layout, rows: np.ndarray, epoch: int) -> None:
        self._layout, self._rows, self._epoch = layout, rows, epoch

    @cached_property
    def built(self) -> Batch:
        return self._layout.batch(self._rows, self._epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's protocol lookups
            raise AttributeError(name)
        return self._row_fields[name] if name in self._row_fields else getattr(self.built, name)

    @cached_property
    def num_tokens(self) -> int:
        contents, num_columns, _ = self._layout.contents(self._rows)
        return len(contents) * num_columns

    @cached_property
    def _texts(self) -> tuple[np.ndarray, np.ndarray]:
        """The batch's documents and the number of labels of each."""
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
    """Endless training batches. The order of an epoch depends on the seed and the epoch number.

    The first batch of a run is the largest, so a run without enough memory fails at once. With `shuffle=False`, every
    epoch keeps the rows in order.
    """

    def __init__(self, layout: Layout, *, seed: int, report: DataReport, fingerprint: str, shuffle: bool = True):
        self.layout = layout
        """Assignment of documents to rows."""
        self._seed, self._shuffle = seed, shuffle
        self.report, self.unit = report, report.unit
        self.fingerprint = fingerprint
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
        return int(rounded_up(self.layout.lengths[self.layout.order].max()))

    @property
    def longest_answer(self) -> int | None:
        """Length of the longest answer in tokens; None without shared prompts."""
        shared = self.layout.shared
        if shared is None:
            return None
        prompts = shared[1::2].repeat(2)
        return int((self.layout.lengths - prompts)[self.layout.order].max())

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

    def _unbuilt(self, plan: Plan, i: int, epoch: int) -> Batch:
        return cast(Batch, UnbuiltBatch(self.layout, plan[i], epoch))

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
            "batch_size": self.layout.batch_size,
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
                raise ValueError(
                    f"cannot resume: the {name} changed since the checkpoint (from {state[key]} to {here[key]}), so the "
                    "position in the data is lost. Change it back, or start a new run from the checkpoint's weights."
                )
        self.epoch, self._num_taken = state["epoch"], state["num_taken"]
        self._plan = self._draw(self.epoch)

    def _with_own_batch_size(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert `state` to this batch size; return it unchanged if the same rows do not fill whole batches."""
        layout, theirs, num_taken = self.layout, state["batch_size"], state["num_taken"]
        own = layout.batch_size
        # Flat batches and batches by token budget are not consecutive slices of one row order.
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
    """Held-out batches in fixed order, for repeated iteration. Each is built when it is needed."""

    def __init__(self, layout: Layout, report: DataReport):
        self.layout = layout
        self._plan = layout.plan(None)
        self.report = report

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> Batch:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.layout.batch(self._plan[i])
