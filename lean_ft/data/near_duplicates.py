"""Rows that nearly repeat an earlier row: found by MinHash with bands, and confirmed by comparing the rows themselves.

The similarity of two rows is the Jaccard index of their shingles: the distinct runs of `SHINGLE` words that both have,
divided by those that either has. From `SIMILAR` on, the later row is a near-duplicate of the earlier one. Rows of fewer
words have one shingle, so they must be equal. Held-out rows come before training rows, so that a training row is a
near-duplicate of a held-out row and never the reverse.

`find` hashes every shingle with `BANDS` x `PER_BAND` functions, and keeps the smallest value of each. Two rows with the
similarity s have the same `PER_BAND` values in at least one band with the probability 1 - (1 - s^PER_BAND)^BANDS: 99.8%
for s = 0.8, and more above it. Each row is compared with earlier rows of such a band that are no near-duplicates
themselves. So every near-duplicate that is found has a row that stays, and n equal rows need n comparisons.

Sources: Broder 1997, "On the resemblance and containment of documents"; Leskovec, Rajaraman and Ullman, "Mining of
Massive Datasets", chapter 3 (bands); Lee et al. 2022, https://arxiv.org/abs/2107.06499 (5-grams of words, 0.8).

Legend: N rows, W words of a row, S shingles of some rows, D near-duplicates.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from lean_ft.data.formats import NUM_ROWS_TO_DETECT, RowReader
from lean_ft.data.keys import code_digest, hash_of
from lean_ft.data.objective import own_files
from lean_ft.data.report import DataReport
from lean_ft.data.row_words import TO_NEXT, RowContents, batched, mixed, runs_of, words_of_rows
from lean_ft.data.rows import Digest, Row
from lean_ft.data.sources import RowSources
from lean_ft.settings import DataConfig
from lean_ft.system.cache import FORMAT, EntryWriter, cache_folder, load_entry
from lean_ft.system.contents import Content

SHINGLE = 5  # words
SIMILAR = 0.8  # Jaccard index of near-duplicates
BANDS, PER_BAND = 20, 6
VERSION = 1  # of what is found; part of fingerprints
OF_EARLIER, OF_HELD_OUT = "near-duplicates of earlier rows", "near-duplicates of held-out rows"
_WORDS_AT_A_TIME = 1 << 15  # hashed together; they stay in the processor's cache
_MOST_REMEMBERED, _MOST_WORDS_REMEMBERED = 4096, 2048  # rows whose shingles are remembered; 16 KiB of each
_MOST_IN_A_BAND = 16  # rows of a band that a row may be compared with, the latest first
_MOST_COMPARED = 8  # rows that a row is compared with, those in most bands first
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=(BANDS, PER_BAND), dtype=np.uint64) * 2 + 1  # odd


@dataclass(frozen=True)
class NearDuplicates:
    """Near-duplicates among rows, which count from 0: the held-out rows first, then the training rows."""

    rows: np.ndarray  # (D,) int64, ascending
    of: np.ndarray  # (D,) int64: an earlier row that is no near-duplicate itself
    similarity: np.ndarray  # (D,) float32
    num_held_out: int
    num_trained: int

    @property
    def between(self) -> np.ndarray:
        """(D,) bool: a training row that is a near-duplicate of a held-out row."""
        return (self.rows >= self.num_held_out) & (self.of < self.num_held_out)


# Signatures -----------------------------------------------------------------------------------------------------------


def shingles(words: np.ndarray, offsets: np.ndarray, media: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the shingles of rows, (S,) uint64, and the first of each row and their number, (N + 1,).

    words: (all words of the rows,) uint32; offsets: (N + 1,) first word of each row; media: (N,) uint64. Rows with
    other media have other hashes.
    """
    hashes, firsts = runs_of(words, offsets, SHINGLE, of_short=True)
    return mixed(hashes + np.repeat(media, np.diff(firsts))), firsts


def bands(hashes: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Return a key per band and row, (BANDS, N) uint64, of shingles as `shingles` returns them. Rows have the same key
    if the smallest values of the band's hash functions are equal."""
    keys = np.zeros((BANDS, len(firsts) - 1), dtype=np.uint64)
    some = np.flatnonzero(np.diff(firsts))
    begins, product = firsts[:-1][some], np.empty_like(hashes)
    if not len(some):
        return keys
    for band in range(BANDS):
        key = np.zeros(len(some), dtype=np.uint64)
        for factor in _FACTORS[band]:
            np.multiply(hashes, factor, out=product)  # modulo 2^64: another order of the hashes
            key = mixed(key * TO_NEXT + np.minimum.reduceat(product, begins))
        keys[band, some] = key
    return keys


# Comparison -----------------------------------------------------------------------------------------------------------


class StoredWords:
    """The words of N rows and the keys of their bands, in memory-mapped files."""

    def __init__(self, rows: Iterable[RowContents], folder: Path) -> None:
        """Read all rows. folder: of the cache, where the files use disk space as long as this process runs."""

        def write(writer: EntryWriter) -> None:
            writer.append(_joined([]))
            for some in batched(rows):
                writer.append(_joined(some))

        self._arrays, _ = load_entry(folder, None, write)
        self._words, self._media = self._arrays["words"], self._arrays["media"]
        self._offsets = np.append(0, np.cumsum(self._arrays["num_words"]))
        self._remembered = lru_cache(_MOST_REMEMBERED)(self.shingles)  # of rows that others are compared with

    def __len__(self) -> int:
        return len(self._media)

    def words(self, row: int) -> np.ndarray:
        """The words of a row, (W,) uint32."""
        return self._words[self._offsets[row] : self._offsets[row + 1]]

    def shingles(self, row: int) -> np.ndarray:
        """The distinct shingles of a row, sorted."""
        words = self.words(row)
        return np.unique(shingles(words, np.array([0, len(words)]), self._media[row : row + 1])[0])

    def first_similar(self, row: int, others: Iterable[int]) -> tuple[int, float] | None:
        """The first of other rows whose similarity to a row makes the two near-duplicates, and the similarity."""
        words, media, own = self.words(row), self._media[row], None
        for other in others:
            if self._media[other] != media:
                continue
            if np.array_equal(self.words(other), words):
                return other, 1.0
            own = self.shingles(row) if own is None else own
            is_long = self._offsets[other + 1] - self._offsets[other] > _MOST_WORDS_REMEMBERED
            both = np.concatenate((own, (self.shingles if is_long else self._remembered)(other)))
            both.sort()
            shared = int((both[1:] == both[:-1]).sum())
            if (similarity := shared / (len(both) - shared)) >= SIMILAR:
                return other, similarity
        return None

    def buckets(self) -> tuple[np.ndarray, int]:
        """Return the bucket of each row in each band, (N, BANDS) int32, and the number of buckets. The rows of a bucket
        have the same key in the band. A row that is alone with its key, or has no words, is in bucket -1."""
        found, number = np.full((len(self), BANDS), -1, dtype=np.int32), 0
        has_words = np.flatnonzero(self._arrays["num_words"])
        for band in range(BANDS):
            keys = self._arrays[f"band_{band}"][has_words]
            order = np.argsort(keys, kind="stable")
            is_as_before = np.diff(keys[order], prepend=keys[order[:1]] + np.uint64(1)) == 0
            is_shared = is_as_before | np.append(is_as_before[1:], False)
            begins = is_shared & ~is_as_before
            found[has_words[order[is_shared]], band] = number - 1 + np.cumsum(begins)[is_shared]
            number += int(begins.sum())
        return found, number


def find(stored: StoredWords) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the near-duplicates (D,), the earlier row of each (D,), and their similarity (D,)."""
    buckets, number = stored.buckets()
    # The rows of a bucket that stay are a linked list: its latest row, and for each of its rows the one before.
    latest, previous = array("i", [-1]) * number, array("i", [-1]) * buckets.size
    found = list[tuple[int, int, float]]()
    for row in np.flatnonzero((buckets >= 0).any(axis=1)).tolist():
        in_bands, times = buckets[row].tolist(), dict[int, int]()
        for band, bucket in enumerate(in_bands):
            other, num_met = latest[bucket] if bucket >= 0 else -1, 0
            while other >= 0 and num_met < _MOST_IN_A_BAND:
                times[other] = times.get(other, 0) + 1
                other, num_met = previous[other * BANDS + band], num_met + 1
        likely = sorted(times, key=lambda other: (-times[other], other))[:_MOST_COMPARED]
        if (similar := stored.first_similar(row, likely)) is not None:
            found.append((row, *similar))
            continue
        for band, bucket in enumerate(in_bands):
            if bucket >= 0:
                previous[row * BANDS + band], latest[bucket] = latest[bucket], row
    rows, of, similarity = zip(*found, strict=True) if found else ((), (), ())
    return np.array(rows, dtype=np.int64), np.array(of, dtype=np.int64), np.array(similarity, dtype=np.float32)


def _joined(rows: Sequence[RowContents]) -> dict[str, np.ndarray]:
    """Return the words of some rows, and the keys of their bands."""
    found, media = words_of_rows(rows, symbols=True), np.array([row.media for row in rows], dtype=np.uint64)
    keys, offsets, first = list[np.ndarray](), found.offsets, 0
    while first < len(rows):
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _WORDS_AT_A_TIME, side="right")) - 1)
        some = slice(offsets[first], offsets[end])
        keys.append(bands(*shingles(found.words[some], offsets[first : end + 1] - offsets[first], media[first:end])))
        first = end
    joined = np.concatenate([np.empty((BANDS, 0), dtype=np.uint64), *keys], axis=1)
    return found._asdict() | {"media": media} | {f"band_{i}": joined[i] for i in range(BANDS)}


# Rows of a run --------------------------------------------------------------------------------------------------------


def near_duplicates(config: DataConfig, reader: RowReader) -> NearDuplicates:
    """Compare the rows of `config.source` and `config.validation_source`, as far as they can be read.

    reader: of one of the two. The result is cached by the content of the files. Raises ValueError for a source that
    cannot be read to its end, and for a file that changes while it is read.
    """
    sources = [RowSources.of(config, one) for one in (config.validation_source, config.source) if one is not None]
    folder = cache_folder(config.cache_dir)
    contents = [one.content(folder) for one in sources]
    own = own_files(config)
    key = None
    if all(contents) and all(own.values()):
        own_code = [hashlib.blake2b(Path(file).read_bytes()).hexdigest() for file in own.values()]
        digests = [content.digest for content in contents if content]
        key = f"repeats-{hash_of(FORMAT, VERSION, code_digest(), type(reader).__name__, digests, own_code)}"

    def write(writer: EntryWriter) -> None:
        counts = [0] * len(sources)

        def read() -> Iterator[RowContents]:
            for i, one in enumerate(sources):
                reading = type(reader).of(one, one.first_rows(NUM_ROWS_TO_DETECT), reader.tokenizer)
                for counts[i], row in enumerate(one.rows(), start=1):
                    yield RowContents.of(row, reading)

        rows, of, similarity = find(StoredWords(read(), folder))
        if [one.content(folder) for one in sources] != contents:
            raise ValueError(
                f"a file of {config.source} or {config.validation_source} changed while it was read. Start again when "
                "it is complete."
            )
        writer.append({"rows": rows, "of": of, "similarity": similarity})
        writer.about["counts"] = [0] * (2 - len(counts)) + counts

    arrays, about = load_entry(folder, key, write)
    return NearDuplicates(arrays["rows"], arrays["of"], arrays["similarity"], *about["counts"])


@dataclass(frozen=True)
class DistinctSources(RowSources):
    """Sources whose rows are `left_out` if they are near-duplicates."""

    reader: RowReader

    def rows(self, digest: Digest | None = None) -> Iterator[Row]:
        found = near_duplicates(self.config, self.reader)
        is_held_out = self.source == self.config.validation_source
        first = 0 if is_held_out else found.num_held_out
        reasons = {
            row - first: OF_HELD_OUT if between else OF_EARLIER
            for row, between in zip(found.rows.tolist(), found.between.tolist(), strict=True)
            if (row < found.num_held_out) == is_held_out
        }
        for number, row in enumerate(super().rows(digest)):
            yield row._replace(left_out=reasons[number]) if number in reasons else row


def distinct(sources: RowSources, reader: RowReader) -> RowSources:
    """The same sources under `data.near_duplicates=keep`; under `drop`, their near-duplicates are left out."""
    if sources.config.near_duplicates == "keep":
        return sources
    return DistinctSources(sources.config, sources.source, sources.sources, reader)


def note_held_out(report: DataReport, held_out: DataReport) -> None:
    """Name the near-duplicates among held-out rows in the report of the training rows, which a run prints."""
    report.note(f"held-out rows dropped ({OF_EARLIER})", held_out.dropped.get(OF_EARLIER, 0))


def decided_by(config: DataConfig) -> list[Content]:
    """What decides which rows are left out, besides the rows themselves; [] under `data.near_duplicates=keep`. A digest
    is empty if the content of held-out rows is not on record."""
    if config.near_duplicates == "keep":
        return []
    found = [Content("the near-duplicates, which this version of lean_ft finds", str(VERSION))]
    if config.validation_source is not None:
        content = RowSources.of(config, config.validation_source).content(cache_folder(config.cache_dir))
        found.append(Content("the held-out rows, whose near-duplicates are dropped", content.digest if content else ""))
    return found
