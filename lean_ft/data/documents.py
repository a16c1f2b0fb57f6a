"""Tokenised training sequences in flat arrays.

Legend: N documents, S their tokens in sum.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lean_ft.data.formats import NUM_ROWS_TO_DETECT, RowReader
from lean_ft.data.render import Renderer
from lean_ft.data.report import DataReport
from lean_ft.data.sources import Digest, Row, read_rows
from lean_ft.data.workers import map_in_processes, usable_cores
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer

ROWS_AT_A_TIME = 512  # tokenised together; bounds the Python objects alive
FEW_ROWS = 8 * ROWS_AT_A_TIME  # up to here, starting processes takes longer than it saves


@dataclass(frozen=True)
class Documents:
    """N sequences of ids; five bytes a token, so ten million tokens are 50 MB, in memory or mapped from a file."""

    tokens: np.ndarray  # (S,) int32
    trained: np.ndarray  # (S,) bool: this token is a label
    starts: np.ndarray  # (N,) int64
    lengths: np.ndarray  # (N,) int64
    num_targets: np.ndarray  # (N,) int64: labels; a document's first token is none, since nothing predicts it

    @classmethod
    def of(cls, tokens: np.ndarray, trained: np.ndarray, lengths: np.ndarray, num_targets: np.ndarray) -> "Documents":
        """Documents that lie end to end."""
        return cls(tokens, trained, np.cumsum(lengths) - lengths, lengths, num_targets)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and trained mask of document i, as views."""
        span = slice(self.starts[i], self.starts[i] + self.lengths[i])
        return self.tokens[span], self.trained[span]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: np.ndarray) -> "Documents":
        """The documents `indices`; shares the tokens."""
        return replace(
            self,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            num_targets=self.num_targets[indices],
        )


@dataclass(frozen=True)
class RowsToDocuments:
    """A batch of rows to its documents and counts; what each process does."""

    render: Renderer

    def __call__(self, rows: list[Row]) -> tuple[Documents, DataReport]:
        rendered, report = self.render(rows)
        ids = [ids for ids, _ in rendered] or [np.empty(0, dtype=np.int32)]
        masks = [mask for _, mask in rendered] or [np.empty(0, dtype=bool)]
        lengths = np.array([len(ids) for ids, _ in rendered], dtype=np.int64)
        num_targets = np.array([mask[1:].sum() for _, mask in rendered], dtype=np.int64)
        return Documents.of(np.concatenate(ids), np.concatenate(masks), lengths, num_targets), report


def prepare_documents(
    config: SFTDataConfig,
    tokenizer: Tokenizer,
    source: str | list[str],
    digest: Digest | None = None,
) -> tuple[Documents, DataReport]:
    """Reads, renders, tokenises and truncates every row of `source`, in memory.

    Raises ValueError for a row that cannot be read, for one that is too long under `overflow=raise`, and when
    nothing is left to train on.
    """
    report: DataReport | None = None
    parts: list[Documents] = []
    for part, counts in documents_in_parts(config, tokenizer, source, digest):
        parts.append(part)
        if report is None:
            report = counts
        else:
            report.add(counts)
    assert report is not None
    documents = Documents.of(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.trained for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.num_targets for part in parts]),
    )
    check_any_left(report, config, source)
    return documents, report


def documents_in_parts(
    config: SFTDataConfig,
    tokenizer: Tokenizer,
    source: str | list[str],
    digest: Digest | None = None,
) -> Iterator[tuple[Documents, DataReport]]:
    """The documents of `source`, a few hundred rows at a time and in order, each with the counts of these rows.

    Many rows are shared out to `config.num_processes`. Raises ValueError as `prepare_documents` does, but for nothing
    being left.
    """
    rows = read_rows(source, digest)
    first_rows = list(itertools.islice(rows, FEW_ROWS + 1))
    reader = RowReader.of(config, first_rows[:NUM_ROWS_TO_DETECT], tokenizer)
    to_documents = RowsToDocuments(Renderer(config, reader, tokenizer))
    num_processes = config.num_processes or usable_cores()
    batches = _batched(itertools.chain(first_rows, rows), ROWS_AT_A_TIME)
    if num_processes == 1 or len(first_rows) <= FEW_ROWS:
        yield from map(to_documents, batches)
    else:
        yield from map_in_processes(to_documents, batches, num_processes)


def check_any_left(report: DataReport, config: SFTDataConfig, source: str | list[str]) -> None:
    """Raises ValueError when all rows were dropped."""
    if report.kept == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
        raise ValueError(
            f"nothing in {source} is left to train on: of {report.rows} rows, {reasons}. Raise "
            f"data.max_length (now {config.max_length}) or check data.train_on (now {config.train_on})."
        )


def count(report: DataReport, documents: Documents) -> None:
    """Writes the sizes of `documents` into `report`."""
    report.kept = len(documents)
    report.tokens, report.target_tokens = int(documents.lengths.sum()), int(documents.num_targets.sum())


def _batched(rows: Iterable[Row], n: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while some := list(itertools.islice(iterator, n)):
        yield some
