"""Types for a row of data."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lean_ft.system.whole_files import kind as kind

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


def names_of(fields: dict[str, Any]) -> str:
    """Join field names for a message."""
    return ", ".join(map(str, fields)) or "no fields"
