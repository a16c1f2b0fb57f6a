"""Row formats: each maps the named fields of a row to a chat, a plain text or token ids.

| format            | fields                                   | becomes                                             |
|-------------------|------------------------------------------|-----------------------------------------------------|
| messages          | messages; tools                          | a chat                                              |
| sharegpt          | conversations; system, tools             | a chat, with roles renamed                          |
| preference        | chosen, rejected; prompt, tools, margin  | a pair of completions: `lean_ft.data.pairs`         |
| prompt_completion | prompt, completion; tools                | a user message and an assistant message, or a chat  |
| alpaca            | instruction, output; input               | the same; instruction and input form one message    |
| input_output      | input, output; tools                     | as prompt_completion                                |
| tokens            | input_ids; labels, attention_mask        | the ids unchanged, trained where labels are ids     |
| text              | text                                     | bos + text + eos, all of it trained                 |

Fields after the semicolon are optional. If several formats match, the first in the table is used. A format that only
one objective reads is defined in that objective's file, such as `unpaired` in `lean_ft.data.unpaired`.

Without a chat template or with `data.chat=false`, prompt_completion becomes bos + prompt + `data.separator` +
completion + eos, tokenized as one text. A token that straddles the boundary is trained. The default separator for
alpaca is an empty line. Control tokens spelled out in such plain texts are encoded as control tokens, since the text
may be a rendered chat; inside messages they are ordinary text.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from lean_ft.data.chats import Chat, check_text, read_chat
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document, Row, names_of
from lean_ft.data.sources import list_sources
from lean_ft.settings import DataConfig, RowsConfig, Sources
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import is_function_path
from lean_ft.tokenizers import Passage, Tokenizer

NUM_ROWS_TO_DETECT = 16


class Fields(NamedTuple):
    """Field names of a format."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    holds_strings: bool = False
    """Whether the format has prompts and completions, which may be plain strings."""


FORMATS = {
    "messages": Fields(("messages",), ("tools",)),
    "sharegpt": Fields(("conversations",), ("system", "tools")),
    "preference": Fields(("chosen", "rejected"), ("prompt", "tools", "margin"), holds_strings=True),
    "prompt_completion": Fields(("prompt", "completion"), ("tools",), holds_strings=True),
    "alpaca": Fields(("instruction", "output"), ("input",), holds_strings=True),
    "input_output": Fields(("input", "output"), ("tools",), holds_strings=True),
    "tokens": Fields(("input_ids",), ("labels", "attention_mask")),
    "text": Fields(("text",)),
}


class RowFormat(NamedTuple):
    """Format of the rows of a source."""

    name: str
    columns: dict[str, str]
    """Renamed fields: the format's name to the column name."""
    fields: Fields

    def fields_of(self, row: Row) -> dict[str, Any]:
        """Return the fields of `row` under the format's names, without optional fields that are null.

        Raises ValueError if a required field is missing.
        """
        required, optional, _ = self.fields
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


def formats_of(
    config: DataConfig,
    first_rows: Sequence[Row],
    source: Sources | None = None,
    known: dict[str, Fields] = FORMATS,
) -> dict[int, RowFormat]:
    """Return the format of each source: the configured format, or the first of `known` that matches the first rows.

    `first_rows` are from `source` (default: `config.source`). Raises ValueError if `columns` names an unknown field or
    column, or if no format matches.
    """
    formats = {}
    for number, one in enumerate(list_sources(config.source if source is None else source, config)):
        assert one.format is not None
        assert one.columns is not None
        _check_columns(one.columns, known)
        rows = [row for row in first_rows if row.source == number]
        if rows:
            _check_columns_are_there(one.columns, rows, known)
            is_told = one.format == "auto" or is_function_path(one.format)
            name = _detect(rows, one.columns, config.on_bad_row, known) if is_told else one.format
            if name not in known:
                raise ValueError(
                    f"data.format={name}: this recipe does not support it; expected one of {', '.join(known)}."
                )
            formats[number] = RowFormat(name, one.columns, known[name])
    return formats


@contextlib.contextmanager
def reading(row: Row) -> Iterator[None]:
    """Context manager that prefixes errors with the place of `row`. Raises ValueError if `row` could not be read."""
    try:
        if row.problem is not None:
            raise ValueError(row.problem)
        yield
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from None
    except RecursionError:
        raise ValueError(f"{row.place}: its objects are nested too deeply to be rendered.") from None


RENAME = "If a column has another name, set data.columns: data.columns.prompt=question."


def _check_columns(columns: dict[str, str], known: dict[str, Fields]) -> None:
    names = sorted({name for fields in known.values() for name in (*fields.required, *fields.optional)})
    for ours in columns:
        if ours not in names:
            raise ValueError(
                f"data.columns.{ours}: no format has such a field; the fields are {', '.join(names)}. "
                f"data.columns.prompt=question reads `prompt` from `question`.{did_you_mean(ours, names)}"
            )


def _check_columns_are_there(columns: dict[str, str], rows: Sequence[Row], known: dict[str, Fields]) -> None:
    """Raise ValueError if no row has the column of a required field."""
    needed = {name for fields in known.values() for name in fields.required}
    theirs = list(dict.fromkeys(name for row in rows for name in row.fields))
    for ours, column in columns.items():
        if ours in needed and theirs and column not in theirs:
            raise ValueError(
                f"data.columns.{ours}={column}: {rows[0].place} and the next rows have no column `{column}`; they have "
                f"{', '.join(theirs)}.{did_you_mean(column, theirs)}"
            )


def _detect(rows: Sequence[Row], columns: dict[str, str], on_bad_row: str, known: dict[str, Fields]) -> str:
    readable = [row for row in rows if row.problem is None]
    if not readable:
        raise ValueError(f"{rows[0].place}: {rows[0].problem}. None of the first rows can be read.")

    def fits(name: str, row: Row) -> bool:
        return all(columns.get(field, field) in row.fields for field in known[name].required)

    best = max(known, key=lambda name: sum(fits(name, row) for row in readable))  # ties: the first format
    num_fitting = sum(fits(best, row) for row in readable)
    # A row of another format is a bad row, which `on_bad_row=skip` allows.
    if num_fitting == len(readable) or (on_bad_row == "skip" and num_fitting):
        return best
    if num_fitting:
        kinds: dict[str, list[str]] = {}
        for row in readable:
            name = next((name for name in (best, *known) if fits(name, row)), f"none ({names_of(row.fields)})")
            kinds.setdefault(name, []).append(row.place)
        listed = "".join(f"\n  {name}: {_shortened(places)}" for name, places in kinds.items())
        raise ValueError(
            f"the first {len(readable)} rows have different formats:{listed}\nPut each format into its own file and list the "
            f"files in data.source, or skip rows of other formats with data.on_bad_row=skip. {RENAME}"
        )
    expected = "; ".join(f"{name}: {', '.join(known[name].required)}" for name in known)
    raise ValueError(
        f"{readable[0].place}: cannot detect the format from the fields {names_of(readable[0].fields)}. Expected the fields "
        f"of one format ({expected}) in the first {NUM_ROWS_TO_DETECT} rows. {RENAME}"
    )


def _shortened(places: list[str]) -> str:
    """Join places with each file name once: `rows.jsonl, line 1, line 3`."""
    files: dict[str, list[str]] = {}
    for place in places:
        file, comma, line = place.rpartition(", ")
        files.setdefault(file if comma else place, []).append(line if comma else "")
    return "; ".join(", ".join(filter(None, [file, *lines])) for file, lines in files.items())


@dataclass(frozen=True)
class RowReader:
    """Converts rows to the sequences of an objective. Each objective's file defines a subclass."""

    config: DataConfig
    formats: dict[int, RowFormat]
    """Format of each source, by source index."""
    tokenizer: Tokenizer

    known: ClassVar[dict[str, Fields]] = FORMATS
    """Formats that `auto` chooses from; the first match is used."""
    takes: ClassVar[tuple[str, ...]] = tuple(FORMATS)
    """Formats that the objective supports."""
    expected: ClassVar[str] = ""
    """End of the error for unsupported formats: "this recipe ..."."""

    @classmethod
    def of(
        cls, config: DataConfig, first_rows: Sequence[Row], tokenizer: Tokenizer, source: Sources | None = None
    ) -> Self:
        """Return a reader for `source` (default: `config.source`), which starts with `first_rows`.

        Raises ValueError if their format is unknown or the objective does not support it.
        """
        formats = formats_of(config, first_rows, source, cls.known)
        check_rendering(config, tokenizer, formats.values())
        if other := next((format.name for format in formats.values() if format.name not in cls.takes), None):
            raise ValueError(f"{first_rows[0].place}: the rows are {other}, and this recipe {cls.expected}")
        return cls(config, formats, tokenizer)

    @property
    def format(self) -> str:
        """Format names, for messages."""
        return " + ".join(dict.fromkeys(format.name for format in self.formats.values()))

    def fields_of(self, row: Row) -> dict[str, Any]:
        return self.formats[row.source].fields_of(row)

    def passages(self, row: Row) -> list[Passage | Document]:
        """Return the sequences of `row` before truncation. Raises ValueError with the row's place."""
        raise NotImplementedError

    def values(self, row: Row) -> list[Any]:
        """Return a number, or a list of fixed length, for each sequence of `row`, such as its label or margin.

        Raises ValueError with the row's place.
        """
        return [0.0] * len(self.config.sides)

    def cut(self, document: Document, place: str, report: DataReport) -> Document | None:
        """Truncate a document to the length that `data.max_length` and `data.packing` allow; return None if dropped."""
        (ids, mask), limit = document, self.config.longest
        if limit is None or len(ids) <= limit:
            return document
        if not report.truncates(len(ids), self.config, place):
            return None
        kept = slice(0, limit) if self.config.truncation_side == "right" else slice(len(ids) - limit, None)
        return ids[kept], mask[kept]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        """Truncate the sequences of a row to `data.max_length`, or return [] if the row is dropped; count losses in
        `report`.

        Raises ValueError that starts with `place` if the row is too long under `overflow=raise`.
        """
        raise NotImplementedError


def plain(prompt: str, completion: str, separator: str, *, train_prompt: bool = False) -> Passage:
    """Join a prompt and a completion into one text, for a model without a chat template."""
    text, begins = f"{prompt}{separator}{completion}", len(prompt) + len(separator)
    span = (0 if train_prompt else begins, len(text))
    return Passage(text, [span], add_bos=True, add_eos=True, joined_by=separator, num_empty=not completion.strip())


def as_chat(value: Any, field: str) -> Chat:
    """Convert a prompt or a completion to a chat: a string becomes a user or an assistant message."""
    if isinstance(value, list):
        return read_chat(value, field)
    role = "user" if field == "prompt" else "assistant"
    return Chat([{"role": role, "content": check_text(value, f"the field `{field}`")}])


def join(prompt: Chat, completion: Chat, *, train_prompt: bool) -> Chat:
    """Concatenate both chats; without `train_prompt`, assistant messages in the prompt are not trained."""
    count = len(prompt.messages)
    answers = {i for i, message in enumerate(prompt.messages) if message["role"] == "assistant"}
    untrained = prompt.untrained | (frozenset() if train_prompt else answers)
    return Chat(prompt.messages + completion.messages, untrained | {i + count for i in completion.untrained})


def writes_chats(config: RowsConfig, tokenizer: Tokenizer) -> bool:
    """Return whether plain-string prompts and completions become chat messages."""
    return tokenizer.chat_template is not None if config.chat == "auto" else config.chat


def check_rendering(config: DataConfig, tokenizer: Tokenizer, formats: Iterable[RowFormat]) -> None:
    """Raise ValueError for rendering settings that would have no effect on these formats."""
    formats, has_template = list(formats), tokenizer.chat_template is not None
    hold_strings = any(format.fields.holds_strings for format in formats)
    are_chats = (hold_strings and config.chat) or any(format.name in ("messages", "sharegpt") for format in formats)
    rows = f"the rows are {' and '.join(sorted({format.name for format in formats}))}"
    if config.chat != "auto" and not hold_strings:
        raise ValueError(
            f"data.chat={str(config.chat).lower()} applies to prompts and completions that are plain strings, but {rows}. "
            "Leave it out."
        )
    if config.chat is True and not has_template:
        raise ValueError(
            "data.chat=true needs a chat template, and this model has none. Leave it out, or set data.chat_template."
        )
    if config.system is not None and not (has_template and are_chats):
        no_chats = (
            "this model has no chat template" if not has_template else "data.chat=false" if not config.chat else rows
        )
        raise ValueError(
            f"data.system applies to chats rendered with a chat template, but {no_chats}. Put the text into the rows instead, "
            "or set data.chat_template."
        )
    if config.separator is not None and writes_chats(config, tokenizer):
        raise ValueError(
            "data.separator applies without a chat template, but this model has one. Leave it out, or set data.chat=false."
        )


def in_front(system: str | None, chat: Chat) -> Chat:
    """Prepend a system message, if there is one."""
    return join(Chat([{"role": "system", "content": system}]), chat, train_prompt=True) if system else chat


def with_system(chat: Chat, config: DataConfig) -> Chat:
    """Prepend `data.system`, unless the chat starts with a system message."""
    return chat if chat.messages[0]["role"] in ("system", "developer") else in_front(config.system, chat)
