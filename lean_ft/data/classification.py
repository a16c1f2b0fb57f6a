"""Text classification: a row has a `text` and a `label`, or with `data.multi_label` a list of `labels`.

With `data.labels_per=token`, `lean_ft.data.token_labels` reads other rows, whose tokens have labels.

A label is a name or an integer. An integer indexes the names of `data.labels`, unless the names are numbers themselves.
An integer does not index names that were found in the rows: their alphabetical order need not match the user's numbers.
If the lists of a source's first rows all have a 0 or 1 for each label, all lists are read as one-hot. Texts are encoded
as in transformers' pipelines, and classified at the last token. If the tokenizer reads other parts than text,
each text and its parts are a user message in the chat template, up to the place of an answer.

Legend: P texts of a batch, C labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from lean_ft.data.batch import Batch
from lean_ft.data.chats import check_text, parse_if_json
from lean_ft.data.columns import Document
from lean_ft.data.foreign_fields import is_given
from lean_ft.data.formats import (
    NUM_ROWS_TO_DETECT,
    Fields,
    RowFormat,
    RowReader,
    as_chat,
    formats_of,
    how_to_rename,
    reading,
)
from lean_ft.data.objective import Objective, objective_of
from lean_ft.data.pairs import NUMBER
from lean_ft.data.parts import PART_FIELDS
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row, kind
from lean_ft.data.sources import RowSources
from lean_ft.settings import ClassificationDataConfig, Sources
from lean_ft.system.foreign_values import JSON
from lean_ft.system.spelling import did_you_mean
from lean_ft.tokenizers import Passage, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from lean_ft.data.batches import Batches
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns

_NUMBERS = {kind(0), "a string with a number"}
KNOWN = {
    "classification": Fields(
        ("text",),
        ("label", "labels", *PART_FIELDS),
        text="text",
        becomes="a text with its label or labels, for `classify`",
    )
}


class FoundLabels(list[str]):
    """Sorted names of all labels in the training rows, used if `data.labels` is null."""


def with_labels(config: ClassificationDataConfig) -> ClassificationDataConfig:
    """Return the settings with `labels` set: the configured labels, or all labels in `source`, sorted; and with
    `multi_label` true or false.

    Raises ValueError with the place of a row whose labels cannot be read.
    """
    if (objective := objective_of(config)) is not OBJECTIVE:
        return objective.completed(config)  # pyright: ignore[reportReturnType]
    names = config.labels
    if names is not None and config.multi_label != "auto":
        return config
    sources = RowSources.of(config)
    beginning = sources.first_rows(NUM_ROWS_TO_DETECT)
    formats = formats_of(sources, beginning, KNOWN)
    config = _with_kind(config, beginning, formats)
    if names is None:
        one_hot, found, kinds = _one_hot_length(beginning, formats, config), set[str](), dict[str, Any]()
        for row in sources.rows():
            with suppress(ValueError) if config.on_bad_row == "skip" else nullcontext():
                found.update(_labels_of(row, formats[row.source], config, one_hot))
                for label in () if one_hot else _listed(row, formats[row.source], config):
                    kinds.setdefault(kind_of_label(label), label)
        check_one_kind(kinds, config.source)
        found.update(map(str, range(one_hot)))  # also labels that no row has
        return found_labels(config, found)
    return config


def found_labels(config: ClassificationDataConfig, found: Iterable[str]) -> ClassificationDataConfig:
    """Return the settings with the labels that the training rows have. Raises ValueError for fewer than 2."""
    names = FoundLabels(sorted(found, key=lambda name: (0, int(name), "") if _is_index(name) else (1, 0, name)))
    if len(names) < 2:
        raise ValueError(f"{config.source} has the labels {names}; classification needs 2 or more.")
    return config.model_copy(update={"labels": names})


def kind_of_label(label: JSON) -> str:
    if isinstance(label, str):
        return "a string with a number" if re.fullmatch(NUMBER, label) else "a name"
    return kind(label)


def check_one_kind(kinds: Mapping[str, JSON], source: Sources) -> None:
    """Raise ValueError if the training rows mix kinds of labels. kinds: kind -> an example."""
    if kinds.keys() - {"a string with a number", "a name"} and len(kinds) > 1 and set(kinds) != _NUMBERS:
        found = ", ".join(f"{label!r:.40} ({name})" for name, label in kinds.items())
        raise ValueError(
            f"{source} has labels of several kinds: {found}. Write all labels in one way, or set data.labels to the "
            "names in the order that the integers index."
        )


def _with_kind(
    config: ClassificationDataConfig, rows: Sequence[Row], formats: dict[int, RowFormat]
) -> ClassificationDataConfig:
    """Return the settings with `multi_label` true or false: `auto` is true if `rows` have `labels` and no `label`."""
    if config.multi_label != "auto":
        return config
    names = {name for row in rows for name in formats[row.source].fields_of(row)}
    return config.model_copy(update={"multi_label": "labels" in names and "label" not in names})


def _one_hot_length(rows: Sequence[Row], formats: dict[int, RowFormat], config: ClassificationDataConfig) -> int:
    """Return the number of labels if the lists of `rows` have a 0 or 1 for each label, else 0."""
    lists = list[list[Any]]()
    for row in rows if config.multi_label else ():
        with suppress(ValueError):  # such a row is reported when it is read
            lists.append(_listed(row, formats[row.source], config))
    length = max(2, *map(len, lists), 0) if config.labels is None else len(config.labels)
    return length if lists and all(len(one) == length and _are_flags(one) for one in lists) else 0


def _are_flags(labels: list[Any]) -> bool:
    return all(isinstance(label, int | float) and label in (0, 1) for label in labels)


def label_weights(given: dict[str, float] | str | None, batches: Batches, names: list[str]) -> list[float] | None:
    """Return the weight of each label, or None if all weights are 1. Raises ValueError for an unknown label."""
    if given is None:
        return None
    if isinstance(given, str):  # balanced: each label has the same total weight
        values = batches.layout.objective.label_values(batches.layout.columns)  # pyright: ignore[reportAttributeAccessIssue]
        counts = values.sum(0) if values.shape[1] > 1 else np.bincount(values[:, 0].astype(int), minlength=len(names))
        return (counts.sum() / (len(counts) * np.maximum(counts, 1))).tolist()
    for name in given.keys() - set(names):
        raise ValueError(f"loss.class_weights.{name}: no such label.{did_you_mean(name, names)}")
    return [given.get(name, 1.0) for name in names]


def _listed(row: Row, format: RowFormat, config: ClassificationDataConfig) -> list[Any]:
    """Return the labels of a row as they are. Raises ValueError with the row's place."""
    with reading(row):
        fields, name = format.fields_of(row), "labels" if config.multi_label else "label"
        if name not in fields:
            raise ValueError(
                f"no field `{name}`. data.multi_label=true reads a list from `labels`, and false reads one label from "
                f"`label`. {how_to_rename(row.fields, [(name,)])}"
            )
        labels = parse_if_json(fields[name], name) if config.multi_label else [fields[name]]
        if not isinstance(labels, list):
            raise ValueError(f"`labels` is {kind(labels)}; expected a list of names or integers.")
        return labels


def _labels_of(row: Row, format: RowFormat, config: ClassificationDataConfig, one_hot: int) -> list[str]:
    """Return the label names of a row; one_hot: length of its list with a 0 or 1 for each label, or 0 for other lists.

    Raises ValueError with the row's place.
    """
    labels = _listed(row, format, config)
    with reading(row):
        are_indices = not _are_flags(labels) or (
            all(type(label) is int for label in labels) and len({*labels}) == len(labels)
        )
        is_one_hot = _are_flags(labels) and len(labels) == one_hot
        if config.multi_label and not (is_one_hot if one_hot else are_indices):
            raise ValueError(
                f"`labels` is {labels!r:.40}; expected either a 0 or 1 for every label in all rows, or the names or "
                "indices of the row's labels in all rows, as in the first rows."
            )
        if one_hot:
            numbers = [str(i) for i in range(one_hot)]
            names = config.labels or numbers
            if isinstance(names, FoundLabels) and names != numbers:
                raise ValueError(f"`labels` is {labels!r:.40}, a 0 or 1 for each label, and {_no_order(names)}")
            return [name for name, label in zip(names, labels, strict=True) if label]
        for label in labels:
            if not isinstance(label, str | int) or not str(label).strip():
                raise ValueError(f"the label is {kind(label)} ({label!r:.40}); expected a name or an integer.")
        return [str(label).strip() for label in labels]


def _no_order(names: Iterable[str]) -> str:
    return (
        f"data.labels is null, so the labels of the training rows are in alphabetical order: {first_names(names)}. "
        "Set data.labels to these names in the order of your numbers."
    )


def first_names(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(first[:10]) + " ..." * (len(first) > 10)


def _is_index(label: str) -> bool:
    return label.isdecimal() and len(label) < 19


def index_of(label: str, names: list[str]) -> int:
    """Return the index of a label among `names`. A number is an index, unless names are numbers or were found in the
    rows.

    Without names, return the number, or -1 for a name. Raises ValueError for an unknown label.
    """
    if label in names:
        return names.index(label)
    is_index = _is_index(label) and not any(re.fullmatch(NUMBER, name) for name in names)
    if is_index and isinstance(names, FoundLabels):
        raise ValueError(f"the label is {label!r:.40}, and {_no_order(names)}")
    if is_index and (not names or int(label) < len(names)):
        return int(label)
    if not names:
        return -1
    raise ValueError(f"the label is {label!r:.40}; expected one of {first_names(names)}.{did_you_mean(label, names)}")


@dataclass(frozen=True)
class LabelReader(RowReader):
    """Converts a row to its text and labels."""

    config: ClassificationDataConfig
    one_hot: int = 0
    """Length of the lists of labels if they have a 0 or 1 for each label, else 0."""

    known: ClassVar[dict[str, Fields]] = KNOWN

    @classmethod
    def of(cls, sources: RowSources, first_rows: Sequence[Row], tokenizer: Tokenizer) -> Self:
        reader = super().of(sources, first_rows, tokenizer)
        reader = replace(reader, config=_with_kind(reader.config, first_rows, reader.formats))
        one_hot = _one_hot_length(first_rows, reader.formats, reader.config)
        if one_hot == 2 and sources.source != sources.config.source and reader._may_be_indices(first_rows):
            one_hot = reader._one_hot_of_training()  # [0, 1] is one-hot for 2 labels, or has two indices
        return replace(reader, one_hot=one_hot)

    def _may_be_indices(self, rows: Sequence[Row]) -> bool:
        """Whether the lists of all rows can also be read as the indices of the rows' labels."""
        lists = [_listed(row, self.formats[row.source], self.config) for row in rows]
        return all(all(type(label) is int for label in one) and len({*one}) == len(one) for one in lists)

    def _one_hot_of_training(self) -> int:
        sources = RowSources.of(self.config)
        rows = sources.first_rows(NUM_ROWS_TO_DETECT)
        return _one_hot_length(rows, formats_of(sources, rows, KNOWN), self.config)

    @property
    def unused(self) -> tuple[str, ...]:
        return ("label",) if self.config.multi_label else ("labels",)

    def names(self, row: Row) -> list[str]:
        return [", ".join((self.config.labels or [])[i] for i in self._numbers(row)) or "no label"]

    def passages(self, row: Row) -> list[Passage | Document]:
        with reading(row):
            fields = self.fields_of(row)
            text = check_text(fields["text"], "the field `text`")
            if not text.strip():
                raise ValueError("`text` is empty. Remove the row, or add a text.")
            if self.tokenizer.media or any(is_given(fields.get(name)) for name in PART_FIELDS):
                return [self.render(as_chat(text, "prompt"), fields, is_prompt=True)]
            return [Passage(text, [(0, len(text))], add_bos=True)]

    def values(self, row: Row) -> list[Any]:
        """Return the label's index, or with `data.multi_label` a list with 1 for each label of the row and 0 for
        others."""
        numbers, names = self._numbers(row), self.config.labels
        if not names:
            return [0.0]
        return [[float(i in numbers) for i in range(len(names))]] if self.config.multi_label else [float(numbers[0])]

    def _numbers(self, row: Row) -> list[int]:
        """Return the indices of a row's labels; [] for texts to score. Raises ValueError for an unknown label."""
        if self.config.labels == []:
            return []
        names = self.config.labels or []
        labels = _labels_of(row, self.formats[row.source], self.config, self.one_hot)
        with reading(row):
            return [index_of(label, names) for label in labels]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        if (kept := self.truncated(documents[0], place, report)) is None:
            return []
        report.count_lost(len(documents[0]) - len(kept))
        return [replace(kept, trained=np.arange(len(kept)) == len(kept) - 1)]


@dataclass(frozen=True, kw_only=True)
class TextBatch(Batch):
    """A batch of P texts, or of texts with P labeled tokens. Then `last` are these tokens, `num_texts` is P, and
    `targets` may be float32, the probability of the second of two labels."""

    last: Tensor  # (P,) int64: flattened position of each text's last token
    targets: Tensor  # (P,) int64: label index; with multi_label (P, C) float32: 1 for each label of the text
    num_texts: int
    text_of: Tensor  # (P,) int64: number of the text that has each label

    labels_whole_rows: ClassVar[bool] = True

    def without_targets(self) -> TextBatch:
        return replace(
            super().without_targets(),
            last=self.last[:0],
            targets=self.targets[:0],
            text_of=self.text_of[:0],
            num_texts=0,
        )


class Classification(Objective):
    reader = LabelReader
    batch_type = TextBatch
    unit = "texts"
    recipe = "classify"
    shown_metrics: ClassVar[Mapping[str, str]] = {"eval_macro_f1": "macro-F1 {:.3f}"}
    marks = (("text", "label"), ("text", "labels"))

    def settings_of_file(self, fields: Set[str]) -> list[str]:
        return [] if "label" in fields else ["data.multi_label=true"]

    def of(self, config: ClassificationDataConfig) -> Objective:
        from lean_ft.data import token_labels  # which imports this module

        return self if config.labels_per == "text" else token_labels.OBJECTIVE

    def label_values(self, columns: Columns) -> np.ndarray:
        """(N, 1) index of each text's label, or (N, C) 1 for each label of a text."""
        return columns.per_document("row_values")

    def completed(self, config: ClassificationDataConfig) -> ClassificationDataConfig:
        return with_labels(config)

    def row_fields(self, columns: Columns, placed: Placed) -> dict[str, Any]:
        values = columns.per_document("row_values", placed.documents)
        targets = values if values.shape[1] > 1 else values[:, 0].astype(np.int64)
        return {"targets": targets, "num_texts": len(placed.documents)}

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        return {"last": placed.last, "text_of": np.arange(len(placed.documents))}


OBJECTIVE = Classification()
