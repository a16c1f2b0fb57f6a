"""How often an epoch uses each row: weights of rows, or shares of tokens, of the entries of `data.source`.

With shares, an epoch has as many tokens as all training rows together, so its length does not depend on the shares. The
largest-remainder method divides these tokens among the sources. A source is used in whole passes and a random part,
whose last rows are chosen so that its tokens come as near to its number as possible.

Legend: N kept rows of all sources, source after source, M rows of an epoch, S sources.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from lean_ft.data.sources import RowSources, shown_names
from lean_ft.settings import DataConfig, shares_of
from lean_ft.system.units import counted

MOST_ROWS = 2**31  # rows of an epoch; more are a slip
WINDOW = 64  # last rows of a random part, among which those are chosen that come nearest
MOST_BITS = 2**28  # of sums that the search keeps, 32 MiB; where more are possible, it counts tokens in larger units


@dataclass(frozen=True)
class SourceUse:
    """What an epoch uses of a source."""

    name: str
    num_rows: int
    """Rows that can be trained on."""
    times: dict[int, int]
    """How many of these rows are used so many times, by the number of times."""
    tokens: int
    """Of an epoch."""
    trained: int
    """Tokens of an epoch that have a label."""
    counts_trained: bool
    """Whether the fields below count trained tokens, instead of all tokens."""
    reached: float
    """Part of the epoch's tokens."""
    epochs: float
    """How often the source's tokens are used."""
    target: int | None = None
    """Tokens that the share asks for; None without shares."""

    @property
    def rows(self) -> int:
        """Rows of an epoch, repeated rows as often as they are used."""
        return sum(times * number for times, number in self.times.items())

    @property
    def unit(self) -> str:
        return "trained tokens" if self.counts_trained else "tokens"

    @property
    def off(self) -> int | None:
        """Tokens above the target."""
        return None if self.target is None else (self.trained if self.counts_trained else self.tokens) - self.target

    def __str__(self) -> str:
        off = self.off
        of_share = "" if off is None else f" (share: {self.target:,} tokens, {f'off by {off:+,}' if off else 'exact'})"
        trained = f", {self.trained:,} trained" if self.trained else ""
        amounts = f"{counted(self.rows, 'rows')}, {counted(self.tokens, 'tokens')}{trained}"
        return (
            f"{self.name}: {self.reached:.2%} of the {self.unit}{of_share}; {amounts}; {self.epochs:.2f} epochs: "
            f"{describe_times(self.times)}"
        )


def describe_times(times: Mapping[int, int]) -> str:
    """`20 rows left out, 30 rows once, 5 rows twice, 1 row 3 times`"""
    words = {0: "left out", 1: "once", 2: "twice"}
    return ", ".join(f"{counted(number, 'rows')} {words.get(n, f'{n:,} times')}" for n, number in sorted(times.items()))


@dataclass(frozen=True)
class MixedRows:
    """The rows of an epoch, and the rows that they are chosen from."""

    mix: "SourceMix"
    source_of: np.ndarray  # (N,)
    tokens: np.ndarray  # (N,)
    trained: np.ndarray  # (N,) tokens with a label
    numbers: np.ndarray  # (N,) number of each row among the kept rows of its source
    rows: np.ndarray  # (M,) sorted, repeated rows in a row

    @cached_property
    def counts(self) -> np.ndarray:
        """(N,) how often each row is used."""
        return np.bincount(self.rows, minlength=len(self.source_of))

    def uses(self, trained: np.ndarray | None = None) -> list[SourceUse]:
        """Return what an epoch uses of each source; empty for a single source that is used once.

        trained: (M,) tokens with a label in the batches, if joined documents make them differ.
        """
        mix, given = self.mix, self.trained[self.rows] if trained is None else trained
        if len(mix.names) == 1 and mix.is_plain:
            return []
        source_of = self.source_of[self.rows]
        sums = [
            np.bincount(source, numbers, len(mix.names)).astype(np.int64)
            for source, numbers in (
                (source_of, self.tokens[self.rows]),
                (source_of, given),
                (self.source_of, self.tokens),
                (self.source_of, self.trained),
            )
        ]
        counts_trained = mix.share_of == "trained" and bool(sums[3].any())
        used, all_of_it = (sums[1], sums[3]) if counts_trained else (sums[0], sums[2])
        targets = mix.targets(int(all_of_it.sum()))
        times = [np.unique(self.counts[self.source_of == i], return_counts=True) for i in range(len(mix.names))]
        return [
            SourceUse(
                name,
                num_rows=int(times[i][1].sum()),
                times=dict(zip(*(values.tolist() for values in times[i]), strict=True)),
                tokens=int(sums[0][i]),
                trained=int(sums[1][i]),
                counts_trained=counts_trained,
                reached=int(used[i]) / max(1, int(used.sum())),
                epochs=int(used[i]) / max(1, int(all_of_it[i])),
                target=None if targets is None else targets[i],
            )
            for i, name in enumerate(mix.names)
        ]


@dataclass(frozen=True)
class SourceMix:
    """The weights or shares of the sources of some settings."""

    names: list[str]
    """Of the sources, for messages."""
    weights: list[float]
    shares: list[Fraction] | None
    share_of: str
    """Which tokens shares count: `trained` or `all`."""
    seed: int = field(repr=False)

    @classmethod
    def of(cls, config: DataConfig, seed: int) -> "SourceMix":
        sources = RowSources.of(config).sources
        weights = [source.weight for source in sources]
        return cls(shown_names(sources), weights, shares_of(sources), config.share_of, seed)

    @property
    def is_plain(self) -> bool:
        """Whether each row is used once."""
        return self.shares is None and all(weight == 1 for weight in self.weights)

    @property
    def draws(self) -> bool:
        """Whether the seed decides which rows are used."""
        return self.shares is not None or any(weight % 1 for weight in self.weights)

    @property
    def identity(self) -> list[Any]:
        """JSON values of what decides the rows beside the seed. Without shares, the weights alone."""
        return [self.weights, *([] if self.shares is None else [[str(one) for one in self.shares], self.share_of])]

    def targets(self, total: int) -> list[int] | None:
        """Return the tokens that each source is to have of `total`; None without shares."""
        return None if self.shares is None else divided(total, self.shares)

    def mixture(
        self, kept_by_source: Sequence[int], tokens: np.ndarray, trained: np.ndarray, rows: np.ndarray | None = None
    ) -> MixedRows:
        """Choose the rows of an epoch.

        kept_by_source: number of kept rows of each source; tokens, trained: (N,) tokens of each kept row, and those
        with a label; rows: the kept rows to choose from, without held-out rows. Raises ValueError if no row is left, or
        none of a source that has a share.
        """
        source_of = np.repeat(np.arange(len(kept_by_source)), kept_by_source)
        numbers = np.arange(len(source_of)) - np.repeat(np.cumsum([0, *kept_by_source[:-1]]), kept_by_source)
        if rows is not None:
            source_of, numbers, tokens, trained = source_of[rows], numbers[rows], tokens[rows], trained[rows]
        counts = np.ones(len(source_of), dtype=np.int64)
        if self.shares is not None:
            counts = self._by_share(source_of, trained if self.share_of == "trained" else tokens)
        elif not self.is_plain:
            counts = weigh(source_of, self.weights, self.seed)
            if not counts.any():
                raise ValueError(f"the weights in data.source ({self.weights}) leave no row to train on. Raise them.")
        if (number := int(counts.sum())) > MOST_ROWS:
            raise ValueError(f"data.source asks for {number:,} rows per epoch; at most {MOST_ROWS:,} are possible.")
        return MixedRows(self, source_of, tokens, trained, numbers, np.repeat(np.arange(len(counts)), counts))

    def _by_share(self, source_of: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return how often each row is used, (N,); sizes: (N,) the tokens that shares count."""
        targets, counts = self.targets(int(sizes.sum())), np.zeros(len(source_of), dtype=np.int64)
        assert targets is not None
        for source, (name, target) in enumerate(zip(self.names, targets, strict=True)):
            rows = np.flatnonzero(source_of == source)
            if not (total := int(sizes[rows].sum())):
                what = "trained token" if len(rows) else "row to train on"
                hint = ", or set data.share_of=all" if len(rows) else ""
                raise ValueError(f"data.source: {name} has a share, and no {what}. Remove it{hint}.")
            whole, rest = divmod(target, total)
            generator = np.random.default_rng([self.seed, source])
            counts[rows] = whole
            counts[rows[nearest_rows(sizes[rows], rest, generator)]] += 1
            if not counts[rows].any():
                raise ValueError(
                    f"data.source: the share of {name} is {counted(target, 'tokens')} per epoch, and its shortest row "
                    f"has {int(sizes[rows].min()):,}, so none would be used. Raise its share, or remove it."
                )
        return counts


def divided(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide `total` in proportion to the shares (sum 1) into integers that add up to it, by the largest-remainder
    method: each gets its quota rounded down, and those with the largest remainders one more."""
    quotas = [total * share for share in shares]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - quotas[i])  # stable: the first of equals
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def nearest_rows(sizes: np.ndarray, target: int, generator: np.random.Generator) -> np.ndarray:
    """Return a random choice of rows whose sizes add up to nearly `target`.

    sizes: (N,) tokens of each row; 0 <= target <= their sum. All rows but `WINDOW` are the first of a random order. Of
    the window's rows around the place where the sum reaches the target, those are chosen whose sum is the nearest that
    any choice of them reaches. Up to `WINDOW` rows of up to 65,536 tokens, no other choice of rows is nearer.
    """
    order = generator.permutation(len(sizes))
    ends = np.cumsum(sizes[order])
    place = int(np.searchsorted(ends, target, side="right"))
    first = max(0, min(place - WINDOW // 2, len(order) - WINDOW))
    window, before = order[first : first + WINDOW], int(ends[first - 1]) if first else 0
    unit = -(-len(window) * int(sizes[window].sum()) // MOST_BITS) or 1  # 1 for rows of up to 65,536 tokens
    scaled = (sizes[window] + unit // 2) // unit
    chosen = _nearest_sum(scaled.tolist(), (target - before + unit // 2) // unit, place - first)
    return np.concatenate([order[:first], window[chosen]])


def _nearest_sum(sizes: list[int], target: int, begun: int) -> np.ndarray:
    """Return a mask of the sizes whose sum is nearest to `target`, with the first `begun` of them where that makes no
    difference."""
    reached = [1]  # bit s of entry i: the first i sizes have a subset of the sum s
    for size in sizes:
        reached.append(reached[-1] | reached[-1] << size)
    below = (reached[-1] & ((1 << target + 1) - 1)).bit_length() - 1
    above = reached[-1] >> target
    up = (above & -above).bit_length() - 1
    left = target + up if above and up < target - below else below
    mask = np.zeros(len(sizes), dtype=bool)
    for i in reversed(range(len(sizes))):
        size = sizes[i]
        without = bool(reached[i] >> left & 1)
        can_take = size <= left and bool(reached[i] >> left - size & 1)
        mask[i] = can_take and (not without or i < begun)
        left -= size if mask[i] else 0
    return mask


def weigh(source_of: np.ndarray, weights: Sequence[float], seed: int) -> np.ndarray:
    """Return how often each row is used, (N,), according to the weight of its source.

    source_of: (N,) source index of each row. Weight 2 uses every row twice; 0.5 uses a random half; 1.5 uses every row
    once and a random half twice. `seed` determines the draw. A source with n rows contributes exactly `round(weight *
    n)` rows. Raises ValueError for more rows than an epoch can have.
    """
    counts = np.zeros(len(source_of), dtype=np.int64)
    for source, weight in enumerate(weights):
        rows = np.flatnonzero(source_of == source)
        if weight * len(rows) > MOST_ROWS:
            raise ValueError(
                f"data.source: weight={weight:g} of {len(rows):,} rows is more than {MOST_ROWS:,} rows per epoch. "
                "Lower it."
            )
        whole = int(weight)
        counts[rows] = whole
        num_more = round(weight * len(rows)) - whole * len(rows)
        drawn = np.random.default_rng([seed, source]).permutation(len(rows))[:num_more]
        counts[rows[drawn]] += 1
    return counts
