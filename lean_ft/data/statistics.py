"""How long the rows of a source are, and what each maximum length would cost: told before anything is trained.

Legend: N sequences, none of them cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lean_ft.data.batches import PADDED_TO_MULTIPLE_OF
from lean_ft.data.documents import Parts
from lean_ft.data.grouping import plan_by_count
from lean_ft.data.packing import pack
from lean_ft.data.report import DataReport
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer

CANDIDATES = [256 << i for i in range(8)]  # 256 to 32,768 tokens
ANY_LENGTH = 1 << 40  # tokens; no row is as long
NUM_BINS = 16


@dataclass(frozen=True)
class Statistics:
    """The lengths of a source's sequences."""

    report: DataReport
    """What became of the rows, before any was cut."""
    lengths: np.ndarray  # (N,) int64 tokens
    num_targets: np.ndarray  # (N,) int64 of them trained


@dataclass(frozen=True)
class AtLength:
    """What a maximum length does to sequences."""

    max_length: int
    rows_cut: int
    lost_tokens: int
    """Behind max_length."""
    padding: float
    """Share of positions that padding takes without packing, in the first epoch's batches."""
    packed_rows: int
    """Rows of max_length after best-fit-decreasing packing."""
    packing_efficiency: float
    """Share of their positions that hold a token."""


def gather_statistics(config: SFTDataConfig, tokenizer: Tokenizer) -> Statistics:
    """Reads and tokenises all of `config.source`, keeping lengths alone. Raises ValueError as preparation does."""
    uncut = config.model_copy(update={"max_length": ANY_LENGTH, "overflow": "truncate", "packing": "none"})
    parts = Parts(uncut, tokenizer, config.source)
    counted = [(part.lengths.copy(), part.num_targets.copy()) for part in parts]
    parts.check_any_left()
    lengths, num_targets = (np.concatenate(arrays) for arrays in zip(*counted, strict=True))
    return Statistics(parts.report, lengths, num_targets)


def at_length(lengths: np.ndarray, max_length: int, *, batch_size: int, seed: int) -> AtLength:
    """What `max_length` does to sequences of `lengths` (N,), in batches of `batch_size` shuffled by `seed`."""
    cut = np.minimum(lengths, max_length)
    tokens = int(cut.sum())
    widths = np.minimum(-(-cut // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF, max_length)
    plan = plan_by_count(len(widths), batch_size, np.random.default_rng([seed, 0]))
    plan = plan.with_first_row(int(cut[plan.rows].argmax()))  # as a run's first epoch begins
    positions = int((np.maximum.reduceat(widths[plan.rows], plan.offsets[:-1]) * np.diff(plan.offsets)).sum())
    _, offsets = pack(cut, max_length)
    packed_rows = len(offsets) - 1
    return AtLength(
        max_length,
        rows_cut=int((lengths > max_length).sum()),
        lost_tokens=int(lengths.sum()) - tokens,
        padding=1 - tokens / positions,
        packed_rows=packed_rows,
        packing_efficiency=tokens / (packed_rows * max_length),
    )


def histogram(lengths: np.ndarray, num_bins: int = NUM_BINS) -> list[tuple[int, int | None, int]]:
    """(first length, last length, sequences) of about `num_bins` equal bins; the last may be open, with None for its
    end, so that a few very long sequences do not flatten the others."""
    width = _round_number(np.quantile(lengths, 0.99) / num_bins)
    longest = int(lengths.max())
    num_full = min(num_bins, longest // width + 1)
    counts = np.bincount(np.minimum(lengths // width, num_full))
    counts = np.pad(counts, (0, num_full + 1 - len(counts)))
    bins: list[tuple[int, int | None, int]] = [
        (i * width, (i + 1) * width - 1, int(counts[i])) for i in range(num_full)
    ]
    return bins if counts[num_full] == 0 else [*bins, (num_full * width, None, int(counts[num_full]))]


def quantiles(lengths: np.ndarray, shares: Sequence[float]) -> list[int]:
    """The length that this share of the sequences does not exceed, for each of `shares`."""
    return [int(value) for value in np.quantile(lengths, shares, method="inverted_cdf")]


def _round_number(at_least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 ... that is not less."""
    return next(int(step * 10**power) for power in range(12) for step in (1, 2, 5) if step * 10**power >= at_least)
