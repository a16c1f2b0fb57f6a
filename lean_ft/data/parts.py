"""Content parts of messages: text, and parts of the types in `TYPES`, in any form that rows have.

A run reads parts of a type if its model does; else a row that shows one is a bad row. The content of a part leaves the
messages before the chat template writes them, and its columns join the document behind tokenization.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Any

from lean_ft.data.columns import Document
from lean_ft.data.foreign_fields import is_given, refuse_part_keys
from lean_ft.data.images import IMAGES
from lean_ft.data.kinds import Kind
from lean_ft.data.media import NOT_READ, UNREAD_MEDIA
from lean_ft.data.part_types import Messages, PartType
from lean_ft.data.text_files import parse_json
from lean_ft.settings import RowsConfig
from lean_ft.tokenizers import Passage, Tokenizer

TYPES: tuple[PartType, ...] = (IMAGES,)
PART_FIELDS = tuple(name for part_type in TYPES for name in part_type.fields)
FEATURES = frozenset(part_type.feature for part_type in TYPES)


def type_of(part: Any) -> PartType | None:
    """The type of a content part; None for a text or an unknown part."""
    return next((one for one in TYPES if one.claims(part)), None) if isinstance(part, dict) else None


def read_part(part: Any, where: str) -> dict[str, Any]:
    """Return a content part as {"type": "text", "text"}, or as its type reads it.

    Raises ValueError for another part, such as a video, and for a key that must not be dropped.
    """
    if isinstance(part, dict):
        if (part_type := type_of(part)) is not None:
            return part_type.read(part, where)
        name = part.get("type")
        if isinstance(name, str) and any(medium in name for medium in UNREAD_MEDIA):
            raise ValueError(f"{where} has a content part of the type {name}; {NOT_READ}.")
        if isinstance(part.get("text"), str):
            refuse_part_keys(_further_keys(part), where)
            return {"type": "text", "text": part["text"]}
    alternatives = " nor ".join(["text", *(part_type.with_article for part_type in TYPES)])
    raise ValueError(f"{where} has a content part that is neither {alternatives}.")


def unread_part_keys(*values: Any) -> list[str]:
    """Return the keys of content parts that are not read. values: fields that may hold messages, also as JSON."""
    keys = dict.fromkeys(key for value in values for part in _parts_in(value) for key in _further_keys(part))
    return [f"messages.content.{key}" for key in keys]


def _parts_in(value: Any) -> Iterator[dict[str, Any]]:
    """The content parts of a field that holds messages, also as JSON; nothing for other values."""
    if isinstance(value, str) and value.lstrip()[:1] == "[" and '"content"' in value and '"type"' in value:
        with suppress(ValueError):
            value = parse_json(value)
    for message in value if isinstance(value, list) else ():
        parts = message.get("content", message.get("value")) if isinstance(message, dict) else None
        yield from (part for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()


def _further_keys(part: dict[str, Any]) -> dict[str, Any]:
    """Return the unread keys of a content part."""
    if (part_type := type_of(part)) is not None:
        return part_type.further_keys(part)
    return {key: value for key, value in part.items() if key not in ("type", "text") and is_given(value)}


def take_parts(messages: Messages, fields: Mapping[str, Any]) -> tuple[Messages, dict[str, list[Any]]]:
    """Return the messages for a chat template, and the contents of a row's parts in their order, by unit; fields:
    `PART_FIELDS` of the row.

    Raises ValueError if the contents do not fit the places for them.
    """
    shown = {}
    for part_type in TYPES:
        messages, contents = part_type.take(messages, fields)
        if contents:
            shown[part_type.unit] = contents
    return without_contents(messages), shown


def check_are_read(shown: Collection[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a unit in `shown` that the tokenizer does not read."""
    readable = units_read(tokenizer)
    for part_type in TYPES:
        if part_type.unit in shown and part_type.unit not in readable:
            raise ValueError(part_type.not_read)


def units_read(tokenizer: Tokenizer) -> set[str]:
    """The units of the parts that become tokens."""
    return {media.unit for media in tokenizer.media}


def units_shown(fields: Mapping[str, Any]) -> set[str]:
    """The units of the parts that a row shows, by its fields that are read."""
    in_fields = {one.unit for one in TYPES if any(is_given(fields.get(name)) for name in one.fields)}
    types = (type_of(part) for value in fields.values() for part in _parts_in(value))
    return in_fields | {part_type.unit for part_type in types if part_type is not None}


def first_type(messages: Messages) -> PartType | None:
    """The type of the first part of `messages` that is not text; None if all are text."""
    return next(filter(None, map(type_of, _parts_in(messages))), None)


def without_contents(messages: Any) -> Any:
    """Return messages with {"type": unit} for each part that is not text; a text unchanged."""

    def place(part: Any) -> Any:
        return part if (part_type := type_of(part)) is None else {"type": part_type.unit}

    def changed(message: Any) -> Any:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        return {**message, "content": [place(part) for part in message["content"]]}

    return [changed(message) for message in messages] if isinstance(messages, list) else messages


def as_text(content: Any) -> str:
    """The content of a message for people, with the type in brackets for each part that is not text."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"[{one.unit}] " if (one := type_of(part)) else "") for part in content or ())


def marks_in_texts(texts: Sequence[Passage], shown: Collection[str]) -> list[str]:
    """Names, for the report, of the marks in the texts of a row that shows only parts of the units `shown`."""
    types = [part_type for part_type in TYPES if part_type.unit not in shown]
    return [f"{one.mark} in texts" for one in types if any(one.mark in passage.text for passage in texts)]


def is_encoded(name: str, value: bytes) -> bool:
    """Whether the bytes in the field or key `name` are the content of a part."""
    return name in (*PART_FIELDS, "bytes") or any(part_type.is_content(value[:32]) for part_type in TYPES)


# Documents ------------------------------------------------------------------------------------------------------------


def kinds_of(tokenizer: Tokenizer, config: RowsConfig | None = None) -> tuple[Kind, ...]:
    """The kinds of columns of documents that `tokenizer` makes of rows with these settings.

    Raises ValueError for limits that cannot be met, and as `Media.check` does if there are settings.
    """
    return tuple(kind for part_type in TYPES for kind in part_type.kinds(tokenizer, config))


def measured(passage: Passage, folder: Path, kinds: Sequence[Kind]) -> Passage:
    """Read the sizes of the parts that a passage shows, and write their texts for the placeholders. Paths are relative
    to `folder`. Raises ValueError as `Kind.measured` does."""
    for kind in kinds:
        if kind.unit in passage.parts:
            passage = kind.measured(passage, folder)
    return passage


def documents_of(passages: Sequence[Passage | Document], tokenizer: Tokenizer, kinds: Sequence[Kind]) -> list[Document]:
    """Tokenize measured passages, and add the columns of `kinds`. Documents are tokenized texts without parts. Raises
    ValueError as `Kind.with_columns` does."""
    tokenized = starmap(Document, tokenizer.tokenize([one for one in passages if isinstance(one, Passage)]))
    documents = []
    for passage in passages:
        document, parts = (next(tokenized), passage.parts) if isinstance(passage, Passage) else (passage, {})
        for kind in kinds:
            document = kind.with_columns(document, parts.get(kind.unit, ()), tokenizer)
        documents.append(document)
    return documents
