"""Rows to documents: read by their format, tokenised together, cut to length and counted, in as many processes as it pays.

An objective's reader decides which texts a row becomes and which of their tokens fit. A row becomes as many documents as
the settings have `sides`; they stand one behind the other.

Legend: N documents, S their tokens in sum.
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
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Digest, Document, Row
from lean_ft.data.sources import first_rows, read_rows
from lean_ft.data.workers import map_in_processes
from lean_ft.settings import DataConfig, SFTDataConfig, Sources
from lean_ft.system.environment import usable_cores
from lean_ft.tokenizers import Passage, Tokenizer, load_tokenizer

ROWS_AT_A_TIME = 512  # tokenised together; bounds the Python objects alive
ARRAYS = ("tokens", "trained", "lengths", "num_targets", "values")  # what `Documents.of` is made of
FEW_ROWS = 8 * ROWS_AT_A_TIME  # up to here, starting processes takes longer than it saves

# Another process reads the files again.
copyreg.pickle(Tokenizer, lambda tokenizer: (load_tokenizer, (tokenizer.folder, tokenizer.template_file)))


@dataclass(frozen=True)
class Documents:
    """N sequences of ids; five bytes a token, so ten million tokens are 50 MB, in memory or mapped from a file."""

    tokens: np.ndarray  # (S,) int32
    trained: np.ndarray  # (S,) bool: this token is a label
    starts: np.ndarray  # (N,) int64
    lengths: np.ndarray  # (N,) int64
    num_targets: np.ndarray  # (N,) int64: labels; a document's first token is none, since nothing predicts it
    values: np.ndarray  # (N, V) float32: what its row says about it beside the text

    @classmethod
    def of(
        cls,
        tokens: np.ndarray,
        trained: np.ndarray,
        lengths: np.ndarray,
        num_targets: np.ndarray,
        values: np.ndarray | None = None,
    ) -> "Documents":
        """Documents that lie end to end; values: N * V numbers, or None for zeros."""
        values = np.zeros(len(lengths), dtype=np.float32) if values is None else values
        values = values.reshape(len(lengths), -1) if len(lengths) else values.reshape(0, 1)
        return cls(tokens, trained, np.cumsum(lengths) - lengths, lengths, num_targets, values)

    @classmethod
    def join(cls, documents: list[Document], values: Sequence[Any] | None = None) -> "Documents":
        """Single documents, copied into one."""
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
        """The documents `indices`; shares the tokens."""
        return replace(
            self,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            num_targets=self.num_targets[indices],
            values=self.values[indices],
        )


def renderer_of(config: DataConfig, tokenizer: Tokenizer, source: Sources) -> "Renderer":
    """What makes documents of the rows of `source`, by the objective of `config`.

    Raises ValueError if `source` cannot be read, or its rows have no format that the objective trains on.
    """
    reader = objective_of(config).reader
    kind = settings_class(config)  # processes that render could not import a recipe's own class
    known = kind.model_construct(**{name: getattr(config, name) for name in kind.model_fields})
    rows = first_rows(source, NUM_ROWS_TO_DETECT, config)
    return Renderer(known, reader.of(known, rows, tokenizer, source), tokenizer)


@dataclass(frozen=True)
class Renderer:
    """Maps rows to documents."""

    config: DataConfig
    reader: RowReader
    """What the objective makes of a row."""
    tokenizer: Tokenizer

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Document], DataReport]:
        """`with_values` without the values."""
        documents, _, report = self.with_values(rows)
        return documents, report

    def with_values(self, rows: Sequence[Row]) -> tuple[list[Document], list[Any], DataReport]:
        """The documents of the rows that can be trained on, in order, what their rows tell of each, and the counts of these
        rows alone.

        Raises ValueError, with its place, for a row that cannot be read unless `on_bad_row` skips it, and for one that
        is too long under `overflow=raise`. Whoever adds up reports asks them to `check_bad_rows`.
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
        """The rows with their sequences to the end of the last answer, none of them cut. Raises ValueError, with its place, for
        a row that cannot be read, unless `on_bad_row` skips it."""
        found = self._tokenized(rows, self.empty_report())
        return [(row, [until_the_answer_ends(document) for document in documents]) for row, documents in found]

    def empty_report(self) -> DataReport:
        unit = objective_of(self.config).unit
        return DataReport(self.reader.format, detected=self.config.format == "auto", unit=unit)

    def _tokenized(self, rows: Sequence[Row], report: DataReport) -> list[tuple[Row, list[Document]]]:
        """The rows that can be read, each with its sequences."""
        read: list[tuple[Row, list[Passage | Document]]] = []
        for row in rows:
            try:
                self.reader.values(row)  # what cannot be read of them is a bad row as well
                read.append((row, passages := self.reader.passages(row)))
                for passage in passages:
                    if isinstance(passage, Passage):
                        report.count_passage(passage)
            except ValueError as error:
                self._skip_or_raise(error, report)
        try:
            tokenized = iter(self._tokenize([passage for _, passages in read for passage in passages]))
            return [(row, [next(tokenized) for _ in passages]) for row, passages in read]
        except ValueError:  # one of them: find it
            return [found for row, passages in read if (found := self._alone(row, passages, report))]

    def _tokenize(self, passages: list[Passage | Document]) -> list[Document]:
        """Texts become documents; what is one stays as it is."""
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
    """Some rows to their documents and counts; what each process does."""
    documents, values, report = render.with_values(rows)
    return Documents.join(documents, values), report


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
