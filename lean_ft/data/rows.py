"""Types for a row of data."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

IGNORED = -100  # the label of positions that are not trained


class Digest(Protocol):
    """A `hashlib` hash object."""

    def update(self, data: bytes, /) -> None: ...


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


def kind(value: Any) -> str:
    """Describe the type of a JSON value: `null`, `a number`."""
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value)) or ("a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def names_of(fields: dict[str, Any]) -> str:
    """Join field names for a message."""
    return ", ".join(map(str, fields)) or "no fields"
