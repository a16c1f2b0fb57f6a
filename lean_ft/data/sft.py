"""Supervised fine-tuning: a row becomes one sequence, with labels on completions or on the whole text."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lean_ft.data.chats import Chat, check_text, parse_if_json, read_chat
from lean_ft.data.columns import Document
from lean_ft.data.formats import (
    FORMATS,
    MASKS,
    Fields,
    RowReader,
    as_chat,
    join,
    plain,
    reading,
    refuse_in_plain_text,
    writes_chats,
)
from lean_ft.data.objective import Objective
from lean_ft.data.report import DataReport
from lean_ft.data.rows import IGNORED, Row, kind
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Passage


@dataclass(frozen=True)
class SFTReader(RowReader):
    """Converts a row to one text, or to its token ids."""

    config: SFTDataConfig

    known: ClassVar[dict[str, Fields]] = {name: fields for name, fields in FORMATS.items() if not fields.is_pair}
    expected: ClassVar[str] = (
        "trains on single completions. To train on the chosen ones: data.format=prompt_completion "
        "data.columns.completion=chosen, or data.format=messages data.columns.messages=chosen."
    )

    def passages(self, row: Row) -> list[Passage | Document]:
        with reading(row):
            return [self._read(self.formats[row.source].fields, self.fields_of(row))]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """As in the base class. Documents without a label, before or after truncation, are dropped."""
        [document] = documents
        if not document.trained[1:].any():
            report.drop("nothing to train on")
            return []
        kept = self.truncated(document, place, report)
        if kept is None:
            return []
        if not kept.trained[1:].any():
            report.drop("nothing to train on within max_length")
            return []
        report.count_lost(len(document) - len(kept))
        return [kept]

    def _read(self, form: Fields, fields: dict[str, Any]) -> Passage | Document:
        if form.ids:
            return read_token_row(fields, self.tokenizer.vocab_size)
        if form.text:
            text = check_text(fields[form.text], f"the field `{form.text}`")
            return Passage(text, [(0, len(text))], add_bos=True, add_eos=True)
        if form.chat:
            return self._chat(read_chat(fields[form.chat], form.chat), fields)
        prompt, completion = form.prompt_of(fields), fields[form.completion]
        if not writes_chats(self.config, self.tokenizer) and not isinstance(prompt, list):
            refuse_in_plain_text(fields)
            for name, text in (("prompt", prompt), ("completion", completion)):
                check_text(text, f"the field `{name}`")
            separator = form.separator if self.config.separator is None else self.config.separator
            return plain(prompt, completion, separator, train_prompt=self.config.train_on == "all")
        prompt, completion = as_chat(prompt, "prompt"), as_chat(completion, "completion")
        return self._chat(join(prompt, completion, train_prompt=self.config.train_on != "completion"), fields)

    def _chat(self, chat: Chat, fields: dict[str, Any]) -> Passage:
        if self.config.train_on == "all":
            others = [i for i in chat.untrained if chat.messages[i]["role"] != "assistant"]
            if others:
                raise ValueError(
                    f"message {others[0] + 1} has the role {chat.messages[others[0]]['role']}, but `train` or `weight` "
                    "excludes it from training; with data.train_on=all, only assistant messages can be excluded."
                )
        return self.render(chat, fields, self.config.train_on)


def read_token_row(fields: dict[str, Any], vocab_size: int) -> Document:
    """Return the ids in `input_ids`, trained where `labels` equal them, or everywhere without `labels`.

    Labels follow Hugging Face: not shifted, -100 where nothing is trained. Positions at either end with
    `attention_mask` 0 are padding and are removed. `MASKS` also exclude tokens from training. Raises ValueError for
    other labels, masks with zeros in the middle, ids outside the vocabulary, or a row of several documents.
    """
    arrays = {name: _integers(value, name) for name, value in fields.items() if name != "seq_lengths"}
    ids = arrays["input_ids"]
    labels, attended = arrays.get("labels", ids), arrays.get("attention_mask", ids * 0 + 1)
    for name, values in arrays.items():
        if len(values) != len(ids):
            raise ValueError(f"`{name}` has {len(values)} values for {len(ids)} `input_ids`; expected the same number.")
    inside = np.flatnonzero(attended)
    first, last = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    if len(inside) != last - first:
        raise ValueError("`attention_mask` has zeros between ones; expected zeros only on padding at either end.")
    positions, inside = arrays.get("position_ids", np.arange(len(ids))), slice(first, last)
    if len(_integers(fields.get("seq_lengths", []), "seq_lengths")) > 1 or (np.diff(positions[inside]) != 1).any():
        raise ValueError(
            "the row holds several documents, by its `seq_lengths` or `position_ids`. Write one document per row; "
            "data.packing=bfd packs them."
        )
    ids, labels = ids[inside], labels[inside]
    unknown = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(unknown):
        raise ValueError(
            f"`input_ids` has {ids[unknown[0]]} at position {first + unknown[0]}; this tokenizer's ids are 0 to "
            f"{vocab_size - 1}. The row may come from another tokenizer."
        )
    trained = labels != IGNORED
    for name in MASKS:
        if name in arrays:
            trained &= (arrays[name][inside] != 0) != (name == "prompt_mask")
    differing = np.flatnonzero(trained & (labels != ids))
    if len(differing):
        i = differing[0]
        raise ValueError(
            f"`labels` has {labels[i]} at position {first + i}, where `input_ids` has {ids[i]}; expected the same id, "
            "or -100 for a token that is not trained. Do not shift the labels."
        )
    return Document(ids.astype(np.int32), trained)


def _integers(value: Any, name: str) -> np.ndarray:
    value = parse_if_json(value, name)
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is {kind(value)}; expected a list of whole numbers.")
    wrong = next((item for item in value if not isinstance(item, int) or abs(item) >= 1 << 31), None)
    if wrong is not None or None in value:
        raise ValueError(f"`{name}` holds {wrong!r}; expected whole numbers below 2**31.")
    return np.array(value, dtype=np.int64)


class SFT(Objective):
    """SFT data, with plain `lean_ft.data.Batch` batches."""

    reader = SFTReader


OBJECTIVE = SFT()
