"""Rows to documents: read by their format, tokenised together, cut to length, and counted.

What is the objective's own is its reader: the texts that a row becomes, and which of their tokens fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lean_ft.data.formats import NUM_ROWS_TO_DETECT, RowReader
from lean_ft.data.preference import PairReader
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document, Row
from lean_ft.data.sources import first_rows
from lean_ft.settings import DataConfig, PreferenceDataConfig, SFTDataConfig, Sources
from lean_ft.tokenizers import Passage, Tokenizer

READERS = {SFTDataConfig: RowReader, PreferenceDataConfig: PairReader}


class Reader(Protocol):
    """What an objective makes of a row."""

    @property
    def format(self) -> str:
        """The formats of the rows, for people to read."""
        ...

    def passages(self, row: Row) -> list[Passage | Document]:
        """The sequences of `row`, one for each of the settings' `sides`. Raises ValueError with the row's place."""
        ...

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """The sequences within their lengths, or none where the row is dropped; `report` counts what was lost.

        Raises ValueError, with `place`, for one that is too long under `overflow=raise`.
        """
        ...


def renderer_of(config: DataConfig, tokenizer: Tokenizer, source: Sources) -> "Renderer":
    """What makes documents of the rows of `source`: the reader that the class of `config` stands for.

    A recipe's own subclass is rendered as the class of ours that it extends. Raises ValueError where `source` cannot be
    read, or its rows are of no format that the objective learns from.
    """
    for kind in type(config).__mro__:
        if kind in READERS:
            # A process that renders could not import a class that stands in a recipe.
            known = kind.model_construct(**{name: getattr(config, name) for name in kind.model_fields})
            rows = first_rows(source, NUM_ROWS_TO_DETECT, config)
            return Renderer(known, READERS[kind].of(known, rows, tokenizer, source), tokenizer)
    raise ValueError(
        f"data settings of the class {type(config).__name__} do not say how rows are rendered; expected a subclass of "
        f"{' or '.join(kind.__name__ for kind in READERS)}, of lean_ft.settings."
    )


@dataclass(frozen=True)
class Renderer:
    """Maps rows to documents."""

    config: DataConfig
    reader: Reader
    tokenizer: Tokenizer

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Document], DataReport]:
        """The documents of the rows that can be trained on, in order, and the counts of these rows alone.

        Raises ValueError, with its place, for a row that cannot be read unless `on_bad_row` skips it, and for one that
        is too long under `overflow=raise`. Whoever adds up reports asks them to `check_bad_rows`.
        """
        report = self.empty_report()
        report.rows = len(rows)
        documents = []
        for row, tokenized in self._tokenized(rows, report):
            kept = self.reader.fit(tokenized, row.place, report)
            if kept:
                documents += kept
                report.keep(sum(len(ids) for ids, _ in kept), sum(int(mask[1:].sum()) for _, mask in kept), row.source)
        report.check_bad_rows(self.config.max_bad_rows)
        return documents, report

    def empty_report(self) -> DataReport:
        unit = "pairs" if len(self.config.sides) == 2 else "sequences"
        return DataReport(self.reader.format, detected=self.config.format == "auto", unit=unit)

    def _tokenized(self, rows: Sequence[Row], report: DataReport) -> list[tuple[Row, list[Document]]]:
        """The rows that can be read, each with its sequences."""
        read: list[tuple[Row, list[Passage | Document]]] = []
        for row in rows:
            try:
                read.append((row, passages := self.reader.passages(row)))
                report.rewritten_answers += sum(p.num_rewritten for p in passages if isinstance(p, Passage))
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
