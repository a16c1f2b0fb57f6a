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
from lean_ft.data.workers import map_in_processes, usable_cores
from lean_ft.settings import SFTDataConfig, Sources
from lean_ft.tokenizers import Tokenizer

ROWS_AT_A_TIME = 512  # tokenised together; bounds the Python objects alive
ARRAYS = ("tokens", "trained", "lengths", "num_targets")  # what `Documents.of` is made of
WORKER = "lean_ft.data.documents_worker"
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


def rows_to_documents(render: Renderer, rows: list[Row]) -> tuple[Documents, DataReport]:
    """A batch of rows to its documents and counts; what each process does."""
    rendered, report = render(rows)
    ids = [ids for ids, _ in rendered] or [np.empty(0, dtype=np.int32)]
    masks = [mask for _, mask in rendered] or [np.empty(0, dtype=bool)]
    lengths = np.array([len(ids) for ids, _ in rendered], dtype=np.int64)
    num_targets = np.array([mask[1:].sum() for _, mask in rendered], dtype=np.int64)
    return Documents.of(np.concatenate(ids), np.concatenate(masks), lengths, num_targets), report


def prepare_documents(
    config: SFTDataConfig,
    tokenizer: Tokenizer,
    source: Sources,
    digest: Digest | None = None,
) -> tuple[Documents, DataReport]:
    """Reads, renders, tokenises and truncates every row of `source`, in memory.

    Raises ValueError for a row that cannot be read, for one that is too long under `overflow=raise`, and when
    nothing is left to train on.
    """
    parts = Parts(config, tokenizer, source, digest)
    documents = list(parts)
    parts.check_any_left()
    arrays = (np.concatenate([getattr(part, name) for part in documents]) for name in ARRAYS)
    return Documents.of(*arrays), parts.report


class Parts:
    """The documents of `source`, a few hundred rows at a time and in order; `report` counts those given so far.

    Many rows are shared out to `config.num_processes`. Raises ValueError as `prepare_documents` does.
    """

    def __init__(self, config: SFTDataConfig, tokenizer: Tokenizer, source: Sources, digest: Digest | None = None):
        self._config, self._source, self._digest = config, source, digest
        reader = RowReader.of(config, first_rows(source, NUM_ROWS_TO_DETECT, config), tokenizer, source)
        self._render = Renderer(config, reader, tokenizer)
        self.report = self._render.empty_report()

    def __iter__(self) -> Iterator[Documents]:
        rows = read_rows(self._source, self._digest, self._config)
        beginning = list(itertools.islice(rows, FEW_ROWS + 1))
        batches = _batched(itertools.chain(beginning, rows), ROWS_AT_A_TIME)
        num_processes = self._config.num_processes or usable_cores()
        if num_processes == 1 or len(beginning) <= FEW_ROWS:
            results = (rows_to_documents(self._render, batch) for batch in batches)
        else:
            results = self._shared_out(batches, num_processes)
        for documents, counts in results:
            self.report.add(counts)
            self.report.check_bad_rows(self._config.max_bad_rows)
            yield documents

    def _shared_out(self, batches: Iterable[list[Row]], num_processes: int) -> Iterator[tuple[Documents, DataReport]]:
        setup = {
            "config": self._config.model_dump(mode="json"),
            "formats": [[source, *format] for source, format in self._render.reader.formats.items()],
            "tokenizer": str(self._render.tokenizer.folder),
        }
        items = ([[row.fields, row.place, row.source, row.problem] for row in batch] for batch in batches)
        for counts, arrays in map_in_processes(WORKER, setup, items, num_processes):
            yield Documents.of(*arrays), DataReport(**counts)

    def check_any_left(self) -> None:
        """Raises ValueError when all rows were dropped."""
        if self.report.kept == 0:
            raise ValueError(
                f"nothing in {self._source} is left to train on: {self.report.nothing_left()}. Raise data.max_length "
                f"(now {self._config.max_length}) or check data.train_on (now {self._config.train_on})."
            )


def count(report: DataReport, documents: Documents) -> None:
    """Writes the sizes of `documents` into `report`."""
    report.kept = len(documents)
    report.tokens, report.target_tokens = int(documents.lengths.sum()), int(documents.num_targets.sum())


def _batched(rows: Iterable[Row], n: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while some := list(itertools.islice(iterator, n)):
        yield some
