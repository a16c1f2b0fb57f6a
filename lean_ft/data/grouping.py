"""Which rows make a batch, and in which order batches come: `batch_size` rows at a time, or by a budget of tokens.

A budget groups rows of one width, so little is padded and every batch costs about the same. Which rows of one width
come together, and in which order the batches come, is drawn anew in each epoch; where batches begin in the sorted
widths is not, so all epochs have the same number of batches.

Legend: R rows, K batches.
"""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Plan:
    """One epoch: which rows each batch holds."""

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

    def with_first_row(self, place: int) -> "Plan":
        """The same with the row at `place` of `rows` and the first one exchanged."""
        rows = self.rows.copy()
        rows[[0, place]] = rows[[place, 0]]
        return replace(self, rows=rows)


def plan_by_count(num_rows: int, batch_size: int, generator: np.random.Generator | None) -> Plan:
    """Batches of `batch_size` rows, the last of what is left; in order where there is no `generator`."""
    rows = np.arange(num_rows) if generator is None else generator.permutation(num_rows)
    offsets = np.append(np.arange(0, num_rows, batch_size), num_rows)
    return Plan(rows, offsets, np.arange(len(offsets) - 1))


def plan_by_tokens(widths: np.ndarray, batch_tokens: int, generator: np.random.Generator | None) -> Plan:
    """Batches of as many rows as fit: rows times the widest of `widths` (R,) is at most `batch_tokens`.

    The widest come first where there is no `generator`. No row may be wider than `batch_tokens`.
    """
    assert widths.max() <= batch_tokens
    rows = np.arange(len(widths)) if generator is None else generator.permutation(len(widths))
    rows = rows[np.argsort(-widths[rows], kind="stable")]
    offsets = [0]
    while offsets[-1] < len(rows):
        offsets.append(offsets[-1] + batch_tokens // int(widths[rows[offsets[-1]]]))
    offsets[-1] = len(rows)
    num_batches = len(offsets) - 1
    sequence = np.arange(num_batches) if generator is None else generator.permutation(num_batches)
    return Plan(rows, np.array(offsets), sequence)
