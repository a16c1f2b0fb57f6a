"""Tokenised training sequences in flat arrays.

Legend: N documents, S their tokens in sum.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lean_ft.data.detection import NUM_ROWS_TO_DETECT
from lean_ft.data.formats import RowReader
from lean_ft.data.render import Renderer
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Digest, Row
from lean_ft.data.sources import first_rows, read_rows
from lean_ft.settings import SFTDataConfig, Sources
from lean_ft.tokenizers import Tokenizer

ROWS_AT_A_TIME = 1024  # tokenised together; bounds the Python objects alive


@dataclass(frozen=True)
class Documents:
    """N sequences of ids; five bytes a token, so ten million tokens are 50 MB."""

    tokens: np.ndarray  # (S,) int32
    trained: np.ndarray  # (S,) bool: this token is a label
    starts: np.ndarray  # (N,) int64
    lengths: np.ndarray  # (N,) int64
    num_targets: np.ndarray  # (N,) int64: labels; a document's first token is none, since nothing predicts it

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


def prepare_documents(
    config: SFTDataConfig,
    tokenizer: Tokenizer,
    source: Sources,
    digest: Digest | None = None,
) -> tuple[Documents, DataReport]:
    """Reads, renders, tokenises and truncates every row of `source`.

    Raises ValueError for a row that cannot be read, for one that is too long under `overflow=raise`, and when
    nothing is left to train on.
    """
    reader = RowReader.of(config, first_rows(source, NUM_ROWS_TO_DETECT, config), tokenizer)
    render = Renderer(config, reader, tokenizer)
    report = render.empty_report()
    tokens: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    lengths: list[int] = []
    num_targets: list[int] = []
    for some in _batched(read_rows(source, digest, config), ROWS_AT_A_TIME):
        kept, counts = render(some)
        report.add(counts)
        report.check_bad_rows(config.max_bad_rows)
        if kept:
            tokens.append(np.concatenate([ids for ids, _ in kept]))
            trained.append(np.concatenate([mask for _, mask in kept]))
            lengths += [len(ids) for ids, _ in kept]
            num_targets += [int(mask[1:].sum()) for _, mask in kept]
    if not lengths:
        raise ValueError(
            f"nothing in {source} is left to train on: {report.nothing_left()}. Raise "
            f"data.max_length (now {config.max_length}) or check data.train_on (now {config.train_on})."
        )
    ends = np.cumsum(lengths)
    documents = Documents(
        np.concatenate(tokens), np.concatenate(trained), ends - lengths, np.array(lengths), np.array(num_targets)
    )
    return documents, report


def count(report: DataReport, documents: Documents) -> None:
    """Writes the sizes of `documents` into `report`."""
    report.kept = len(documents)
    report.tokens, report.target_tokens = int(documents.lengths.sum()), int(documents.num_targets.sum())


def _batched(rows: Iterable[Row], n: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while some := list(itertools.islice(iterator, n)):
        yield some
