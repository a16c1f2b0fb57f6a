"""Preview of training rows: the text of each token, and whether the token is trained.

The first rows of the source are read, tokenized, truncated and packed as for training, but not shuffled.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np

from lean_ft.data.arrangement import arrange
from lean_ft.data.columns import Columns, Document
from lean_ft.data.documents import renderer_of
from lean_ft.data.objective import objective_of
from lean_ft.data.report import DataReport
from lean_ft.settings import DataConfig
from lean_ft.tokenizers import Tokenizer

MOST_ROWS_READ = 10_000
ENOUGH_TO_PACK = 4  # read this many times the tokens of the shown rows, so that packing has a choice


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens with equal flags."""

    text: str
    trained: bool
    control: bool
    """Whether these are control tokens, such as eos."""
    picture: Callable[[], str] | None = None
    """Makes the data URL of a small picture, if these tokens represent something visible."""


@dataclass(frozen=True)
class ShownDocument:
    """A document, or a piece of a document cut by packing."""

    place: str
    stretches: list[Stretch]
    num_tokens: int
    num_trained: int
    is_continued: bool
    """Whether this piece continues a document from another row."""
    is_rejected: bool = False
    """Whether this is a rejected or undesirable answer."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns for rewards."""

    @property
    def heading(self) -> str:
        continued = ", continued from another row" if self.is_continued else ""
        return f"{self.place}: {self.num_tokens:,} tokens, {self.num_trained:,} trained{continued}"


@dataclass(frozen=True)
class ShownRow:
    """One row of a batch."""

    documents: list[ShownDocument]
    padding: int | None
    """Number of padding positions after the last document; None if it depends on the batch."""


@dataclass(frozen=True)
class Preview:
    """The first rows of a source."""

    rows: list[ShownRow]
    report: DataReport
    """Counts of the rows that were read."""
    notes: list[str]
    """One line per truncated or dropped row."""


def preview(config: DataConfig, tokenizer: Tokenizer, *, num_rows: int, batch_size: int) -> Preview:
    """Return the first `num_rows` rows of `config.source` as in training batches of `batch_size`.

    Raises ValueError for an unreadable row unless `on_bad_row` skips it, and if no row is left.
    """
    render = renderer_of(config, tokenizer)
    report, documents, notes = render.empty_report(), list[Document](), list[str]()
    origins = list[tuple[str, dict[str, Any]]]()  # of each document: place and columns for rewards
    for row in render.sources.rows():
        found, counts = render([row])
        report.add(counts)
        report.check_bad_rows(config.max_bad_rows)
        documents += found
        names = render.reader.names(row) if found else ()
        origins += [(f"{row.place}, {name}" if name else row.place, render.reader.columns(row)) for name in names]
        notes += _notes(row.place, counts)
        if report.rows == MOST_ROWS_READ or _enough(config, report, num_rows, batch_size):
            break
    if not documents:
        raise ValueError(f"no row of {config.source} is left to show: {report.nothing_left()}.")
    shown = _rows(config, tokenizer, Columns.join(documents), origins, batch_size)
    return Preview(list(islice(shown, num_rows)), report, notes)


def _enough(config: DataConfig, report: DataReport, num_rows: int, batch_size: int) -> bool:
    if config.packing == "none":
        return report.kept >= num_rows
    if config.packing == "padding_free":
        return report.kept >= num_rows * batch_size
    return report.tokens >= ENOUGH_TO_PACK * num_rows * config.max_length * len(config.sides)


def _notes(place: str, counts: DataReport) -> list[str]:
    notes = [f"{place}: dropped, {reason}" for reason in counts.dropped]
    notes += [f"skipped, {problem}" for problem in counts.bad_row_examples]
    return notes + ([f"{place}: truncated by {counts.lost_tokens:,} tokens"] if counts.truncated else [])


def _rows(
    config: DataConfig,
    tokenizer: Tokenizer,
    columns: Columns,
    origins: list[tuple[str, dict[str, Any]]],
    batch_size: int,
) -> Iterator[ShownRow]:
    arrangement = arrange(columns.lengths, config, batch_size)
    objective = objective_of(config)
    offsets, worse = arrangement.offsets, tuple(f", {name}" for name in objective.worse)
    if arrangement.kind == "flat":
        offsets = np.append(offsets[:-1:batch_size], offsets[-1])
    for first, end in pairwise(offsets):
        shown, used = [], 0
        for piece in range(first, end):
            number, start = int(arrangement.documents[piece]), int(arrangement.firsts[piece])
            document = columns[number][start : start + int(arrangement.lengths[piece])]
            trained = document.trained.copy()
            # Nothing predicts the first token of a document, or of a row whose documents are joined.
            if (used == 0) if arrangement.joined else start == 0:
                trained[0] = False
            stretches = _with_inserts(tokenizer, document, trained)
            place, named = origins[number]
            counts = len(document), int(trained.sum())
            shown.append(ShownDocument(place, stretches, *counts, start > 0, place.endswith(worse), named))
            for name, other in objective.beside(document).items():
                counts = len(other), int(other.trained[1:].sum())
                stretches = stretches_of(tokenizer, other.ids, other.trained)
                shown.append(ShownDocument(f"{place}, {name}", stretches, *counts, is_continued=False))
            used += len(document)
        yield ShownRow(shown, arrangement.row_tokens - used if arrangement.kind == "packed" else None)


def _with_inserts(tokenizer: Tokenizer, document: Document, trained: np.ndarray) -> list[Stretch]:
    """Return the stretches of a document, with one stretch for each thing that is no text."""
    shown, before = list[Stretch](), 0
    inserts = [insert for kind in document.kinds for insert in kind.inserts(document)]
    for first, end, text, picture in sorted(inserts, key=lambda insert: insert.first):
        shown += stretches_of(tokenizer, document.ids[before:first], trained[before:first])
        shown.append(Stretch(text, False, True, picture))
        before = end
    return shown + stretches_of(tokenizer, document.ids[before:], trained[before:])


def stretches_of(tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray) -> list[Stretch]:
    """Return the text of `ids` (T,), split where `trained` (T,) changes and around control tokens."""
    tokens = [tokenizer.token_text(int(token_id)) for token_id in ids]
    is_control = [token in tokenizer.control_tokens for token in tokens]
    stretches, end, before = [], 0, ""
    for (is_trained, is_controls), group in groupby(range(len(ids)), key=lambda i: (bool(trained[i]), is_control[i])):
        indices = list(group)
        end = indices[-1] + 1
        # Decode the whole prefix and subtract the previous text: some tokenizers drop a leading space. A character
        # split across stretches belongs to the stretch that completes it.
        text = tokenizer.decode(ids[:end].tolist())
        if is_controls:
            stretches.append(Stretch("".join(tokens[i] for i in indices), is_trained, True))
        else:
            stretches.append(Stretch(text[len(before.rstrip("\ufffd")) :], is_trained, False))
        before = text
    return stretches


# HTML and terminal output ---------------------------------------------------------------------------------------------

NEWLINE = "↵\n"
_OTHERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufdd0-\ufdef\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Show line ends, and replace control, zero-width and bidirectional characters with symbols or codes."""
    return _OTHERS.sub(_sign, text).replace("\n", NEWLINE)


def _sign(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # ␛ for escape
    if unicodedata.category(match.group()) == "Cs":
        return "\ufffd"
    return f"⟨U+{code:04X}⟩"
