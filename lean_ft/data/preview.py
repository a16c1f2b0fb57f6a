"""Preview of training rows: the text of each token, and whether the token is trained.

The first rows of the source are read, tokenized, truncated and packed as for training, but not shuffled. A preview can
be written as an HTML page without scripts or external resources; all data is escaped.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

import numpy as np

from lean_ft.data.documents import Documents, renderer_of
from lean_ft.data.objective import objective_of
from lean_ft.data.packing import pack_documents
from lean_ft.data.prepare import layout_of
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document
from lean_ft.data.sources import read_rows
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


@dataclass(frozen=True)
class ShownDocument:
    """A document, or a piece of a document cut by packing."""

    place: str
    stretches: list[Stretch]
    num_tokens: int
    num_trained: int
    begins_before: bool
    """Whether this piece continues a document from another row."""
    is_rejected: bool = False
    """Whether this is a rejected or undesirable answer."""

    @property
    def heading(self) -> str:
        goes_on = ", goes on from another row" if self.begins_before else ""
        return f"{self.place}: {self.num_tokens:,} tokens, {self.num_trained:,} trained{goes_on}"


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
    objective, render = objective_of(config), renderer_of(config, tokenizer, config.source)
    report, documents, places, notes = render.empty_report(), list[Document](), list[str](), list[str]()
    for row in read_rows(config.source, None, config):
        found, values, counts = render.with_values([row])
        report.add(counts)
        report.check_bad_rows(config.max_bad_rows)
        documents += found
        names = objective.names(config, values) if found else ()
        places += [f"{row.place}, {name}" if name else row.place for name in names]
        notes += _fate(row.place, counts)
        if report.rows == MOST_ROWS_READ or _enough(config, report, num_rows, batch_size):
            break
    if not documents:
        raise ValueError(f"nothing of {config.source} is left to look at: {report.nothing_left()}.")
    shown = list(_rows(config, tokenizer, Documents.join(documents), places, batch_size))
    return Preview(shown[:num_rows], report, notes)


def _enough(config: DataConfig, report: DataReport, num_rows: int, batch_size: int) -> bool:
    if config.packing == "none":
        return report.kept >= num_rows
    if config.packing == "padding_free":
        return report.kept >= num_rows * batch_size
    return report.tokens >= ENOUGH_TO_PACK * num_rows * config.max_length * len(config.sides)


def _fate(place: str, counts: DataReport) -> list[str]:
    notes = [f"{place}: left out, {reason}" for reason in counts.dropped]
    notes += [f"left out, {problem}" for problem in counts.bad_row_examples]
    return notes + ([f"{place}: cut by {counts.lost_tokens:,} tokens"] if counts.truncated else [])


def _rows(
    config: DataConfig, tokenizer: Tokenizer, documents: Documents, places: list[str], batch_size: int
) -> Iterator[ShownRow]:
    packed = pack_documents(documents, config) if config.packs_rows else {}
    layout = layout_of(documents, packed, config, batch_size, tokenizer.pad_id)
    offsets, worse = layout.offsets, tuple(f", {name}" for name in layout.objective.worse)
    if layout.kind == "flat":
        offsets = np.append(offsets[:-1:batch_size], offsets[-1])
    for first, end in pairwise(offsets):
        shown, used = [], 0
        for piece in layout.order[first:end]:
            start, length = int(layout.starts[piece]), int(layout.lengths[piece])
            number = int(np.searchsorted(documents.starts, start, side="right")) - 1
            ids, trained = layout.tokens[start : start + length], layout.trained[start : start + length].copy()
            begins_before = start != documents.starts[number]
            # Nothing predicts the first token of a document, or of a row whose documents are joined.
            if (used == 0) if layout.joined else not begins_before:
                trained[0] = False
            stretches = stretches_of(tokenizer, ids, trained)
            is_rejected = places[number].endswith(worse)
            document = ShownDocument(places[number], stretches, length, int(trained.sum()), begins_before, is_rejected)
            shown.append(document)
            used += length
        yield ShownRow(shown, layout.row_tokens - used if layout.kind == "packed" else None)


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
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
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


STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; overflow-wrap: anywhere; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; margin: 0; }
section { border: 1px solid #ccc; border-radius: 6px; margin: 1rem 0; }
h2 { font-size: 1rem; margin: 0; padding: .4rem .8rem; background: #eee; }
article { padding: .4rem .8rem; border-top: 1px dashed #999; }
small { color: #666; }
.trained { background: #c7ecc7; }
.rejected .trained { background: #f6cfc9; }
.masked { color: #666; }
.control { font-weight: bold; color: #8a2a8a; }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd; } h2 { background: #2a2a2a; } small, .masked { color: #999; }
  .trained { background: #1f4d26; } .rejected .trained { background: #5c2420; } .control { color: #e39be3; } section { border-color: #444; }
}
"""
# Second line of defense after escaping: the browser runs no scripts and loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def preview_page(preview: Preview, title: str) -> str:
    """Return the HTML page. `title` and the preview's texts are escaped."""
    notes = "".join(f"<li>{_text(note)}</li>" for note in preview.notes)
    rows = "".join(_row(row, i) for i, row in enumerate(preview.rows, start=1))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
        f"<p>{_text(str(preview.report))}</p>\n"
        '<p><span class="trained">trained</span> <span class="masked">masked</span> '
        '<span class="control">control token</span></p>\n'
        f"{f'<ul>{notes}</ul>' if notes else ''}\n{rows}</body>\n</html>\n"
    )


def _row(row: ShownRow, number: int) -> str:
    padding = f"<article><small>{row.padding:,} positions of padding</small></article>\n" if row.padding else ""
    return f"<section>\n<h2>Row {number}</h2>\n{''.join(map(_document, row.documents))}{padding}</section>\n"


def _document(document: ShownDocument) -> str:
    kind = ' class="rejected"' if document.is_rejected else ""
    return (
        f"<article{kind}>\n<small>{_text(document.heading)}</small>\n"
        f"<pre>{''.join(map(_stretch, document.stretches))}</pre>\n</article>\n"
    )


def _stretch(stretch: Stretch) -> str:
    classes = f"{'trained' if stretch.trained else 'masked'}{' control' if stretch.control else ''}"
    return f'<span class="{classes}">{_text(stretch.text)}</span>'


def _text(text: str) -> str:
    return escape(visible(text))
