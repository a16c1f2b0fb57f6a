"""Rows to documents: read by their format, tokenised together, cut to length, and counted."""

from collections.abc import Sequence
from dataclasses import dataclass

from lean_ft.data.formats import RowReader
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document, Row
from lean_ft.data.truncation import fit
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Passage, Tokenizer


@dataclass(frozen=True)
class Renderer:
    """Maps rows to documents."""

    config: SFTDataConfig
    reader: RowReader
    tokenizer: Tokenizer

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Document], DataReport]:
        """The documents of the rows that can be trained on, in order, and the counts of these rows alone.

        Raises ValueError, with its place, for a row that cannot be read unless `on_bad_row` skips it, and for one that
        is too long under `overflow=raise`. Whoever adds up reports asks them to `check_bad_rows`.
        """
        report = self.empty_report()
        report.rows = len(rows)
        documents = []
        for row, document in self._tokenized(rows, report):
            kept = fit(document, self.config, row.place, report)
            if kept is not None:
                documents.append(kept)
                report.keep(len(kept[0]), int(kept[1][1:].sum()), row.source)
        report.check_bad_rows(self.config.max_bad_rows)
        return documents, report

    def empty_report(self) -> DataReport:
        return DataReport(self.reader.format, detected=self.config.format == "auto")

    def _tokenized(self, rows: Sequence[Row], report: DataReport) -> list[tuple[Row, Document]]:
        """The rows that can be read, each with its document."""
        read: list[tuple[Row, Passage | Document]] = []
        for row in rows:
            try:
                read.append((row, passage := self.reader.passage(row)))
                report.rewritten_answers += passage.num_rewritten if isinstance(passage, Passage) else 0
            except ValueError as error:
                self._skip_or_raise(error, report)
        texts = [(row, passage) for row, passage in read if isinstance(passage, Passage)]
        try:
            documents = self.tokenizer.tokenize([passage for _, passage in texts])
        except ValueError:  # one of them: find it
            return [found for row, passage in read if (found := self._alone(row, passage, report))]
        tokenized = iter(documents)
        return [(row, next(tokenized) if isinstance(passage, Passage) else passage) for row, passage in read]

    def _alone(self, row: Row, passage: Passage | Document, report: DataReport) -> tuple[Row, Document] | None:
        try:
            return row, self.tokenizer.tokenize([passage])[0] if isinstance(passage, Passage) else passage
        except ValueError as error:
            self._skip_or_raise(ValueError(f"{row.place}: {error}"), report)
            return None

    def _skip_or_raise(self, error: ValueError, report: DataReport) -> None:
        if self.config.on_bad_row == "raise":
            raise error
        report.skip_bad_row(str(error))
