"""Rows as the model will see them: every token with its text, and whether it carries a label.

The first rows of the source are read, tokenised, cut and packed as for training; only shuffling is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from lean_ft.data.detection import NUM_ROWS_TO_DETECT
from lean_ft.data.documents import Documents
from lean_ft.data.formats import RowReader
from lean_ft.data.layout import Layout
from lean_ft.data.render import Renderer
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document
from lean_ft.data.sources import first_rows, read_rows
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer

MOST_ROWS_READ = 10_000
ENOUGH_TO_PACK = 4  # times as many tokens as the rows shown hold: packing has something to choose from


@dataclass(frozen=True)
class Stretch:
    """Tokens in a row that are alike."""

    text: str
    trained: bool
    control: bool
    """Control tokens, which no text spells."""


@dataclass(frozen=True)
class ShownDocument:
    """A document, or what packing cut of one."""

    place: str
    stretches: list[Stretch]
    num_tokens: int
    num_trained: int
    begins_before: bool
    """Whether this goes on with a document that began in another row."""


@dataclass(frozen=True)
class ShownRow:
    """One row of a batch."""

    documents: list[ShownDocument]
    padding: int | None
    """Positions behind the last document; None where that depends on the batch."""


@dataclass(frozen=True)
class Preview:
    """Rows to look at."""

    rows: list[ShownRow]
    report: DataReport
    """What became of the rows that were read."""
    notes: list[str]
    """A line for each row that was read and then cut or left out."""


def preview(config: SFTDataConfig, tokenizer: Tokenizer, *, num_rows: int, batch_size: int) -> Preview:
    """The first `num_rows` rows of `config.source`, as training would have them in batches of `batch_size`.

    Raises ValueError for a row that cannot be read unless `on_bad_row` skips it, and where nothing is left.
    """
    reader = RowReader.of(config, first_rows(config.source, NUM_ROWS_TO_DETECT, config), tokenizer)
    render = Renderer(config, reader, tokenizer)
    report, documents, places, notes = render.empty_report(), list[Document](), list[str](), list[str]()
    for row in read_rows(config.source, None, config):
        found, counts = render([row])
        report.add(counts)
        report.check_bad_rows(config.max_bad_rows)
        documents += found
        places += [row.place] * len(found)
        notes += _fate(row.place, counts)
        if report.rows == MOST_ROWS_READ or _enough(config, report, num_rows, batch_size):
            break
    if not documents:
        raise ValueError(f"nothing of {config.source} is left to look at: {report.nothing_left()}.")
    laid_out = Documents.of(
        np.concatenate([ids for ids, _ in documents]),
        np.concatenate([mask for _, mask in documents]),
        np.array([len(ids) for ids, _ in documents]),
        np.array([mask[1:].sum() for _, mask in documents]),
    )
    shown = list(_rows(config, tokenizer, laid_out, places, batch_size))
    return Preview(shown[:num_rows], report, notes)


def _enough(config: SFTDataConfig, report: DataReport, num_rows: int, batch_size: int) -> bool:
    if config.packing == "none":
        return report.kept >= num_rows
    if config.packing == "padding_free":
        return report.kept >= num_rows * batch_size
    return report.tokens >= ENOUGH_TO_PACK * num_rows * config.max_length


def _fate(place: str, counts: DataReport) -> list[str]:
    notes = [f"{place}: left out, {reason}" for reason in counts.dropped]
    notes += [f"left out, {problem}" for problem in counts.bad_row_examples]
    return notes + ([f"{place}: cut by {counts.lost_tokens:,} tokens"] if counts.truncated else [])


def _rows(
    config: SFTDataConfig, tokenizer: Tokenizer, documents: Documents, places: list[str], batch_size: int
) -> Iterator[ShownRow]:
    layout = Layout(config, batch_size, tokenizer.pad_id, Path())
    rows = layout.rows(documents, DataReport(""), key=None)
    offsets = rows.offsets
    if rows.layout == "flat":
        offsets = np.append(offsets[:-1:batch_size], offsets[-1])
    for first, end in pairwise(offsets):
        shown, used = [], 0
        for piece in rows.order[first:end]:
            start, length = int(rows.starts[piece]), int(rows.lengths[piece])
            number = int(np.searchsorted(documents.starts, start, side="right")) - 1
            ids, trained = rows.tokens[start : start + length], rows.trained[start : start + length].copy()
            begins_before = start != documents.starts[number]
            # Nothing predicts a document's first token, unless the row is one text; nor a row's, then.
            if (used == 0) if rows.joined else not begins_before:
                trained[0] = False
            stretches = stretches_of(tokenizer, ids, trained)
            shown.append(ShownDocument(places[number], stretches, length, int(trained.sum()), begins_before))
            used += length
        yield ShownRow(shown, config.max_length - used if rows.layout == "packed" else None)


def stretches_of(tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray) -> list[Stretch]:
    """The text of `ids` (T,), cut where `trained` (T,) changes and around control tokens."""
    tokens = [tokenizer.token_text(int(token_id)) for token_id in ids]
    is_control = [token in tokenizer.control_tokens for token in tokens]
    stretches, end, before = [], 0, ""
    for (is_trained, is_controls), group in groupby(range(len(ids)), key=lambda i: (bool(trained[i]), is_control[i])):
        indices = list(group)
        end = indices[-1] + 1
        # The text up to here less the text before: some tokenizers drop the space that a text begins with. Where a
        # character's bytes are divided, it belongs to the stretch that completes it.
        text = tokenizer.decode(ids[:end].tolist())
        if is_controls:
            stretches.append(Stretch("".join(tokens[i] for i in indices), is_trained, True))
        else:
            stretches.append(Stretch(text[len(before.rstrip("\ufffd")) :], is_trained, False))
        before = text
    return stretches
