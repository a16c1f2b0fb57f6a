"""Length statistics of a source, and the cost of each maximum length.

Legend: N sequences, not truncated to max_length. The `sides` sequences of a row of data, such as a pair, are
consecutive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from lean_ft.data.arrangement import row_order
from lean_ft.data.batch import rounded_up
from lean_ft.data.documents import Parts, renderer_of
from lean_ft.data.mixing import MixedRows
from lean_ft.data.objective import objective_of
from lean_ft.data.packing import pack
from lean_ft.data.report import DataReport
from lean_ft.data.sources import RowSources
from lean_ft.settings import DataConfig
from lean_ft.tokenizers import Tokenizer

CANDIDATES = [256 << i for i in range(8)]  # 256 to 32,768 tokens
ANY_LENGTH = 1 << 40  # tokens; longer than any row
NUM_BINS = 16
NUM_PLACES = 4  # rows that are named
MOST_ROWS_READ = 10_000  # to name rows


@dataclass(frozen=True)
class Statistics:
    """Lengths of a source's sequences."""

    report: DataReport
    """Counts of the rows, without truncation."""
    lengths: np.ndarray  # (N,) int64: tokens
    num_targets: np.ndarray  # (N,) int64: trained tokens
    of_kinds: dict[str, np.ndarray]  # by unit of a kind: (I,) int64, tokens of each
    beside: dict[str, np.ndarray]  # by name: (N,) int64, tokens of the sequences that are computed beside these


@dataclass(frozen=True)
class AtLength:
    """Effects of a maximum length."""

    max_length: int
    rows_cut: int
    lost_tokens: int
    """Number of tokens after max_length."""
    padding: float
    """Share of padding without packing, in the first epoch's batches."""
    packed_rows: int
    """Number of packed rows of max_length times `sides` tokens."""
    packing_efficiency: float
    """Share of packed positions that hold a token."""


def gather_statistics(config: DataConfig, tokenizer: Tokenizer) -> Statistics:
    """Read and tokenize `config.source`, keeping only lengths. Raises ValueError as `prepare_batches` does."""
    uncut = config.model_copy(update={"max_length": ANY_LENGTH, "overflow": "truncate", "packing": "none"})
    render = renderer_of(uncut, tokenizer)
    parts, kinds, objective = Parts(render), render.kinds, objective_of(config)
    columns, others = list[tuple[np.ndarray, ...]](), dict[str, list[np.ndarray]]()
    for part in parts:
        of_kinds = (kind.num_tokens(part) for kind in kinds)
        columns.append((part.lengths, part.num_targets, part.per_document("row_values"), *of_kinds))
        for name, found in objective.lengths_beside(part).items():
            others.setdefault(name, []).append(found)
    lengths, num_targets, values, *tokens = (np.concatenate(arrays) for arrays in zip(*columns, strict=True))
    of_kinds = {kind.unit: found for kind, found in zip(kinds, tokens, strict=True)}
    parts.report.of_kinds = {
        unit: [len(found) // len(config.sides), int(found.sum())] for unit, found in of_kinds.items()
    }
    parts.report.remarks = objective.describe(values)
    beside = {name: np.concatenate(found) for name, found in others.items()}
    return Statistics(parts.report, lengths, num_targets, of_kinds, beside)


def most_used_rows(config: DataConfig, tokenizer: Tokenizer, mixture: MixedRows, source: int) -> str:
    """Return the places of the first rows of a source that an epoch uses most often, if it uses others less often, as
    `line 2, line 7 ...`; of a glob, with the names of its files.

    Reads the source's first `MOST_ROWS_READ` rows; the text is empty if none of them is such a row.
    """
    own = mixture.source_of == source
    counts, numbers = mixture.counts[own], mixture.numbers[own]
    if not len(counts) or (counts == counts[0]).all():
        return ""
    most = numbers[counts == counts.max()]
    wanted, places, kept = set(most[:NUM_PLACES].tolist()), list[str](), 0
    listed = RowSources.of(config).sources[source]
    render, named = renderer_of(config, tokenizer, [listed]), "" if any(sign in listed.path for sign in "*?[") else None
    for row in islice(render.sources.rows(), MOST_ROWS_READ):
        number = render([row])[1].kept
        if not wanted.isdisjoint(range(kept, kept + number)):
            file, _, line = row.place.rpartition(", ")
            places.append(line if named in (None, file) else row.place)
            named = named if named is None else file
        kept += number
        if kept > max(wanted):
            break
    return ", ".join(places) + (" ..." if places and len(most) > NUM_PLACES else "")


def at_length(lengths: np.ndarray, max_length: int, *, batch_size: int, seed: int, sides: int = 1) -> AtLength:
    """Compute the effects of `max_length` on sequences of `lengths` (N,), in batches of `batch_size` rows shuffled with
    `seed`."""
    cut = np.minimum(lengths, max_length).reshape(-1, sides)
    tokens = int(cut.sum())
    longest = cut.max(axis=1)
    rows = row_order(longest, np.random.default_rng([seed, 0]), longest_first=True)  # the order of a run's first epoch
    widths = np.minimum(rounded_up(longest), max_length)
    firsts = np.arange(0, len(rows), batch_size)
    positions = int((np.maximum.reduceat(widths[rows], firsts) * np.diff(firsts, append=len(rows))).sum()) * sides
    _, offsets = pack(cut.sum(axis=1), max_length * sides)
    packed_rows = len(offsets) - 1
    return AtLength(
        max_length,
        rows_cut=int((lengths > max_length).sum()),
        lost_tokens=int(lengths.sum()) - tokens,
        padding=1 - tokens / positions,
        packed_rows=packed_rows,
        packing_efficiency=tokens / (packed_rows * max_length * sides),
    )


def histogram(lengths: np.ndarray, num_bins: int = NUM_BINS) -> list[tuple[int, int | None, int]]:
    """Return (first length, last length, number of sequences) for about `num_bins` equal bins. The last bin may be
    open-ended (None), so that a few very long sequences do not flatten the histogram."""
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
    """Return the quantile of `lengths` for each of `shares`."""
    return [int(value) for value in np.quantile(lengths, shares, method="inverted_cdf")]


def _round_number(at_least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50 ... that is >= `at_least`."""
    return next(int(step * 10**power) for power in range(12) for step in (1, 2, 5) if step * 10**power >= at_least)
