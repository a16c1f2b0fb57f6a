"""Types for a row of data."""

import hashlib
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from lean_ft.data.media import content_types
from lean_ft.system.contents import Content, Contents
from lean_ft.system.foreign_values import plain
from lean_ft.system.whole_files import kind as kind

IGNORED = -100  # the label of positions that are not trained


class Digest(Protocol):
    """A `hashlib` hash object."""

    def update(self, data: bytes, /) -> None: ...


class NamedDigest:
    """Hash of everything that is read, in order, and of each named part of it."""

    def __init__(self) -> None:
        self._whole, self._parts = hashlib.blake2b(digest_size=16), dict[str, _Part]()

    def update(self, data: bytes, /) -> None:
        """Add something without a name."""
        self._whole.update(data)

    def part(self, name: str) -> Digest:
        return self._parts.setdefault(name, _Part(self._whole))

    def hexdigest(self) -> str:
        return self._whole.hexdigest()

    def contents(self) -> Contents:
        return Contents(Content(name, part.own.hexdigest(), part.size) for name, part in self._parts.items())


class _Part:
    def __init__(self, whole: Digest) -> None:
        self._whole, self.own, self.size = whole, hashlib.blake2b(digest_size=16), 0

    def update(self, data: bytes, /) -> None:
        self._whole.update(data)
        self.own.update(data)
        self.size += len(data)


def part_of(digest: Digest | None, name: str) -> Digest | None:
    """The hash of a named part; a hash object without parts itself."""
    return digest.part(name) if isinstance(digest, NamedDigest) else digest


class Row(NamedTuple):
    """A row's fields and place, or the reason why it could not be read."""

    fields: dict[str, Any]
    place: str
    """Location for messages, such as `train.jsonl, line 12`."""
    source: int = 0
    """Index of the source."""
    problem: str | None = None
    """Error of an unreadable row, which has no fields."""
    folder: Path = Path()
    """Folder of the row's file, to which paths in the row are relative."""
    refused: Mapping[str, str] = {}
    """Field with a value that cannot be read -> the reason. Reading such a field is an error."""
    left_out: str = ""
    """Reason why the row is not used, for the report; empty for others."""

    def check(self, *names: str) -> None:
        """Raise ValueError if one of the fields `names` cannot be read. Without names, check all fields."""
        if problem := next((self.refused[name] for name in names or self.refused if name in self.refused), None):
            raise ValueError(problem)


def through_gate(row: Row) -> Row:
    """Return a row whose fields are JSON types or contents of media. Fields with other values are `refused`.

    Markers are kept: they matter only to chat templates, whose messages are checked later.
    """
    if row.problem is not None:
        return row
    settings: dict[str, Any] = {"markers": True, "leaves": (Path, *content_types())}
    try:
        return row._replace(fields=plain(row.fields, "the row", unpacked, **settings))
    except ValueError:
        pass
    fields, refused = dict[str, Any](), dict[str, str]()
    for name, value in row.fields.items():
        try:
            fields |= plain({name: value}, "the row", unpacked, **settings)
        except ValueError as error:
            fields[name], refused[name] = value, str(error)
    return row._replace(fields=fields, refused=refused)


def unpacked(value: Any) -> Any:
    """Return an array as lists, and a date or a decimal number as text. Raises TypeError for other values."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def names_of(fields: dict[str, Any]) -> str:
    """Join field names for a message."""
    return ", ".join(map(str, fields)) or "no fields"
