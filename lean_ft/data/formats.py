"""Row formats: each maps the named fields of a row to a chat, a plain text or token ids.

The table of docs/data.md has all formats; `python scripts/make_docs_tables.py` writes it from `FORMATS` and the formats
of objectives' own files.

Chats may also have `system`, `tools`, `chat_template_kwargs` and the contents of parts (`lean_ft.data.parts`), and
prompts `history`; without a chat template, these are refused. The prompt of a pair is `prompt`, `conversations`, or
`instruction` and `input`. If several formats of an objective match, the first one is used. A format that only one
objective reads is defined in that objective's file, such as `unpaired` in `lean_ft.data.unpaired`. All other fields are
named in the report or refused: `lean_ft.data.foreign_fields`.

Without a chat template or with `data.chat=false`, prompt_completion becomes bos + prompt + `data.separator` +
completion + eos, tokenized as one text. A token that straddles the boundary is trained. The default separator for
alpaca is an empty line. Control tokens spelled out in such plain texts are encoded as control tokens, since the text
may be a rendered chat; inside messages they are ordinary text.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from shlex import quote
from typing import Any, ClassVar, NamedTuple, Self

from lean_ft.data.chats import Chat, check_text, parse_if_json, read_chat, read_opening, read_tools, read_variables
from lean_ft.data.columns import Document
from lean_ft.data.foreign_fields import is_given, unread_fields, unwritten
from lean_ft.data.kinds import unit_that_is_cut
from lean_ft.data.media import refuse_media
from lean_ft.data.part_types import UnreadablePartError
from lean_ft.data.parts import (
    PART_FIELDS,
    check_are_read,
    take_parts,
    units_read,
    units_shown,
    unread_part_keys,
)
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row, names_of
from lean_ft.data.sources import RowSources
from lean_ft.settings import DataConfig, RowsConfig
from lean_ft.system.spelling import did_you_mean, nearest
from lean_ft.system.user_functions import is_function_path
from lean_ft.tokenizers import Passage, Tokenizer, TrainOn
from lean_ft.tokenizers.chat_template import variables_of

NUM_ROWS_TO_DETECT = 16
SYSTEM_ROLES = ("system", "developer")


def drops(document: Document, kept: slice, report: DataReport) -> bool:
    """Whether a row is dropped and counted, because keeping the tokens `kept` of its document alone would cut what
    a kind of columns keeps whole."""
    if unit := unit_that_is_cut(document, kept):
        report.drop(f"a whole {unit} does not fit in max_length")
    return bool(unit)


@dataclass(frozen=True)
class Fields:
    """Field names of a format, and what they hold: a chat, a prompt and a completion, a pair, a text or ids."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    chat: str = ""
    prompts: tuple[tuple[str, ...], ...] = ()
    """Fields that may hold the prompt; the first that a row has are read. Several of them form one text."""
    completion: str = ""
    is_pair: bool = False
    """Whether a row has two completions, `chosen` and `rejected`."""
    text: str = ""
    ids: str = ""
    separator: str = ""
    """Between prompt and completion, without a chat template and `data.separator`."""
    becomes: str = ""
    """What a row becomes, for the table of docs/data.md."""
    is_alias: bool = False
    """Whether it has the fields of another format under other names. It is detected, and cannot be set by its name."""

    def __post_init__(self) -> None:
        assert self.chat or self.completion or self.is_pair or self.text or self.ids, self
        assert bool(self.prompts) == bool(self.completion or self.is_pair), self

    def prompt_of(self, fields: dict[str, Any]) -> Any:
        """Return the prompt of a row with completions: a text or messages, or None."""
        present = [names for names in self.prompts if any(name in fields for name in names)]
        given = (names for names in present if any(is_given(fields.get(name)) for name in names))
        names = next(given, (present or self.prompts)[0])
        if len(names) == 1:
            return fields.get(names[0])
        return "\n\n".join(filter(None, [check_text(fields.get(n) or "", f"the field `{n}`") for n in names]))


OF_CHATS = ("system", "tools", "chat_template_kwargs", *PART_FIELDS)
OF_PROMPTS = ("history", *OF_CHATS)
# Fields that say how a text is rendered, or what it is labeled with.
NOT_COMPARED = frozenset(("system", "tools", "chat_template_kwargs", "margin", "score", "scores", "spans"))
NOT_COMPARED |= {"label", "labels", "ner_tags", "tags"}
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "prompt_mask")
PROMPT, ALPACA = ("prompt",), ("instruction", "input")
FORMATS = {
    "messages": Fields(("messages",), OF_CHATS, chat="messages", becomes="the chat"),
    "sharegpt": Fields(
        ("conversations",),
        OF_CHATS,
        chat="conversations",
        becomes="a chat; the roles `human`, `gpt`, `model`, `observation`, `function_call` ... are renamed",
    ),
    "preference": Fields(
        ("chosen", "rejected"),
        (*PROMPT, "conversations", *ALPACA, "margin", *OF_PROMPTS),
        prompts=(PROMPT, ("conversations",), ALPACA),
        is_pair=True,
        becomes="a preference pair, for preference recipes; the prompt is `prompt`, `conversations`, or `instruction` "
        "and `input`",
    ),
    "prompt_completion": Fields(
        ("prompt", "completion"),
        OF_PROMPTS,
        prompts=(PROMPT,),
        completion="completion",
        becomes="a user message and an assistant message; fields are strings or messages",
    ),
    "alpaca": Fields(
        ("instruction", "output"),
        ("input", *OF_PROMPTS),
        prompts=(ALPACA,),
        completion="output",
        separator="\n\n",
        becomes="the same, with instruction and input in one message",
    ),
    "input_output": Fields(
        ("input", "output"), OF_PROMPTS, prompts=(("input",),), completion="output", becomes="as `prompt_completion`"
    ),
    "tokens": Fields(
        ("input_ids",),
        ("labels", "attention_mask", "position_ids", "seq_lengths", *MASKS),
        ids="input_ids",
        becomes="the ids; labels are not shifted, -100 is not trained, and masks exclude further tokens",
    ),
    "text": Fields(("text",), text="text", becomes="bos + text + eos, all tokens trained"),
}


class RowFormat(NamedTuple):
    """Format of the rows of a source."""

    name: str
    columns: dict[str, str]
    """Renamed fields: the format's name to the column name."""
    fields: Fields

    def fields_of(self, row: Row) -> dict[str, Any]:
        """Return the fields of `row` under the format's names, without optional fields that are null, and one prompt.

        Raises ValueError if a required field is missing.
        """
        required, optional = self.fields.required, self.fields.optional
        fields = {}
        for name in (*required, *optional):
            theirs = self.columns.get(name, name)
            if theirs in row.fields and (name in required or row.fields[theirs] is not None):
                row.check(theirs)
                fields[name] = row.fields[theirs]
            elif name in required:
                renamed = f" (for `{name}`, by data.columns)" if theirs != name else ""
                raise ValueError(
                    f"no field `{theirs}`{renamed}. The format {self.name} needs {', '.join(required)}; the row has "
                    f"{names_of(row.fields)}. {how_to_rename(row.fields, [required])}"
                )
        prompts, others = self.fields.prompts, set[str]()
        if given := [names for names in prompts if any(is_given(fields.get(name)) for name in names)]:
            others = {name for names in prompts if names != given[0] for name in names}
        return {name: value for name, value in fields.items() if name not in others}


def formats_of(
    sources: RowSources, first_rows: Sequence[Row], known: dict[str, Fields] = FORMATS
) -> dict[int, RowFormat]:
    """Return the format of each source: the configured format, or the first of `known` that matches the first rows,
    else the first of `FORMATS`.

    Raises ValueError if `columns` names an unknown field or column, or if no format matches.
    """
    formats, every = {}, known | {name: fields for name, fields in FORMATS.items() if name not in known}
    for number, one in enumerate(sources.sources):
        assert one.format is not None
        assert one.columns is not None
        _check_columns(one.columns, known)
        rows = [row for row in first_rows if row.source == number]
        if rows:
            _check_columns_are_there(one.columns, rows, known)
            is_told = one.format == "auto" or is_function_path(one.format)
            name = _detect(rows, one.columns, sources.config.on_bad_row, known, every) if is_told else one.format
            if name not in every:
                raise ValueError(
                    f"data.format={name}: this recipe does not support it; expected one of {', '.join(known)}."
                )
            formats[number] = RowFormat(name, one.columns, every[name])
    return formats


@contextlib.contextmanager
def reading(row: Row) -> Iterator[None]:
    """Context manager that prefixes errors with the place of `row`. Raises ValueError if `row` could not be read."""
    try:
        if row.problem is not None:
            raise ValueError(row.problem)
        yield
    except UnreadablePartError as error:
        raise type(error)(f"{row.place}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from None
    except RecursionError:
        raise ValueError(f"{row.place}: its objects are nested too deeply to be rendered.") from None


# Names that other files have for a field, in lower case.
USUAL_NAMES = {
    "prompt": ("question", "query", "instruction", "input", "user", "problem", "request", "q"),
    "completion": ("answer", "response", "output", "reply", "assistant", "solution", "target", "a"),
    "messages": ("chat", "dialog", "dialogue", "turns", "conversation"),
    "chosen": ("good", "better", "preferred", "accepted", "winner"),
    "rejected": ("bad", "worse", "dispreferred", "loser"),
    "text": ("content", "document", "body", "sentence", "review", "article", "passage", "comment"),
    "label": ("category", "class", "intent", "topic"),
}


def how_to_rename(fields: Iterable[str], formats: Sequence[Sequence[str]]) -> str:
    """Return the end of a message for rows whose `fields` lack the required names of each of `formats`: the field that
    is one of them with a typing error, the settings that read fields under their usual names, or how columns are
    renamed."""
    fields, names = list(fields), list(dict.fromkeys(name for names in formats for name in names))
    absent = [name for name in names if name not in fields]
    for field in (field for field in fields if field not in names):
        if meant := nearest(field, absent, least=0.8):
            setting = quote(f"data.columns.{meant}={field}")
            return f"Did you mean '{meant}' by `{field}`? Rename the field, or if all rows have it, set {setting}."
    for required in formats:
        if (meant := _by_usual_names(fields, required)) is not None:
            which = " and ".join(f"`{field}` as {name}" for name, field in meant.items())
            settings = " ".join(quote(f"data.columns.{name}={field}") for name, field in meant.items())
            return f"To read {which}, add `{settings}`."
    example = next((required for required in formats if "prompt" in required), formats[0])
    settings = " ".join(f"data.columns.{name}=COLUMN" for name in example if name in absent)
    return f"If a column has another name, add `{settings}`."


def _by_usual_names(fields: Sequence[str], required: Sequence[str]) -> dict[str, str] | None:
    """Return the field for each absent name of `required`, or None if a name has no field under a usual name."""
    meant: dict[str, str] = {}
    for name in (name for name in required if name not in fields):
        usual = (field for other in USUAL_NAMES.get(name, ()) for field in fields if field.lower() == other)
        if (field := next((field for field in usual if field not in meant.values()), None)) is None:
            return None
        meant[name] = field
    return meant or None


@cache
def _described(name: str, absent: tuple[str, ...]) -> str:
    meant = nearest(name, absent, least=0.8)
    return f"{name} (did you mean {meant}?)" if meant else name


def meant_fields(names: Collection[str]) -> set[str]:
    """Return the names of a row's fields, and the field of a format that is one of them with a typing error, if the row
    has the format's other fields."""
    found = set(names)
    for format in FORMATS.values():
        absent = [name for name in format.required if name not in names]
        if len(format.required) > 1 and len(absent) == 1:
            others = [name for name in names if name not in format.required]
            found |= {absent[0]} if any(nearest(name, absent, least=0.8) for name in others) else set()
    return found


def _check_columns(columns: dict[str, str], known: dict[str, Fields]) -> None:
    names = sorted({name for fields in known.values() for name in (*fields.required, *fields.optional)})
    for ours in columns if names else ():  # a prompt's columns for rewards may have any name
        if ours not in names:
            raise ValueError(
                f"data.columns.{ours}: no format of this recipe has such a field; the fields are {', '.join(names)}. "
                f"data.columns.{names[0]}=COLUMN reads `{names[0]}` from COLUMN.{did_you_mean(ours, names)}"
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


def _detect(
    rows: Sequence[Row], columns: dict[str, str], on_bad_row: str, known: dict[str, Fields], every: dict[str, Fields]
) -> str:
    readable = [row for row in rows if row.problem is None]
    if not readable:
        raise ValueError(f"{rows[0].place}: {rows[0].problem}. None of the first rows can be read.")

    def fits(name: str, row: Row) -> bool:
        return all(columns.get(field, field) in row.fields for field in every[name].required)

    among = known if any(fits(name, row) for name in known for row in readable) else every
    best = max(among, key=lambda name: sum(fits(name, row) for row in readable))  # ties: the first format
    num_fitting = sum(fits(best, row) for row in readable)
    # A row of another format is a bad row, which `on_bad_row=skip` allows.
    if num_fitting == len(readable) or (on_bad_row == "skip" and num_fitting):
        return best
    if num_fitting:
        kinds: dict[str, list[str]] = {}
        for row in readable:
            name = next((name for name in (best, *every) if fits(name, row)), f"none ({names_of(row.fields)})")
            kinds.setdefault(name, []).append(row.place)
        bad = next(row for row in readable if not fits(best, row))
        hint = how_to_rename(bad.fields, [every[best].required])
        listed = "".join(f"\n  {name}: {_shortened(places)}" for name, places in kinds.items())
        raise ValueError(
            f"the first {len(readable)} rows have different formats:{listed}\nPut each format into its own file and "
            f"list the files in data.source, or skip rows of other formats with data.on_bad_row=skip. {hint}"
        )
    expected = "; ".join(f"{name}: {', '.join(known[name].required)}" for name in known)
    hint = _how_to_unwrap(readable) or how_to_rename(readable[0].fields, [fields.required for fields in known.values()])
    raise ValueError(
        f"{readable[0].place}: cannot detect the format from the fields {names_of(readable[0].fields)}. Expected the "
        f"fields of one format ({expected}) in the first {NUM_ROWS_TO_DETECT} rows. {hint}"
    )


def _how_to_unwrap(rows: Sequence[Row]) -> str:
    """Return the end of a message for a file that is one object with the rows in it, or an empty string."""
    holds_rows = [
        name
        for name, value in (rows[0].fields.items() if len(rows) == 1 else ())
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ]
    if not holds_rows:
        return ""
    file = quote(rows[0].place.rpartition(", ")[0])
    return f"If `{holds_rows[0]}` holds the rows, run jq -c {quote(f'.{holds_rows[0]}[]')} {file} > rows.jsonl."


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
    """Formats that the objective supports; `auto` uses the first match."""
    expected: ClassVar[str] = ""
    """End of the error for unsupported formats: "this recipe ..."."""

    @classmethod
    def of(cls, sources: RowSources, first_rows: Sequence[Row], tokenizer: Tokenizer) -> Self:
        """Return a reader for `sources`, which start with `first_rows`.

        Raises ValueError if their format is unknown or the objective does not support it.
        """
        formats = formats_of(sources, first_rows, cls.known)
        if other := next((format.name for format in formats.values() if format.name not in cls.known), None):
            raise ValueError(f"{first_rows[0].place}: the rows are {other}, and this recipe {cls.expected}")
        check_rendering(sources.config, tokenizer, formats.values())
        return cls(sources.config, formats, tokenizer)

    @property
    def format(self) -> str:
        """Format names, for messages."""
        return " + ".join(dict.fromkeys(format.name for format in self.formats.values()))

    def fields_of(self, row: Row) -> dict[str, Any]:
        return self.formats[row.source].fields_of(row)

    def contents(self, row: Row) -> dict[str, Any]:
        """Return the fields by which `row` is compared with others: its texts and media. Raises ValueError with the
        row's place."""
        return {name: value for name, value in self.fields_of(row).items() if name not in (*NOT_COMPARED, *MASKS)}

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields of the formats that are not read with these settings."""
        return ()

    def unread(self, row: Row) -> list[str]:
        """Return the fields of `row` and the keys of its content parts that are not read.

        Raises ValueError with the row's place for one that must not be dropped.
        """
        _, columns, fields = self.formats[row.source]
        with reading(row):
            given = self.fields_of(row)
            keys = unread_part_keys(*given.values())
            if len(row.fields) == len(fields.required):  # most rows
                return keys
            read = {name: columns.get(name, name) for name in given if name not in self.unused}
            is_chat = fields.chat or (fields.prompts and writes_chats(self.config, self.tokenizer))
            sources = self.tokenizer.chat_templates.values() if is_chat else ()
            variables = frozenset[str]().union(*map(variables_of, sources))
            names = unread_fields(row.fields, read, (*fields.required, *fields.optional), columns, variables)
            refuse_media(
                {name: row.fields[name] for name in names},
                of_prompt=False,
                shown=units_shown(given),
                read=units_read(self.tokenizer),
            )
            return names + keys

    def described(self, name: str, row: Row) -> str:
        """Return the name of a field of `row` that is not read, with the field that it may be by a typing error."""
        fields = self.formats[row.source].fields
        return _described(name, tuple(ours for ours in fields.optional if ours not in row.fields))

    def names(self, row: Row) -> Sequence[str]:
        """Return a name for each sequence of `row`, for previews."""
        return self.config.sides

    def columns(self, row: Row) -> dict[str, Any]:
        """Return the fields of `row` that rewards read."""
        return {}

    def render(
        self, chat: Chat, fields: dict[str, Any], train_on: TrainOn = "completion", *, is_prompt: bool = False
    ) -> Passage:
        """Render a chat behind the row's `system` and `history`, with its tools and template variables."""
        opening = read_opening(fields)
        if chat.messages[0]["role"] in SYSTEM_ROLES:
            if opening not in ([], chat.messages[:1]):
                raise ValueError("the row has a system message, and also `system` or `history`. Keep one of them.")
            opening = []
        if self.config.system and (opening + chat.messages)[0]["role"] not in SYSTEM_ROLES:
            opening.insert(0, {"role": "system", "content": self.config.system})
        chat = join(Chat(opening), chat, train_prompt=train_on != "completion") if opening else chat
        tools, given = read_tools(fields.get("tools")), read_variables(fields.get("chat_template_kwargs"))
        variables = self.config.chat_template_kwargs | given
        listed = {name: parse_if_json(fields.get(name), name) for name in PART_FIELDS}
        messages, parts = take_parts(chat.messages, listed)
        check_are_read(parts, self.tokenizer)
        unread = unwritten(messages, tools, given, self.tokenizer.template_names)
        passage = self.tokenizer.passage(messages, tools, is_prompt, train_on, chat.untrained, variables)
        unread = dict.fromkeys((*unread, *passage.unread))
        return replace(passage, unread=tuple(unread), parts=parts) if unread or parts else passage

    def passages(self, row: Row) -> list[Passage | Document]:
        """Return the sequences of `row` before truncation. Raises ValueError with the row's place."""
        raise NotImplementedError

    def values(self, row: Row) -> list[Any]:
        """Return a number, or a list of fixed length, for each sequence of `row`, such as its label or margin.

        Raises ValueError with the row's place.
        """
        return [0.0] * len(self.config.sides)

    def with_columns(self, row: Row, documents: list[Document]) -> list[Document]:
        """Add further columns to the tokenized sequences of `row`. All sequences of a source have the same columns."""
        return documents

    def truncated(self, document: Document, place: str, report: DataReport) -> Document | None:
        """Truncate a document to the length that `data.max_length` and `data.packing` allow; return None if dropped.
        What a kind of columns adds is never cut."""
        limit = self.config.longest
        if limit is None or len(document) <= limit:
            return document
        if not report.truncates(len(document), self.config, place):
            return None
        right = self.config.truncation_side == "right"
        kept = slice(0, limit) if right else slice(len(document) - limit, len(document))
        return None if drops(document, kept, report) else document[kept]

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


def refuse_in_plain_text(fields: dict[str, Any]) -> None:
    """Raise ValueError if a row that becomes plain text has a field of chats."""
    if name := next((name for name in OF_PROMPTS if is_given(fields.get(name))), None):
        raise ValueError(
            f"the row has the field `{name}`, which needs a chat template, but its texts are not rendered with one. "
            "Set data.chat_template or data.chat=true, or put the text into the prompt."
        )


def as_chat(value: Any, field: str) -> Chat:
    """Convert a prompt or a completion to a chat: a string becomes a user or an assistant message."""
    if isinstance(value, list | dict):
        return read_chat([value] if isinstance(value, dict) else value, field)
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
    hold_strings = any(format.fields.prompts for format in formats)
    are_chats = (hold_strings and config.chat) or any(format.fields.chat for format in formats)
    rows = f"the rows are {' and '.join(sorted({format.name for format in formats}))}"
    if config.chat != "auto" and not hold_strings:
        raise ValueError(
            f"data.chat={str(config.chat).lower()} applies to prompts and completions that are plain strings, but "
            f"{rows}. Leave it out."
        )
    if config.chat is True and not has_template:
        raise ValueError(
            "data.chat=true needs a chat template, and this model has none. Leave it out, or set data.chat_template."
        )
    no_chats = "this model has no chat template" if not has_template else "data.chat=false" if not config.chat else rows
    for name in ("system", "chat_template_kwargs"):
        if getattr(config, name) and not (has_template and are_chats):
            raise ValueError(
                f"data.{name} applies to chats rendered with a chat template, but {no_chats}. Put the text into the "
                "rows instead, or set data.chat_template."
            )
    tokenizer.check_template_kwargs(config.chat_template_kwargs, tokenizer.template_names)
    is_of_texts = config.reads_separator and not config.reads_chats
    if config.separator is not None and writes_chats(config, tokenizer) and not is_of_texts:
        raise ValueError(
            "data.separator applies without a chat template, but this model has one. Leave it out, or set "
            "data.chat=false."
        )
