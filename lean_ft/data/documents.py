"""Convert rows to documents: render, tokenize in batches, truncate and count, in several processes for large sources.

The objective's reader renders and truncates the texts of a row. A row becomes one document, or consecutive documents
for each of the settings' `sides`.
"""

import copyreg
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lean_ft.data.columns import Columns, Document
from lean_ft.data.formats import NUM_ROWS_TO_DETECT, RowReader, reading
from lean_ft.data.kinds import Kind
from lean_ft.data.near_duplicates import distinct
from lean_ft.data.objective import objective_of, own_files
from lean_ft.data.pairs import until_the_answer_ends
from lean_ft.data.part_types import UnreadablePartError
from lean_ft.data.parts import documents_of, kinds_of, marks_in_texts, measured
from lean_ft.data.report import DataReport, count
from lean_ft.data.rows import Digest, Row
from lean_ft.data.sources import RowSources
from lean_ft.data.workers import FromFiles, map_in_processes
from lean_ft.settings import DataConfig, Sources
from lean_ft.system.environment import usable_cores
from lean_ft.tokenizers import Passage, Tokenizer, load_tokenizer

ROWS_AT_A_TIME = 512  # tokenized together; bounds the number of live Python objects
FEW_ROWS = 8 * ROWS_AT_A_TIME  # for fewer rows, starting processes costs more time than it saves

# Pickle a tokenizer as its files; the other process loads them again.
copyreg.pickle(
    Tokenizer,
    lambda one: (
        load_tokenizer,
        (one.folder, one.template_file),
        {"chat_template_kwargs": one.chat_template_kwargs, "media": one.media},
    ),
)


def renderer_of(config: DataConfig, tokenizer: Tokenizer, source: Sources | None = None) -> "Renderer":
    """Return a renderer for the rows of `source` (default: `config.source`) and the objective of `config`.

    Raises ValueError if the source cannot be read, or if the objective does not support the format of its rows.
    """
    kinds, objective = kinds_of(tokenizer, config), objective_of(config)
    sources = RowSources.of(config.importable(), source)
    reader = objective.reader.of(sources, sources.first_rows(NUM_ROWS_TO_DETECT), tokenizer)
    return Renderer(distinct(sources, reader), reader, tokenizer, kinds, objective.unit)


@dataclass(frozen=True)
class Renderer:
    """Converts the rows of some sources to documents."""

    sources: RowSources
    reader: RowReader
    """The objective's reader."""
    tokenizer: Tokenizer
    kinds: tuple[Kind, ...]
    """Of the documents' columns."""
    unit: str
    """Of the objective, in reports."""

    @property
    def config(self) -> DataConfig:
        return self.reader.config

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Document], DataReport]:
        """Return the documents to train on, and a report for these rows only.

        Raises ValueError with the place of an unreadable row unless `on_bad_row` skips it, or of a row that is too long
        under `overflow=raise`. After adding up reports, call `check_bad_rows`.
        """
        report = self.empty_report()
        report.rows = len(rows)
        documents, num_sides = list[Document](), len(self.config.sides)
        for row, tokenized in self._with_columns(self._tokenized(rows, report), report):
            kept = self.reader.fit(tokenized, row.place, report)
            values = self.reader.values(row) if kept else []
            for document, value in zip(kept, values, strict=True):
                of_row = {"row_values": np.array([value], dtype=np.float32).ravel()}
                documents.append(replace(document, per_document={**document.per_document, **of_row}))
            for together in (kept[i : i + num_sides] for i in range(0, len(kept), num_sides)):
                targets = sum(int(document.trained[1:].sum()) for document in together)
                report.keep(sum(map(len, together)), targets, row.source)
        report.check_bad_rows(self.config.max_bad_rows)
        return documents, report

    def _with_columns(
        self, found: list[tuple[Row, list[Document]]], report: DataReport
    ) -> Iterator[tuple[Row, list[Document]]]:
        """Add the reader's columns. A row without them is a bad row."""
        for row, documents in found:
            try:
                yield row, self.reader.with_columns(row, documents)
            except ValueError as error:
                self._skip_or_raise(error, report)

    def whole(self, rows: Sequence[Row]) -> list[tuple[Row, list[Document]]]:
        """Return each row with its sequences, ending at the last answer, without truncation.

        Raises ValueError with the place of an unreadable row unless `on_bad_row` skips it.
        """
        found = self._tokenized(rows, self.empty_report())
        return [(row, [until_the_answer_ends(document) for document in documents]) for row, documents in found]

    def empty_report(self) -> DataReport:
        return DataReport(self.reader.format, detected=self.config.format == "auto", unit=self.unit)

    def _tokenized(self, rows: Sequence[Row], report: DataReport) -> list[tuple[Row, list[Document]]]:
        """Return the readable rows, each with its sequences."""
        read: list[tuple[Row, list[Passage | Document]]] = []
        for row in rows:
            if row.left_out:
                report.drop(row.left_out)
                continue
            try:
                self.reader.values(row)  # unreadable values make a bad row
                unread, passages = self.reader.unread(row), self.reader.passages(row)
                with reading(row):
                    passages = [
                        measured(one, row.folder, self.kinds) if isinstance(one, Passage) else one for one in passages
                    ]
                read.append((row, passages))
                count((self.reader.described(name, row) for name in unread), report.unread)
                count(columns := self.reader.columns(row), report.columns)
                texts = [passage for passage in passages if isinstance(passage, Passage)]
                self._count_parts({name: row.fields.get(name) for name in unread} | columns, texts, report)
                for passage in texts:
                    report.count_passage(passage)
            except ValueError as error:
                self._skip_or_raise(error, report)
        return self._tokenize(read, report)

    def _count_parts(self, unread: dict[str, Any], texts: list[Passage], report: DataReport) -> None:
        """Count the units of the parts that a row shows. Of the others, count the fields `unread` that may hold such
        parts, and marks of their places in texts."""
        shown = {unit for passage in texts for unit in passage.parts}
        count(shown, report.shown)
        for kind in self.kinds:
            if kind.unit not in shown:
                count(kind.unseen(unread), report.unseen.setdefault(kind.unit, {}))
        count(marks_in_texts(texts, shown), report.unread)

    def _tokenize(
        self, read: list[tuple[Row, list[Passage | Document]]], report: DataReport
    ) -> list[tuple[Row, list[Document]]]:
        """Tokenize all texts together, or one row after the other to find a row that fails; keep documents
        unchanged."""
        try:
            passages = [passage for _, passages in read for passage in passages]
            found = iter(documents_of(passages, self.tokenizer, self.kinds))
            return [(row, list(itertools.islice(found, len(passages)))) for row, passages in read]
        except ValueError as error:
            if len(read) > 1:
                return [found for one in read for found in self._tokenize([one], report)]
            self._skip_or_raise(ValueError(f"{read[0][0].place}: {error}"), report)
            return []

    def _skip_or_raise(self, error: ValueError, report: DataReport) -> None:
        is_part = isinstance(error, UnreadablePartError)
        if self.config.on_bad_row == "raise":
            raise ValueError(f"{error} To skip such rows, set data.on_bad_row=skip.") if is_part else error
        report.skip_bad_row(str(error))
        if is_part:
            count([error.unit], report.unreadable)


def render_rows(render: Renderer, rows: list[Row]) -> tuple[Columns, DataReport]:
    """Render rows in a worker process; return their documents and report."""
    documents, report = render(rows)
    return Columns.join(documents), report


class Parts:
    """Iterator over the documents of a renderer's sources in order, 512 rows at a time; `report` counts the rows so
    far.

    Large sources are divided among `data.num_processes` processes; `digest` is updated with all content read. Raises
    ValueError for an unreadable row, for a row that is too long under `overflow=raise`, and at the end if no row is
    left to train on.
    """

    def __init__(self, render: Renderer, digest: Digest | None = None):
        self._render, self._digest = render, digest
        self.report = render.empty_report()

    def __iter__(self) -> Iterator[Columns]:
        rows, config = self._render.sources.rows(self._digest), self._render.config
        beginning = list(itertools.islice(rows, FEW_ROWS + 1))
        batches = _batched(itertools.chain(beginning, rows), ROWS_AT_A_TIME)
        num_processes, render = self._num_processes(), partial(render_rows, self._render)
        render = FromFiles(files, render) if (files := own_files(config)) else render
        alone = num_processes == 1 or len(beginning) <= FEW_ROWS
        for documents, counts in map(render, batches) if alone else map_in_processes(render, batches, num_processes):
            self.report.add(counts)
            self.report.check_bad_rows(config.max_bad_rows)
            yield documents
        for kind in self._render.kinds:
            kind.check(self.report)
        check_any_left(self.report, config, self._render.sources.source)

    def _num_processes(self) -> int:
        """Raises ValueError for several processes that cannot import the objective."""
        config = self._render.config
        if all(own_files(config).values()):
            return config.num_processes or usable_cores()
        if config.num_processes not in (None, 1):
            raise ValueError(
                f"data.num_processes={config.num_processes}: other processes cannot import {type(config).__name__} and "
                "its objective, which a notebook or a script defines. Put them into a module, or remove "
                "data.num_processes."
            )
        return 1


def check_any_left(report: DataReport, config: DataConfig, source: Sources) -> None:
    """Raise ValueError if no row of `source` is left to train on."""
    if report.kept == 0:
        train_on = getattr(config, "train_on", None)
        check = f", or check data.train_on (now {train_on})" if train_on is not None else ""
        raise ValueError(
            f"no row of {source} is left to train on: {report.nothing_left()}. Raise data.max_length (now "
            f"{config.max_length}){check}."
        )


def _batched(rows: Iterable[Row], n: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while some := list(itertools.islice(iterator, n)):
        yield some
