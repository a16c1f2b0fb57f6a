"""Supervised fine-tuning: a row becomes one sequence, with labels on completions or on the whole text."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lean_ft.data.chats import Chat, check_text, parse_if_json, read_chat, read_tools
from lean_ft.data.formats import FORMATS, RowReader, as_chat, in_front, join, plain, reading, with_system, writes_chats
from lean_ft.data.objective import Objective
from lean_ft.data.report import DataReport
from lean_ft.data.rows import IGNORED, Document, Row, kind
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Passage


@dataclass(frozen=True)
class SFTReader(RowReader):
    """Converts a row to one text, or to its token ids."""

    config: SFTDataConfig

    takes: ClassVar[tuple[str, ...]] = tuple(name for name in FORMATS if name != "preference")
    expected: ClassVar[str] = (
        "trains on single completions. To train on the chosen ones: data.format=prompt_completion "
        "data.columns.completion=chosen, or data.format=messages data.columns.messages=chosen."
    )

    def passages(self, row: Row) -> list[Passage | Document]:
        with reading(row):
            return [self._read(self.formats[row.source].name, self.fields_of(row))]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """As in the base class. Documents without a label, before or after truncation, are dropped."""
        [(ids, mask)] = documents
        if not mask[1:].any():
            report.drop("nothing to train on")
            return []
        cut = self.cut((ids, mask), place, report)
        if cut is None:
            return []
        if not cut[1][1:].any():
            report.drop("nothing to train on within max_length")
            return []
        report.count_lost(len(ids) - len(cut[0]))
        return [cut]

    def _read(self, format: str, fields: dict[str, Any]) -> Passage | Document:
        tools = read_tools(fields.get("tools"))
        if format == "messages":
            return self._chat(read_chat(fields["messages"], "messages"), tools)
        if format == "sharegpt":
            system = check_text(fields.get("system") or "", "the field `system`")
            return self._chat(in_front(system, read_chat(fields["conversations"], "conversations")), tools)
        if format == "tokens":
            return read_token_row(fields, self.tokenizer.vocab_size)
        if format == "text":
            text = check_text(fields["text"], "the field `text`")
            return Passage(text, [(0, len(text))], add_bos=True, add_eos=True)
        if format == "alpaca":
            asked = [check_text(fields.get(name) or "", f"the field `{name}`") for name in ("instruction", "input")]
            fields = {"prompt": "\n\n".join(filter(None, asked)), "completion": fields["output"]}
        elif format == "input_output":
            fields = {"prompt": fields["input"], "completion": fields["output"]}
        if not writes_chats(self.config, self.tokenizer) and not isinstance(fields["prompt"], list):
            prompt, completion = (check_text(fields[name], f"the field `{name}`") for name in ("prompt", "completion"))
            separator = (
                self.config.separator if self.config.separator is not None else "\n\n" if format == "alpaca" else ""
            )
            return plain(prompt, completion, separator, train_prompt=self.config.train_on == "all")
        prompt, completion = as_chat(fields["prompt"], "prompt"), as_chat(fields["completion"], "completion")
        return self._chat(join(prompt, completion, train_prompt=self.config.train_on != "completion"), tools)

    def _chat(self, chat: Chat, tools: list[dict[str, Any]] | None) -> Passage:
        chat = with_system(chat, self.config)
        if self.config.train_on == "all":
            others = [i for i in chat.untrained if chat.messages[i]["role"] != "assistant"]
            if others:
                raise ValueError(
                    f"message {others[0]} has the role {chat.messages[others[0]]['role']}, but `train` or `weight` excludes it "
                    "from training; with data.train_on=all, only assistant messages can be excluded."
                )
        return self.tokenizer.passage(chat.messages, tools, train_on=self.config.train_on, untrained=chat.untrained)


def read_token_row(fields: dict[str, Any], vocab_size: int) -> Document:
    """Return the ids in `input_ids`, trained where `labels` equal them, or everywhere without `labels`.

    Labels follow Hugging Face: not shifted, -100 where nothing is trained. Positions at either end with
    `attention_mask` 0 are padding and are removed. Raises ValueError for other labels, masks with zeros in the middle,
    or ids outside the vocabulary.
    """
    ids = _integers(fields["input_ids"], "input_ids")
    labels = _integers(fields["labels"], "labels") if "labels" in fields else ids
    attended = _integers(fields["attention_mask"], "attention_mask") if "attention_mask" in fields else ids * 0 + 1
    for name, values in (("labels", labels), ("attention_mask", attended)):
        if len(values) != len(ids):
            raise ValueError(f"`{name}` has {len(values)} values for {len(ids)} `input_ids`; expected the same number.")
    inside = np.flatnonzero(attended)
    first, last = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    if len(inside) != last - first:
        raise ValueError("`attention_mask` has zeros between ones; expected zeros only on padding at either end.")
    ids, labels = ids[first:last], labels[first:last]
    unknown = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(unknown):
        raise ValueError(
            f"`input_ids` has {ids[unknown[0]]} at position {first + unknown[0]}; this tokenizer's ids are 0 to "
            f"{vocab_size - 1}. The row may come from another tokenizer."
        )
    trained = labels != IGNORED
    differing = np.flatnonzero(trained & (labels != ids))
    if len(differing):
        i = differing[0]
        raise ValueError(
            f"`labels` has {labels[i]} at position {first + i}, where `input_ids` has {ids[i]}; expected the same id, "
            "or -100 for a token that is not trained. Do not shift the labels."
        )
    return ids.astype(np.int32), trained


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
