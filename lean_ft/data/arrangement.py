"""Which pieces of documents form which rows, and which rows form which batches. Lengths alone decide it.

A batch has `batch_size` rows, or as many rows as fit a token budget. A budget groups rows of similar width, which
limits padding and makes all batches cost about the same. Each epoch redraws which rows of equal width share a batch and
the order of the batches. Batch boundaries in the sorted widths are fixed, so all epochs have the same number of
batches.

With shared prompts, the prompt of a pair is computed once: the row holds the whole chosen document, then the rejected
document from its first differing token on. `Arrangement.shared` is the number of tokens left out, `Arrangement.taken`
the number of positions that a piece occupies. With `Arrangement.groups`, the first piece of a group in a row is whole,
and the others in this row continue it, such as all queries after one instruction.

Legend: N documents, P pieces of them, R rows.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from lean_ft.data.batch import rounded_up
from lean_ft.data.packing import pack_documents
from lean_ft.settings import DataConfig


@dataclass(frozen=True)
class EpochPlan:
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

    def with_batch_at(self, place: int, batch: int) -> "EpochPlan":
        """Return a copy that swaps `batch` with the batch at `place`."""
        sequence = self.sequence.copy()
        sequence[self.sequence == batch], sequence[place] = sequence[place], batch
        return replace(self, sequence=sequence)


@dataclass(frozen=True)
class Arrangement:
    """Assignment of documents, or pieces of documents, to rows.

    A row of a padded arrangement holds all documents of one row of data. In the batch, each document gets its own row
    unless prompts are shared.
    """

    documents: np.ndarray  # (P,) document of each piece, row after row
    firsts: np.ndarray  # (P,) first token of the piece in its document
    lengths: np.ndarray  # (P,)
    offsets: np.ndarray  # (R + 1,) first piece of each row, then P
    kind: Literal["padded", "packed", "flat"]
    """padded: rows padded to the longest; packed: rows of `row_tokens`; flat: one row per batch."""
    row_tokens: int
    """Width of a packed row; maximum width of a padded row."""
    batch_size: int
    batch_tokens: int | None = None
    """Token budget per batch of padded rows; replaces `batch_size`."""
    whole: bool = True
    """Whether each piece is a whole document."""
    joined: bool = False
    """Whether a row is one text: positions continue across its documents, which attend to each other."""
    most_in_a_row: int = 1
    """Maximum number of documents in a packed row; padding counts as one."""
    sides: int = 1
    """Documents per row of data."""
    shared: np.ndarray | None = None  # (P,) tokens left out at the start of each piece
    """They equal the first tokens of the last piece before it in the row that leaves none out. With `groups`: of each
    piece of its group, up to the smaller of both numbers."""
    groups: np.ndarray | None = None  # (P,) pieces with equal numbers begin alike; of a flat arrangement
    work: tuple[np.ndarray, ...] = ()
    """(P,) work of each piece beside its tokens, for each kind of columns, such as patches to embed."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def taken(self) -> np.ndarray:
        """(P,) number of positions of each piece; with `groups`, of a piece that is not the first of its group."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    @cached_property
    def widths(self) -> np.ndarray:
        """(R,) width of each row in a batch: the longest document of a padded row without shared prompts, otherwise the
        sum of its pieces."""
        reduce = np.maximum if self.kind == "padded" and self.shared is None else np.add
        return reduce.reduceat(self.taken, self.offsets[:-1])

    def continued(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the `pieces` (M,) of a batch each one continues, as an index (M,), and how many of its tokens
        it leaves out for that, (M,)."""
        own = np.arange(len(pieces))
        if self.shared is None:
            return own, np.zeros_like(own)
        shared = self.shared[pieces]
        if self.groups is None:
            return np.maximum.accumulate(np.where(shared == 0, own, 0)), shared
        _, firsts, group = np.unique(self.groups[pieces], return_index=True, return_inverse=True)
        first = firsts[group]
        return first, np.where(first == own, 0, np.minimum(shared, shared[first]))

    def of_batch(self, rows: np.ndarray) -> tuple[list[np.ndarray], int, int]:
        """Return the pieces in each row of the batch of `rows`, the row width, and the length of cu_seqlens (0 if
        padded).

        A packed batch is filled up to `batch_size` with empty rows, so that compiled code sees one shape.
        """
        pieces = [np.arange(int(self.offsets[row]), int(self.offsets[row + 1])) for row in rows]
        if self.kind == "flat":
            pieces = [np.concatenate(pieces)]
            # +2: padding and the end.
            num_positions = (self.lengths[pieces[0]] - self.continued(pieces[0])[1]).sum()
            return pieces, int(rounded_up(num_positions)), self.batch_size * self.most_in_a_row + 2
        if self.kind == "packed":
            pieces += [np.empty(0, dtype=np.int64)] * (self.batch_size - len(pieces))
            return pieces, self.row_tokens, self.batch_size * self.most_in_a_row + 1
        if self.shared is not None:  # each row with its padding
            num_columns = min(int(rounded_up(self.widths[rows].max())), self.row_tokens)
            return pieces, num_columns, len(pieces) * (self.sides + 1) + 1
        alone = np.concatenate(pieces)[:, None]
        return list(alone), min(int(rounded_up(self.lengths[alone].max())), self.row_tokens), 0

    def plan(self, generator: np.random.Generator | None, largest_first: bool = False) -> EpochPlan:
        """Plan one epoch, in fixed order without a `generator`; `largest_first` moves a batch with the most positions
        to the start, and behind it a batch with the most of each other work."""
        plan, place = self._plan(generator, largest_first), 1
        for work in self.work if largest_first else ():
            of_rows = np.add.reduceat(work, self.offsets[:-1])
            most = int(np.add.reduceat(of_rows[plan.rows], plan.offsets[:-1]).argmax())
            if most not in plan.sequence[:place]:
                plan, place = plan.with_batch_at(place, most), place + 1
        return plan

    def _plan(self, generator: np.random.Generator | None, largest_first: bool) -> EpochPlan:
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
            plan = EpochPlan(rows, offsets, np.arange(len(offsets) - 1))
            if self.kind != "flat":
                return plan
            sizes = np.add.reduceat(lengths[rows], offsets[:-1])
        return plan.with_batch_at(0, int(sizes.argmax())) if largest_first else plan


def arrange(
    lengths: np.ndarray,
    config: DataConfig,
    batch_size: int,
    shared: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    packed: dict[str, np.ndarray] | None = None,
) -> Arrangement:
    """Arrange documents of `lengths` (N,) in rows as the settings say.

    shared (N,): tokens that each document shares with the one before it, or with the first of its group in a row;
    groups (N,): numbers of groups, only with `packing=padding_free`; packed: the result of `pack_documents`, if it is
    known.
    """
    sides = len(config.sides)
    if config.packs_rows:
        found = packed or pack_documents(lengths, config, shared)
        kind, pieces = "packed", [found[name] for name in ("documents", "firsts", "lengths", "offsets")]
    else:
        kind, pieces = "padded" if config.packing == "none" else "flat", whole_documents(lengths, sides)
    arrangement = Arrangement(
        *pieces,
        kind=kind,
        row_tokens=config.max_length * (sides if kind == "packed" or shared is not None else 1),
        batch_size=batch_size,
        batch_tokens=config.batch_tokens,
        whole=config.packing not in ("wrapped", "bfd_split"),
        joined=config.packing == "wrapped",
        most_in_a_row=2 if config.packing == "wrapped" else sides,
        sides=sides,
        shared=None if shared is None else shared[pieces[0]],
        groups=None if groups is None else groups[pieces[0]],
    )
    if kind == "packed" and not arrangement.joined:
        tokens = np.add.reduceat(arrangement.taken, arrangement.offsets[:-1])
        most = int((np.diff(arrangement.offsets) + (tokens < arrangement.row_tokens)).max())
        return replace(arrangement, most_in_a_row=most)
    return arrangement


def whole_documents(lengths: np.ndarray, sides: int) -> list[np.ndarray]:
    """The first four fields of an `Arrangement` whose rows have `sides` documents each, in order."""
    number = len(lengths)
    return [np.arange(number), np.zeros(number, dtype=np.int64), lengths, np.arange(0, number + 1, sides)]


def row_order(lengths: np.ndarray, generator: np.random.Generator | None, *, longest_first: bool) -> np.ndarray:
    """Return row indices for `lengths` (R,), shuffled if there is a `generator`; `longest_first` swaps the longest row
    with the first."""
    rows = np.arange(len(lengths)) if generator is None else generator.permutation(len(lengths))
    if longest_first:
        place = int(lengths[rows].argmax())
        rows[[0, place]] = rows[[place, 0]]
    return rows


def plan_by_tokens(widths: np.ndarray, batch_tokens: int, generator: np.random.Generator | None) -> EpochPlan:
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
    return EpochPlan(rows, np.array(offsets), sequence)
