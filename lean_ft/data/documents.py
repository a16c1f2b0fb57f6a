"""Convert rows to documents: render, tokenize in batches, truncate and count, in several processes for large sources.

The objective's reader renders and truncates the texts of a row. A row becomes one document, or consecutive documents
for each of the settings' `sides`.

Legend: N documents, S tokens in total.
"""

import copyreg
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lean_ft.data.formats import NUM_ROWS_TO_DETECT, RowReader
from lean_ft.data.objective import objective_of, settings_class
from lean_ft.data.pairs import until_the_answer_ends
from lean_ft.data.report import DataReport, count
from lean_ft.data.rows import Digest, Document, Row
from lean_ft.data.sources import first_rows, read_rows
from lean_ft.data.workers import map_in_processes
from lean_ft.settings import DataConfig, Sources
from lean_ft.system.environment import usable_cores
from lean_ft.tokenizers import Passage, Tokenizer, load_tokenizer

ROWS_AT_A_TIME = 512  # tokenized together; bounds the number of live Python objects
ARRAYS = ("tokens", "trained", "lengths", "num_targets", "values")  # arguments of `Documents.of`
FEW_ROWS = 8 * ROWS_AT_A_TIME  # for fewer rows, starting processes costs more time than it saves

# Pickle a tokenizer as its files; the other process loads them again.
copyreg.pickle(
    Tokenizer,
    lambda one: (load_tokenizer, (one.folder, one.template_file), {"chat_template_kwargs": one.chat_template_kwargs}),
)


@dataclass(frozen=True)
class Documents:
    """N sequences of ids, in memory or memory-mapped: 5 bytes per token, 50 MB for 10 million tokens."""

    tokens: np.ndarray  # (S,) int32
    trained: np.ndarray  # (S,) bool: the token is a label
    starts: np.ndarray  # (N,) int64
    lengths: np.ndarray  # (N,) int64
    num_targets: np.ndarray  # (N,) int64: labels; nothing predicts the first token, so it is not counted
    values: np.ndarray  # (N, V) float32: values from the row, such as a label or margin

    @classmethod
    def of(
        cls,
        tokens: np.ndarray,
        trained: np.ndarray,
        lengths: np.ndarray,
        num_targets: np.ndarray,
        values: np.ndarray | None = None,
    ) -> "Documents":
        """Build from contiguous documents; values: N * V numbers, or None for zeros."""
        values = np.zeros(len(lengths), dtype=np.float32) if values is None else values
        values = values.reshape(len(lengths), -1) if len(lengths) else values.reshape(0, 1)
        return cls(tokens, trained, np.cumsum(lengths) - lengths, lengths, num_targets, values)

    @classmethod
    def join(cls, documents: list[Document], values: Sequence[Any] | None = None) -> "Documents":
        """Concatenate single documents (copies)."""
        return cls.of(
            np.concatenate([ids for ids, _ in documents] or [np.empty(0, dtype=np.int32)]),
            np.concatenate([mask for _, mask in documents] or [np.empty(0, dtype=bool)]),
            np.array([len(ids) for ids, _ in documents], dtype=np.int64),
            np.array([mask[1:].sum() for _, mask in documents], dtype=np.int64),
            None if values is None else np.array(values, dtype=np.float32),
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
        """Return the documents `indices`, sharing the token arrays."""
        return replace(
            self,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            num_targets=self.num_targets[indices],
            values=self.values[indices],
        )


def renderer_of(config: DataConfig, tokenizer: Tokenizer, source: Sources) -> "Renderer":
    """Return a renderer for the rows of `source` and the objective of `config`.

    Raises ValueError if `source` cannot be read, or if the objective does not support the format of its rows.
    """
    reader = objective_of(config).reader
    kind = settings_class(config)  # worker processes cannot import a recipe's own class
    known = kind.model_construct(**{name: getattr(config, name) for name in kind.model_fields})
    rows = first_rows(source, NUM_ROWS_TO_DETECT, config)
    return Renderer(known, reader.of(known, rows, tokenizer, source), tokenizer)


@dataclass(frozen=True)
class Renderer:
    """Converts rows to documents."""

    config: DataConfig
    reader: RowReader
    """The objective's reader."""
    tokenizer: Tokenizer

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Document], DataReport]:
        """Call `with_values` and drop the values."""
        documents, _, report = self.with_values(rows)
        return documents, report

    def with_values(self, rows: Sequence[Row]) -> tuple[list[Document], list[Any], DataReport]:
        """Return the documents to train on, the values of each document, and a report for these rows only.

        Raises ValueError with the place of an unreadable row unless `on_bad_row` skips it, or of a row that is too long
        under `overflow=raise`. After adding up reports, call `check_bad_rows`.
        """
        report = self.empty_report()
        report.rows = len(rows)
        documents, values, num_sides = list[Document](), list[Any](), len(self.config.sides)
        for row, tokenized in self._tokenized(rows, report):
            kept = self.reader.fit(tokenized, row.place, report)
            documents += kept
            values += self.reader.values(row) if kept else []
            for together in (kept[i : i + num_sides] for i in range(0, len(kept), num_sides)):
                targets = sum(int(mask[1:].sum()) for _, mask in together)
                report.keep(sum(len(ids) for ids, _ in together), targets, row.source)
        report.check_bad_rows(self.config.max_bad_rows)
        assert len(values) == len(documents)
        return documents, values, report

    def whole(self, rows: Sequence[Row]) -> list[tuple[Row, list[Document]]]:
        """Return each row with its sequences, ending at the last answer, without truncation.

        Raises ValueError with the place of an unreadable row unless `on_bad_row` skips it.
        """
        found = self._tokenized(rows, self.empty_report())
        return [(row, [until_the_answer_ends(document) for document in documents]) for row, documents in found]

    def empty_report(self) -> DataReport:
        unit = objective_of(self.config).unit
        return DataReport(self.reader.format, detected=self.config.format == "auto", unit=unit)

    def _tokenized(self, rows: Sequence[Row], report: DataReport) -> list[tuple[Row, list[Document]]]:
        """Return the readable rows, each with its sequences."""
        read: list[tuple[Row, list[Passage | Document]]] = []
        for row in rows:
            try:
                self.reader.values(row)  # unreadable values make a bad row
                unread, passages = self.reader.unread(row), self.reader.passages(row)
                read.append((row, passages))
                count(unread, report.unread)
                count(self.reader.columns(row), report.columns)
                for passage in passages:
                    if isinstance(passage, Passage):
                        report.count_passage(passage)
            except ValueError as error:
                self._skip_or_raise(error, report)
        try:
            tokenized = iter(self._tokenize([passage for _, passages in read for passage in passages]))
            return [(row, [next(tokenized) for _ in passages]) for row, passages in read]
        except ValueError:  # find the row that failed
            return [found for row, passages in read if (found := self._alone(row, passages, report))]

    def _tokenize(self, passages: list[Passage | Document]) -> list[Document]:
        """Tokenize texts; keep documents unchanged."""
        tokenized = iter(self.tokenizer.tokenize([passage for passage in passages if isinstance(passage, Passage)]))
        return [next(tokenized) if isinstance(passage, Passage) else passage for passage in passages]

    def _alone(
        self, row: Row, passages: list[Passage | Document], report: DataReport
    ) -> tuple[Row, list[Document]] | None:
        try:
            return row, self._tokenize(passages)
        except ValueError as error:
            self._skip_or_raise(ValueError(f"{row.place}: {error}"), report)
            return None

    def _skip_or_raise(self, error: ValueError, report: DataReport) -> None:
        if self.config.on_bad_row == "raise":
            raise error
        report.skip_bad_row(str(error))


def render_rows(render: Renderer, rows: list[Row]) -> tuple[Documents, DataReport]:
    """Render rows in a worker process; return their documents and report."""
    documents, values, report = render.with_values(rows)
    return Documents.join(documents, values), report


class Parts:
    """Iterator over the documents of `source` in order, 512 rows at a time; `report` counts the rows so far.

    Large sources are divided among `config.num_processes` processes; `digest` is updated with all content read. Raises
    ValueError for an unreadable row, for a row that is too long under `overflow=raise`, and at the end if no row is
    left to train on.
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
            train_on = getattr(self._config, "train_on", None)
            check = f", or check data.train_on (now {train_on})" if train_on is not None else ""
            raise ValueError(
                f"no row of {self._source} is left to train on: {self.report.nothing_left()}. Raise data.max_length (now "
                f"{self._config.max_length}){check}."
            )


def _batched(rows: Iterable[Row], n: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while some := list(itertools.islice(iterator, n)):
        yield some
