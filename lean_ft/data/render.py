"""Rows to documents: read by their format, tokenised together, cut to length, and counted."""

from collections.abc import Sequence
from dataclasses import dataclass

from lean_ft.data.formats import RowReader
from lean_ft.data.report import DataReport
from lean_ft.data.sources import Row
from lean_ft.data.truncation import Document, fit
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer


@dataclass(frozen=True)
class Renderer:
    """Maps rows to documents; it can be pickled, so that other processes do the same."""

    config: SFTDataConfig
    reader: RowReader
    tokenizer: Tokenizer

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Document], DataReport]:
        """The documents of the rows that can be trained on, in order, and the counts of these rows alone.

        Raises ValueError, with its place, for a row that cannot be read and for one that is too long under
        `overflow=raise`.
        """
        report = DataReport(self.reader.format, rows=len(rows))
        passages = [self.reader.passage(row) for row in rows]
        documents = []
        for row, document in zip(rows, self.tokenizer.tokenize(passages), strict=True):
            kept = fit(document, self.config, row.place, report)
            if kept is not None:
                documents.append(kept)
                report.kept += 1
                report.tokens += len(kept[0])
                report.target_tokens += int(kept[1][1:].sum())
        return documents, report
