"""Labels of tokens: `classify` with `data.labels_per=token`. A row has words, a text with spans, or a prompt and steps.

- `tokens` with `labels`, `ner_tags` or `tags`: one name or integer for each word. Words are joined by a space, or by
  `data.separator`. A word without a label has null or -100.
- `text` with `spans` [{start, end, label}] in characters, the end excluded, which do not overlap. The first word of a
  span has the label B-LABEL, its other words I-LABEL, and words outside spans O. A word is a run of letters, digits and
  underscores, or one other character; a span's ends divide words.
- `prompt` and `completions`, a list of steps, with `labels`: whether each step is right, or the probability that it is.
  This is TRL's format of stepwise supervision: prompt and steps are tokenized one by one, `data.separator` (a line
  break) follows each step, and its last token has the step's label.

The first token of a word has its label, and the others have none, as in transformers' examples. The tokenizer's
offsets say which token that is. A label without such a token, or behind the place where the row is cut, is counted.
Labels are not shifted: the output layer reads the token that has the label.

Legend: T tokens of a text, K tokens of a batch, U words or steps of a row, P labels of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from lean_ft.data.chats import check_text, parse_if_json
from lean_ft.data.classification import TextBatch, check_one_kind, first_names, found_labels, index_of, kind_of_label
from lean_ft.data.columns import OF_LOSS, Document
from lean_ft.data.formats import NUM_ROWS_TO_DETECT, Fields, RowReader, formats_of, how_to_rename, reading
from lean_ft.data.objective import Objective
from lean_ft.data.report import DataReport
from lean_ft.data.rows import IGNORED, Row, kind
from lean_ft.data.sources import RowSources
from lean_ft.settings import ClassificationDataConfig
from lean_ft.system.foreign_values import JSON
from lean_ft.tokenizers import Passage, Tokenizer

if TYPE_CHECKING:
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns

LABEL = "token_label"
"""Column of tokens: the index of the token's label, for a step the probability that it is right, or `IGNORED`."""
_GIVEN = "num_labels"  # column of a document until it is cut: the number of labels that its row has
WORDS, SPANS, STEPS = "tagged_words", "tagged_spans", "steps"
NAMES = ("labels", "ner_tags", "tags")
KNOWN = {
    STEPS: Fields(
        ("prompt", "completions"),
        ("labels",),
        text="completions",
        becomes="a prompt and steps, each right or wrong, for `classify` with `data.labels_per=token`",
    ),
    WORDS: Fields(
        ("tokens",),
        NAMES,
        text="tokens",
        becomes="words with a label each, for `classify` with `data.labels_per=token`",
    ),
    SPANS: Fields(
        ("text",),
        ("spans",),
        text="text",
        becomes="a text with labeled spans of characters, for `classify` with `data.labels_per=token`",
    ),
}
STEP_NAMES = ["false", "true"]
_WORD = re.compile(r"\w+|[^\w\s]")
Span = tuple[int, int]


@dataclass(frozen=True)
class Units:
    """The words or steps of a row."""

    labels: Sequence[JSON]
    """(U,) as the row has them; None for a unit without a label."""
    text: str = ""
    spans: Sequence[Span] = ()
    """(U,) places of words in the text."""
    steps: Sequence[str] | None = None
    prompt: str = ""


def units_of(row: Row, fields: dict[str, Any], form: str, separator: str | None, needs_labels: bool = True) -> Units:
    """Return the words or steps of a row with their labels; without `needs_labels`, all labels are None.

    Raises ValueError unless there are words or steps, each with a label, and unless spans are apart in the text.
    """
    if form == SPANS:
        return _units_of_spans(fields, row, needs_labels)
    name = "tokens" if form == WORDS else "completions"
    units = parse_if_json(fields[name], name)
    if not isinstance(units, list) or not units:
        raise ValueError(f"`{name}` is {kind(units)} ({units!r:.40}); expected a list of texts, with one at least.")
    what = "word" if form == WORDS else "step"
    for i, unit in enumerate(units, start=1):
        if not isinstance(unit, str) or not unit.strip():
            raise ValueError(f"{what} {i} of `{name}` is {unit!r:.40}; expected a text that is not empty.")
    labels = _listed(row, fields, len(units), f"{what}s", name) if needs_labels else [None] * len(units)
    if form == STEPS:
        steps = [step + ("\n" if separator is None else separator) for step in units]
        return Units(labels, steps=steps, prompt=check_text(fields["prompt"], "the field `prompt`"))
    between = " " if separator is None else separator
    ends = np.cumsum([len(word) + len(between) for word in units]) - len(between)
    return Units(
        labels, between.join(units), [(int(e) - len(word), int(e)) for e, word in zip(ends, units, strict=True)]
    )


def _listed(row: Row, fields: dict[str, Any], num_units: int, units: str, of: str) -> list[JSON]:
    """Return the labels of words or steps, one for each. Raises ValueError for another number of labels."""
    names = NAMES if of == "tokens" else ("labels",)
    name = next((name for name in names if name in fields), None)
    if name is None:
        expected = " or ".join(f"`{name}`" for name in names)
        raise ValueError(f"no field {expected} beside `{of}`. {how_to_rename(row.fields, [('labels',)])}")
    labels = parse_if_json(fields[name], name)
    if not isinstance(labels, list) or len(labels) != num_units:
        found = f"{len(labels)} labels" if isinstance(labels, list) else kind(labels)
        raise ValueError(f"`{name}` is {found}, and `{of}` has {num_units} {units}; expected a label for each.")
    return [None if label == IGNORED and not isinstance(label, bool) else label for label in labels]


def _units_of_spans(fields: dict[str, Any], row: Row, needs_labels: bool) -> Units:
    text = check_text(fields["text"], "the field `text`")
    if not text.strip():
        raise ValueError("`text` is empty. Remove the row, or add a text.")
    spans: list[tuple[int, int, str]] = []
    if needs_labels:
        if "spans" not in fields:
            raise ValueError(f"no field `spans` beside `text`. {how_to_rename(row.fields, [('spans',)])}")
        spans = _spans(parse_if_json(fields["spans"], "spans"), len(text))
    borders = sorted({border for start, end, _ in spans for border in (start, end)})
    words = list[Span]()
    for match in _WORD.finditer(text):
        inside = [border for border in borders if match.start() < border < match.end()]
        words += zip([match.start(), *inside], [*inside, match.end()], strict=True)
    if not words:
        raise ValueError(f"`text` is {text!r:.40}, which has no word. Remove the row.")
    labels: list[JSON] = [None if not needs_labels else "O"] * len(words)
    for start, end, label in spans:
        covered = [i for i, word in enumerate(words) if start <= word[0] < end]
        if not covered:
            raise ValueError(f"the span from {start} to {end} covers only spaces. Remove it.")
        for i in covered:
            labels[i] = f"{'B' if i == covered[0] else 'I'}-{label}"
    return Units(labels, text, words)


def _spans(spans: JSON, num_characters: int) -> list[tuple[int, int, str]]:
    """Return (start, end, label) of each span in order. Raises ValueError for spans that are no such objects, that
    overlap, or that leave the text."""
    found = list[tuple[int, int, str]]()
    for span in spans if isinstance(spans, list) else [spans]:
        values = [span.get(name) for name in ("start", "end", "label")] if isinstance(span, dict) else []
        start, end, label = values or (None, None, None)
        if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label.strip():
            raise ValueError(f'a span is {span!r:.60}; expected {{"start": 0, "end": 5, "label": "NAME"}}.')
        if not 0 <= start < end <= num_characters:
            raise ValueError(
                f"the span from {start} to {end} is not in the text of {num_characters} characters. `start` counts "
                "from 0, and `end` is the character after the last."
            )
        found.append((start, end, label.strip()))
    found.sort()
    for (start, end, _), (next_start, next_end, _) in pairwise(found):
        if next_start < end:
            raise ValueError(
                f"the spans from {start} to {end} and from {next_start} to {next_end} overlap. A word has one label: "
                "keep one of them."
            )
    return found


def spans_of(words: Sequence[Span], labels: Sequence[str | None]) -> list[dict[str, JSON]]:
    """Return the spans that labels O, B-NAME and I-NAME of words describe, as rows have them. I-NAME behind another
    label begins a span."""
    found, is_open = list[dict[str, JSON]](), False
    for (start, end), label in zip(words, labels, strict=True):
        prefix, _, name = (label or "O").partition("-")
        if prefix == "O":
            is_open = False
        elif prefix == "I" and is_open and found[-1]["label"] == name:
            found[-1]["end"] = end
        else:
            found.append({"start": start, "end": end, "label": name})
            is_open = True
    return found


def first_tokens(starts: np.ndarray, ends: np.ndarray, words: Sequence[Span]) -> np.ndarray:
    """Return the first token of each word, (U,), or -1 for a word that has no token.

    starts, ends: (T,) characters that each token covers; words: places of words, in order. A token that covers nothing
    belongs to the next character (`Encoding`). A token that covers two words is the first word's.
    """
    begins, ends_of_words = np.array(words).reshape(-1, 2).T
    behind = np.append(np.where(starts == ends, ends + 1, ends), np.iinfo(np.int64).max)
    found = np.searchsorted(behind[:-1], begins, side="right")
    found = np.where((found < len(starts)) & (np.append(starts, 0)[found] < ends_of_words), found, -1)
    is_new = np.append(True, found[1:] != np.maximum.accumulate(found)[:-1])
    return np.where(is_new, found, -1)


def with_token_labels(config: ClassificationDataConfig) -> ClassificationDataConfig:
    """Return the settings with `labels` set: the configured labels, those of steps, or all in `source`, sorted.

    Raises ValueError with the place of a row whose labels cannot be read.
    """
    config = config.model_copy(update={"multi_label": False})
    if config.labels is not None:
        return config
    sources = RowSources.of(config)
    formats = formats_of(sources, sources.first_rows(NUM_ROWS_TO_DETECT), KNOWN)
    found, kinds = set[str](), dict[str, JSON]()
    for row in sources.rows():
        form = formats[row.source]
        if form.name not in KNOWN:
            break  # the reader refuses it
        with suppress(ValueError) if config.on_bad_row == "skip" else nullcontext(), reading(row):
            units = units_of(row, form.fields_of(row), form.name, config.separator)
            if form.name == STEPS:
                found |= {*STEP_NAMES}
                continue
            for label in units.labels:
                if label is not None:
                    found.add(_name(label))
                    kinds.setdefault(kind_of_label(label), label)
    check_one_kind(kinds, config.source)
    return found_labels(config, found)


def _name(label: JSON) -> str:
    """Raises ValueError unless the label of a word is a name or an integer."""
    if not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"the label of a word is {kind(label)} ({label!r:.40}); expected a name or an integer.")
    return str(label).strip()


def _probability(label: JSON) -> float:
    """Raises ValueError unless the label of a step is true, false, or a probability."""
    if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
        raise ValueError(
            f"the label of a step is {label!r:.40}; expected true or 1 for a right step, false or 0 for a wrong one, "
            "or the probability that it is right."
        )
    return float(label)


class Labeled(NamedTuple):
    """The tokens of a row."""

    units: Units
    ids: np.ndarray  # (T,) int32
    places: np.ndarray  # (U,) int64: token of each unit, -1 if it has none


@dataclass(frozen=True)
class TokenLabelReader(RowReader):
    """Converts a row to its text and the labels of its tokens. Without names (`labels=[]`), each word or step has the
    label 0, for rows to score."""

    config: ClassificationDataConfig
    known: ClassVar[dict[str, Fields]] = KNOWN
    expected: ClassVar[str] = (
        "reads labels of tokens (data.labels_per=token): `tokens` with `labels`, `text` with `spans`, or `prompt` and "
        "`completions` with `labels`. If the columns have other names, set data.columns."
    )

    @classmethod
    def of(cls, sources: RowSources, first_rows: Sequence[Row], tokenizer: Tokenizer) -> Self:
        reader = super().of(sources, first_rows, tokenizer)
        if tokenizer.media:
            raise ValueError("data.labels_per=token reads texts alone. Set model.images=none.")
        if reader.config.separator is not None and all(form.name == SPANS for form in reader.formats.values()):
            raise ValueError(
                "data.separator is between the words of `tokens` or after steps, and these rows have `text`. Remove it."
            )
        names = reader.config.labels
        if names and len(names) != 2 and any(form.name == STEPS for form in reader.formats.values()):
            raise ValueError(f"data.labels has {first_names(names)}; a step has 2 labels, such as [false, true].")
        return reader

    def units(self, row: Row) -> Units:
        """Return the words or steps of a row. Raises ValueError with the row's place."""
        with reading(row):
            fields, form = self.fields_of(row), self.formats[row.source].name
            return units_of(row, fields, form, self.config.separator, needs_labels=self.config.labels != [])

    def names(self, row: Row) -> list[str]:
        labels = [str(label) for label in self.units(row).labels if label is not None]
        others = [label for label in labels if label != "O"] or labels[:1]
        return [" ".join([*others[:2], *["..."] * (len(others) > 2)])]

    def passages(self, row: Row) -> list[Passage | Document]:
        units = self.units(row)
        with reading(row):
            values = np.array(self._values(units), dtype=np.float32)  # (U,)
            ids, places = self._tokens(units)
            column = np.full(len(ids), IGNORED, dtype=np.float32)
            column[places[places >= 0]] = values[places >= 0]
            given = np.array([(values != IGNORED).sum()], dtype=np.int64)
            return [Document(ids, column != IGNORED, {LABEL: column}, {_GIVEN: given})]

    def labeled(self, row: Row) -> Labeled:
        """Return the tokens of a row without truncation, and the token of each word or step."""
        units = self.units(row)
        with reading(row):
            return Labeled(units, *self._tokens(units))

    def _tokens(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (T,) and the token of each unit (U,), -1 if it has none."""
        return self._of_words(units) if units.steps is None else self._of_steps(units)

    def _values(self, units: Units) -> list[float]:
        """Return the value of each unit for the column."""
        names = self.config.labels
        if names == []:
            return [0.0] * len(units.labels)
        read = _probability if units.steps is not None else lambda label: float(index_of(_name(label), names or []))
        # `leanft validate` reads rows before their labels are found: any name is a label then.
        return [IGNORED if label is None else max(0.0, read(label)) for label in units.labels]

    def _of_words(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (T,) and the first token of each word (U,)."""
        encoding = self.tokenizer.encoding(units.text)
        places = first_tokens(encoding.starts, encoding.ends, units.spans)
        bos = self._bos(encoding.ids)
        return np.append(bos, encoding.ids), np.where(places < 0, -1, places + len(bos))

    def _of_steps(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (T,) and the last token of each step (U,). Separators are encoded by themselves, as TRL does."""
        assert units.steps is not None
        between = "\n" if self.config.separator is None else self.config.separator
        end = self.tokenizer.encode(between)
        prompt = np.array(self.tokenizer.encode(units.prompt), dtype=np.int32)
        steps = [self.tokenizer.encode(step.removesuffix(between)) + end for step in units.steps]
        parts = [self._bos(prompt), prompt, *(np.array(step, dtype=np.int32) for step in steps)]
        return np.concatenate(parts), np.cumsum([len(part) for part in parts])[2:] - 1

    def _bos(self, ids: np.ndarray) -> np.ndarray:
        """Return the bos that the model expects before `ids`, unless they have it."""
        bos = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        return np.array([bos] if bos is not None and ids[:1].tolist() != [bos] else [], dtype=np.int32)

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        [document] = documents
        if (kept := self.truncated(document, place, report)) is None:
            return []
        report.count_lost(len(document) - len(kept))
        num_lost = int(document.per_document[_GIVEN][0] - kept.trained.sum())
        report.note("labels lost, because their word has no token or the row is cut", num_lost)
        if not kept.trained.any():
            report.drop("no label within max_length")
            return []
        return [replace(kept, per_document={})]


class TokenLabels(Objective):
    reader = TokenLabelReader
    batch_type = TextBatch
    unit = "texts"
    judged = "labels"
    recipe = "classify"
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "eval_macro_f1": "macro-F1 {:.3f}",
        "eval_entity_f1": "F1 of entities {:.3f}",
    }
    of_loss = (*OF_LOSS, LABEL)
    marks = (("prompt", "completions", "labels"), *(("tokens", name) for name in NAMES), ("text", "spans"))

    def settings_of_file(self, fields: Set[str]) -> list[str]:
        return ["data.labels_per=token"]

    def completed(self, config: ClassificationDataConfig) -> ClassificationDataConfig:
        return with_token_labels(config)

    def label_values(self, columns: Columns) -> np.ndarray:
        """(P, 1) index of each label of all tokens."""
        from lean_ft.data.collate import ranges  # loads torch

        values = columns.values[LABEL][ranges(columns.starts, columns.lengths)]
        return np.round(values[values != IGNORED])[:, None]

    def full(self, document: Document) -> Document:
        return replace(document, per_token={**document.per_token, LABEL: np.zeros(len(document), dtype=np.float32)})

    def counted_documents(self, placed: Placed) -> np.ndarray:
        labels = placed.of_tokens(LABEL)
        return placed.documents[placed.text[labels != IGNORED]]

    def row_fields(self, columns: Columns, placed: Placed) -> dict[str, Any]:
        num_labels = int((placed.of_tokens(LABEL) != IGNORED).sum())
        return {"num_texts": num_labels, "num_targets": num_labels}

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        values = placed.of_tokens(LABEL)  # (K,)
        is_label = values != IGNORED
        targets = values[is_label]
        is_hard = (targets == np.round(targets)).all()
        return {
            "last": placed.place[is_label],
            "targets": targets.astype(np.int64) if is_hard else targets,
            "text_of": placed.text[is_label],
        }


OBJECTIVE = TokenLabels()
