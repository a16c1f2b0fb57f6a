"""Tokenised training sequences in flat arrays, and their making: rows read, and rendered in as many processes as it pays.

Legend: N documents, S their tokens in sum. A row of data becomes as many documents as the settings have `sides`, and
these stand one behind the other.
"""

import copyreg
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lean_ft.data.render import Renderer, renderer_of
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Digest, Document, Row
from lean_ft.data.sources import read_rows
from lean_ft.data.workers import map_in_processes, usable_cores
from lean_ft.settings import DataConfig, SFTDataConfig, Sources
from lean_ft.tokenizers import Tokenizer, load_tokenizer

ROWS_AT_A_TIME = 512  # tokenised together; bounds the Python objects alive
ARRAYS = ("tokens", "trained", "lengths", "num_targets")  # what `Documents.of` is made of
FEW_ROWS = 8 * ROWS_AT_A_TIME  # up to here, starting processes takes longer than it saves

# Another process reads the files again.
copyreg.pickle(Tokenizer, lambda tokenizer: (load_tokenizer, (tokenizer.folder,)))


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

    @classmethod
    def join(cls, documents: list[Document]) -> "Documents":
        """Single documents, copied into one."""
        return cls.of(
            np.concatenate([ids for ids, _ in documents] or [np.empty(0, dtype=np.int32)]),
            np.concatenate([mask for _, mask in documents] or [np.empty(0, dtype=bool)]),
            np.array([len(ids) for ids, _ in documents], dtype=np.int64),
            np.array([mask[1:].sum() for _, mask in documents], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Document:
        """Ids and trained mask of document i, as views."""
        span = slice(self.starts[i], self.starts[i] + self.lengths[i])
        return self.tokens[span], self.trained[span]

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: np.ndarray) -> "Documents":
        """The documents `indices`; shares the tokens."""
        return replace(
            self,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            num_targets=self.num_targets[indices],
        )


def render_rows(render: Renderer, rows: list[Row]) -> tuple[Documents, DataReport]:
    """Some rows to their documents and counts; what each process does."""
    documents, report = render(rows)
    return Documents.join(documents), report


class Parts:
    """The documents of `source`, a few hundred rows at a time and in order; `report` counts those given so far.

    Many rows are shared out to `config.num_processes`; `digest` is fed all that is read. Raises ValueError for a row that
    cannot be read, for one that is too long under `overflow=raise`, and at its end where nothing is left to train on.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, source: Sources, digest: Digest | None = None):
        self._config, self._source, self._digest = config, source, digest
        self._render = renderer_of(config, tokenizer, source)
        self.report = self._render.empty_report()

    def __iter__(self) -> Iterator[Documents]:
        rows = read_rows(self._source, self._digest, self._config)
        beginning = list(itertools.islice(rows, FEW_ROWS + 1))
        batches = _batched(itertools.chain(beginning, rows), ROWS_AT_A_TIME)
        num_processes = self._config.num_processes or usable_cores()
        render = partial(render_rows, self._render)
        alone = num_processes == 1 or len(beginning) <= FEW_ROWS
        for documents, counts in map(render, batches) if alone else map_in_processes(render, batches, num_processes):
            self.report.add(counts)
            self.report.check_bad_rows(self._config.max_bad_rows)
            yield documents
        if self.report.kept == 0:
            train_on = (
                f" or check data.train_on (now {self._config.train_on})"
                if isinstance(self._config, SFTDataConfig)
                else ""
            )
            raise ValueError(
                f"nothing in {self._source} is left to train on: {self.report.nothing_left()}. Raise data.max_length "
                f"(now {self._config.max_length}){train_on}."
            )


def _batched(rows: Iterable[Row], n: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while some := list(itertools.islice(iterator, n)):
        yield some
