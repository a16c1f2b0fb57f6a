"""How a row is read: its fields, whatever they are called, become a chat, a text, or ids as they are.

| format            | fields                                   | becomes                                             |
|-------------------|------------------------------------------|-----------------------------------------------------|
| messages          | messages; tools                          | the chat as it is                                   |
| sharegpt          | conversations; system, tools             | the same, its roles renamed                         |
| preference        | chosen, rejected; prompt, tools, margin  | a pair of answers: `lean_ft.data.preference`        |
| unpaired          | prompt, completion, label; tools         | an answer that is good or bad: the same             |
| prompt_completion | prompt, completion; tools                | a user's and an assistant's message, or messages    |
| alpaca            | instruction, output; input               | the same; instruction and input are one message     |
| input_output      | input, output; tools                     | as prompt_completion                                |
| tokens            | input_ids; labels, attention_mask        | the ids as they are, trained where labels are ids   |
| text              | text                                     | bos + text + eos, all of it trained                 |

Behind the semicolon stand the fields that a row may lack. Of several formats that fit, the first of the table is
taken; unpaired by those alone who learn from labels.

Without a chat template or with `data.chat=false`, prompt_completion becomes bos + prompt + completion + eos with `data.separator` between,
tokenised as one text: a token that straddles the boundary is trained. alpaca's parts are then separated by an
empty line, unless it is set. Control tokens spelled in such plain texts are control tokens, since a text may be a chat that was
rendered elsewhere; inside messages they are ordinary text.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lean_ft.data.chats import Chat, check_text, parse_if_json, read_chat, read_tools
from lean_ft.data.report import DataReport
from lean_ft.data.rows import IGNORED, Document, Row, kind, names_of
from lean_ft.data.sources import list_sources
from lean_ft.settings import DataConfig, RowsConfig, SFTDataConfig, Sources
from lean_ft.system.own_functions import is_own
from lean_ft.system.spelling import did_you_mean
from lean_ft.tokenizers import Passage, Tokenizer

NUM_ROWS_TO_DETECT = 16


class _Fields(NamedTuple):
    """The names of a format's fields."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMATS = {
    "messages": _Fields(("messages",), ("tools",)),
    "sharegpt": _Fields(("conversations",), ("system", "tools")),
    "preference": _Fields(("chosen", "rejected"), ("prompt", "tools", "margin")),
    "unpaired": _Fields(("prompt", "completion", "label"), ("tools",)),
    "prompt_completion": _Fields(("prompt", "completion"), ("tools",)),
    "alpaca": _Fields(("instruction", "output"), ("input",)),
    "input_output": _Fields(("input", "output"), ("tools",)),
    "tokens": _Fields(("input_ids",), ("labels", "attention_mask")),
    "text": _Fields(("text",)),
}
HOLD_STRINGS = {"preference", "unpaired", "prompt_completion", "alpaca", "input_output"}  # or messages


class RowFormat(NamedTuple):
    """How the rows of a source are read."""

    name: str
    columns: dict[str, str]
    """Names of fields, ours to theirs, where they differ."""

    def fields_of(self, row: Row) -> dict[str, Any]:
        """The fields of `row` under our names; optional ones that are null are left out.

        Raises ValueError for one that is missing.
        """
        required, optional = FORMATS[self.name]
        fields = {}
        for name in (*required, *optional):
            theirs = self.columns.get(name, name)
            if theirs in row.fields and (name in required or row.fields[theirs] is not None):
                fields[name] = row.fields[theirs]
            elif name in required:
                renamed = f" (for `{name}`, by data.columns)" if theirs != name else ""
                raise ValueError(
                    f"no field `{theirs}`{renamed}. The format {self.name} needs {', '.join(required)}; the row has "
                    f"{names_of(row.fields)}. {RENAME}"
                )
        return fields


def formats_of(config: DataConfig, first_rows: Sequence[Row], source: Sources | None = None) -> dict[int, RowFormat]:
    """The format of every source that `first_rows` are from: the one set, or the one that their fields tell.

    They are the rows of `source`, or of the source that is trained on. Raises ValueError where `columns` names no
    field, and where no format fits.
    """
    formats = {}
    for number, one in enumerate(list_sources(config.source if source is None else source, config)):
        assert one.format is not None
        assert one.columns is not None
        _check_columns(one.columns)
        rows = [row for row in first_rows if row.source == number]
        if rows:
            _check_columns_are_there(one.columns, rows)
            known = [name for name in FORMATS if name != "unpaired" or config.tells == "label"]
            is_told = one.format == "auto" or is_own(one.format)
            name = _detect(rows, one.columns, config.on_bad_row, known) if is_told else one.format
            formats[number] = RowFormat(name, one.columns)
    return formats


@contextlib.contextmanager
def reading(row: Row) -> Iterator[None]:
    """While entered, what is wrong with `row` is a ValueError that begins with its place."""
    try:
        if row.problem is not None:
            raise ValueError(row.problem)
        yield
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from None
    except RecursionError:
        raise ValueError(f"{row.place}: its objects are nested too deeply to be written as text.") from None


RENAME = "Rename with data.columns, ours to yours: data.columns.prompt=question."


def _check_columns(columns: dict[str, str]) -> None:
    known = sorted({name for fields in FORMATS.values() for name in (*fields.required, *fields.optional)})
    for ours in columns:
        if ours not in known:
            raise ValueError(
                f"data.columns.{ours}: no format has such a field; the fields are {', '.join(known)}. "
                f"data.columns.prompt=question reads `prompt` from `question`.{did_you_mean(ours, known)}"
            )


def _check_columns_are_there(columns: dict[str, str], rows: Sequence[Row]) -> None:
    """Refuses a column that none of the first rows has, but where rows may lack the field that it stands for."""
    needed = {name for fields in FORMATS.values() for name in fields.required}
    theirs = list(dict.fromkeys(name for row in rows for name in row.fields))
    for ours, column in columns.items():
        if ours in needed and theirs and column not in theirs:
            raise ValueError(
                f"data.columns.{ours}={column}: {rows[0].place} and those behind it have no column `{column}`; they have "
                f"{', '.join(theirs)}.{did_you_mean(column, theirs)}"
            )


def _detect(rows: Sequence[Row], columns: dict[str, str], on_bad_row: str, known: Sequence[str]) -> str:
    readable = [row for row in rows if row.problem is None]
    if not readable:
        raise ValueError(f"{rows[0].place}: {rows[0].problem}. None of the first rows can be read.")

    def fits(name: str, row: Row) -> bool:
        return all(columns.get(field, field) in row.fields for field in FORMATS[name].required)

    best = max(known, key=lambda name: sum(fits(name, row) for row in readable))  # the first of several
    num_fitting = sum(fits(best, row) for row in readable)
    # A row of another shape is bad; whether it may be left out is for `on_bad_row` to say.
    if num_fitting == len(readable) or (on_bad_row == "skip" and num_fitting):
        return best
    if num_fitting:
        kinds: dict[str, list[str]] = {}
        for row in readable:
            name = next((name for name in (best, *known) if fits(name, row)), f"none ({names_of(row.fields)})")
            kinds.setdefault(name, []).append(row.place)
        listed = "".join(f"\n  {name}: {_shortened(places)}" for name, places in kinds.items())
        raise ValueError(
            f"the first {len(readable)} rows are not of one format:{listed}\nPut the rows of each format into a file of "
            f"its own and list the files in data.source, or leave others out with data.on_bad_row=skip. {RENAME}"
        )
    expected = "; ".join(f"{name}: {', '.join(FORMATS[name].required)}" for name in known)
    raise ValueError(
        f"{readable[0].place}: the format cannot be told from the fields {names_of(readable[0].fields)}. Expected those of "
        f"one format ({expected}), the same in the first {NUM_ROWS_TO_DETECT} rows. {RENAME}"
    )


def _shortened(places: list[str]) -> str:
    """`rows.jsonl, line 1, line 3`: a file's name once."""
    files: dict[str, list[str]] = {}
    for place in places:
        file, comma, line = place.rpartition(", ")
        files.setdefault(file if comma else place, []).append(line if comma else "")
    return "; ".join(", ".join(filter(None, [file, *lines])) for file, lines in files.items())


@dataclass(frozen=True)
class RowReader:
    """Turns rows into passages of text, or into the ids that they hold."""

    config: SFTDataConfig
    formats: dict[int, RowFormat]
    """Of every source."""
    tokenizer: Tokenizer

    @classmethod
    def of(
        cls, config: SFTDataConfig, first_rows: Sequence[Row], tokenizer: Tokenizer, source: Sources | None = None
    ) -> "RowReader":
        """A reader for `config`, with the formats told from the first rows of every source where it is `auto`.

        They are the rows of `source`, or of the source that is trained on.
        """
        formats = formats_of(config, first_rows, source)
        check_rendering(config, tokenizer, formats.values())
        if any(format.name == "unpaired" for format in formats.values()):
            raise ValueError(
                "data.format=unpaired has answers that are good or bad, and this recipe learns from good ones. Set "
                "data.format=prompt_completion to learn from all of them, or run kto."
            )
        if any(format.name == "preference" for format in formats.values()):
            raise ValueError(
                f"{first_rows[0].place}: the rows are preference pairs (chosen, rejected), and this recipe learns from "
                "single answers. To train on the chosen ones: data.format=prompt_completion "
                "data.columns.completion=chosen, or data.format=messages data.columns.messages=chosen."
            )
        return cls(config, formats, tokenizer)

    @property
    def format(self) -> str:
        """The formats, for people to read."""
        return " + ".join(dict.fromkeys(format.name for format in self.formats.values()))

    def passages(self, row: Row) -> list[Passage | Document]:
        """The sequences of `row`, one for each of the settings' `sides`. Raises ValueError with the row's place."""
        return [self.passage(row)]

    def passage(self, row: Row) -> Passage | Document:
        """The text of `row` and what of it is trained, or its ids. Raises ValueError with the row's place."""
        with reading(row):
            format = self.formats[row.source]
            return self._read(format.name, format.fields_of(row))

    def values(self, row: Row) -> list[float]:
        """What the row tells of each of them beside its text: nothing."""
        return [0.0]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """The document within `data.max_length`, or none if it is dropped; `report` counts what was lost.

        A document without a label is dropped, before and after truncation. Raises ValueError, with `place`, for one
        that is too long under `overflow=raise`.
        """
        [(ids, mask)] = documents
        if not mask[1:].any():
            report.drop("nothing to train on")
            return []
        limit, full_length = self.config.longest, len(ids)
        if limit is None or full_length <= limit:
            return documents
        if not report.takes_overlong(full_length, self.config, place):
            return []
        kept = slice(0, limit) if self.config.truncation_side == "right" else slice(full_length - limit, None)
        ids, mask = ids[kept], mask[kept]
        if not mask[1:].any():
            report.drop("nothing to train on within max_length")
            return []
        report.truncated += 1
        report.lost_tokens += full_length - limit
        return [(ids, mask)]

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
                    f"message {others[0]} is the {chat.messages[others[0]]['role']}'s, and says that it is not to be "
                    "trained; data.train_on=all can leave out messages of the assistant alone."
                )
        return self.tokenizer.passage(chat.messages, tools, train_on=self.config.train_on, untrained=chat.untrained)


def plain(prompt: str, completion: str, separator: str, *, train_prompt: bool = False) -> Passage:
    """A prompt and its completion as one text, for a model without a chat template."""
    text, begins = f"{prompt}{separator}{completion}", len(prompt) + len(separator)
    span = (0 if train_prompt else begins, len(text))
    return Passage(text, [span], add_bos=True, add_eos=True, joined_by=separator, num_empty=not completion.strip())


def as_chat(value: Any, field: str) -> Chat:
    """A prompt or a completion as messages: its own, or one of the user or of the assistant."""
    if isinstance(value, list):
        return read_chat(value, field)
    role = "user" if field == "prompt" else "assistant"
    return Chat([{"role": role, "content": check_text(value, f"the field `{field}`")}])


def join(prompt: Chat, completion: Chat, *, train_prompt: bool) -> Chat:
    """Both as one chat; without `train_prompt` no answer in the prompt carries a label."""
    count = len(prompt.messages)
    answers = {i for i, message in enumerate(prompt.messages) if message["role"] == "assistant"}
    untrained = prompt.untrained | (frozenset() if train_prompt else answers)
    return Chat(prompt.messages + completion.messages, untrained | {i + count for i in completion.untrained})


def writes_chats(config: RowsConfig, tokenizer: Tokenizer) -> bool:
    """Whether prompts and completions that are plain strings become messages of a chat."""
    return tokenizer.chat_template is not None if config.chat == "auto" else config.chat


def check_rendering(config: DataConfig, tokenizer: Tokenizer, formats: Iterable[RowFormat]) -> None:
    """Raise ValueError for settings of how rows become text that would change no row."""
    names, has_template = {format.name for format in formats}, tokenizer.chat_template is not None
    rows = f"the rows are {' and '.join(sorted(names))}"
    if config.chat != "auto" and names.isdisjoint(HOLD_STRINGS):
        raise ValueError(
            f"data.chat={str(config.chat).lower()} applies to prompts and completions that are plain strings, and {rows}. "
            "Leave it out."
        )
    if config.chat is True and not has_template:
        raise ValueError(
            "data.chat=true writes plain strings with a chat template, and this model has none. Leave it out, or set "
            "data.chat_template."
        )
    never_chats = {"text", "tokens"} | (set() if config.chat else HOLD_STRINGS)
    if config.system is not None and (not has_template or names <= never_chats):
        no_chats = "this model has none" if not has_template else "data.chat=false" if not config.chat else rows
        raise ValueError(
            f"data.system is written in front of chats by a chat template, and {no_chats}. Leave it out and write it into "
            "the rows, or set data.chat_template."
        )
    if config.separator is not None and writes_chats(config, tokenizer):
        raise ValueError(
            "data.separator joins prompts and completions that are written without a chat template, and this model has a "
            "template. Leave it out, or set data.chat=false."
        )


def in_front(system: str | None, chat: Chat) -> Chat:
    """The chat behind a system message, if there is one to put there."""
    return join(Chat([{"role": "system", "content": system}]), chat, train_prompt=True) if system else chat


def with_system(chat: Chat, config: DataConfig) -> Chat:
    """The chat behind `data.system`, unless it begins with a system message of its own."""
    return chat if chat.messages[0]["role"] in ("system", "developer") else in_front(config.system, chat)


def read_token_row(fields: dict[str, Any], vocab_size: int) -> Document:
    """The ids in `input_ids`, trained where `labels` repeat them; all of them without labels.

    Labels are Hugging Face's: at the position of their own token, -100 where nothing is trained. Positions at either
    end whose `attention_mask` is 0 are padding and left out. Raises ValueError for labels that are something else.
    """
    ids = _integers(fields["input_ids"], "input_ids")
    labels = _integers(fields["labels"], "labels") if "labels" in fields else ids
    attended = _integers(fields["attention_mask"], "attention_mask") if "attention_mask" in fields else ids * 0 + 1
    for name, values in (("labels", labels), ("attention_mask", attended)):
        if len(values) != len(ids):
            raise ValueError(f"`{name}` has {len(values)} values for {len(ids)} `input_ids`; expected as many.")
    inside = np.flatnonzero(attended)
    first, last = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    if len(inside) != last - first:
        raise ValueError("`attention_mask` has zeros between ones; expected them at the ends alone, over padding.")
    ids, labels = ids[first:last], labels[first:last]
    unknown = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(unknown):
        raise ValueError(
            f"`input_ids` has {ids[unknown[0]]} at position {first + unknown[0]}; this tokenizer's ids are 0 to "
            f"{vocab_size - 1}. Was the row tokenised with another?"
        )
    trained = labels != IGNORED
    differing = np.flatnonzero(trained & (labels != ids))
    if len(differing):
        i = differing[0]
        raise ValueError(
            f"`labels` has {labels[i]} at position {first + i}, where `input_ids` has {ids[i]}; expected the same id, "
            "or -100 for a token that is not trained. Labels are not shifted here."
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
