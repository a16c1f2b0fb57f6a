"""One row of data and where it stands; the sequence that it becomes."""

from typing import Any, NamedTuple, Protocol

import numpy as np

Document = tuple[np.ndarray, np.ndarray]
"""(T,) int32 ids and (T,) bool: this token is a label."""

IGNORED = -100  # the label of positions that are not trained


class Digest(Protocol):
    """A hash of `hashlib` that is being fed."""

    def update(self, data: bytes, /) -> None: ...


class Row(NamedTuple):
    """Named fields and where they stand, or why they could not be read."""

    fields: dict[str, Any]
    place: str
    """`train.jsonl, line 12`: for messages to the user."""
    source: int = 0
    """Which of several sources it is from."""
    problem: str | None = None
    """What is wrong with this row alone; it then has no fields."""


def kind(value: Any) -> str:
    """What a JSON value is, in words: `null`, `a number`."""
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value)) or ("a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def names_of(fields: dict[str, Any]) -> str:
    """The names of fields, for a message."""
    return ", ".join(map(str, fields)) or "no fields"
