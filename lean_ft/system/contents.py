"""What a run reads, by name with a hash each, so that messages name what changed and show no hashes."""

import json
import re
from collections import Counter
from typing import NamedTuple, Self

from lean_ft.system.foreign_values import JSON
from lean_ft.system.redaction import redact
from lean_ft.system.units import counted

HASH = "hash "  # a value that begins with it is a hash, which messages do not show
_PASSED_ROWS = re.compile(r'"(?:[^"]*/)?rows/[0-9a-f]{32}\.jsonl"')
_PASSED_ROWS_NAME = "rows passed from Python"
_MOST_NAMED = 10
_DIGITS = 32  # of a recorded digest


class Words(NamedTuple):
    """How a message calls two sides that differ."""

    before: str
    now: str
    changed: str
    removed: str
    added: str


TIME = Words("then", "now", "changed", "removed", "added")


class Content(NamedTuple):
    """Something that a run reads, such as a file."""

    name: str
    """As in the settings."""
    digest: str
    size: int | None = None
    """Bytes; None if unknown."""


class Contents(tuple[Content, ...]):
    """Everything that decides the batches of a run, in order. Empty if it is not on record."""

    __slots__ = ()

    @classmethod
    def of(cls, values: object) -> Self:
        """From the values of `as_json`. Raises ValueError for others."""
        values = values if isinstance(values, list) else [values]
        contents = cls(Content(*value) for value in values if isinstance(value, list) and len(value) == 3)
        types = ((type(one.name), type(one.digest), type(one.size)) for one in contents)
        if len(contents) < len(values) or any(
            found[:2] != (str, str) or found[2] not in (int, type(None)) for found in types
        ):
            raise ValueError("contents have a name, a digest and a size each")
        return contents

    def as_json(self) -> list[list[JSON]]:
        return [[redact(one.name), one.digest[:_DIGITS], one.size] for one in self]

    def differences(self, now: "Contents", words: Words = TIME) -> list[str]:
        """One line for each that was changed, removed or added, or one for another order.

        Equal contents under other names are the same.
        """
        gone, new = _without(self, now), _without(now, self)
        before, after = {one.name for one in gone}, {one.name: one for one in new}
        lines = [
            f"{words.changed}: {one.name}{_sizes(one, after[one.name], words)}" for one in gone if one.name in after
        ]
        lines += [f"{words.removed}: {one.name}" for one in gone if one.name not in after]
        lines += [f"{words.added}: {one.name}" for one in new if one.name not in before]
        if not lines and (moved := [pair for pair in zip(self, now, strict=True) if pair[0].digest != pair[1].digest]):
            one, other = moved[0]
            lines = [f"another order: {one.name} {words.before}, where {other.name} is {words.now}"]
        more = len(lines) - _MOST_NAMED
        return lines if more <= 0 else [*lines[:_MOST_NAMED], f"and {more:,} more"]


UNRECORDED = Contents()


def name_of_file(path: str) -> str:
    """The name of a file of rows for messages."""
    return _PASSED_ROWS.sub(_PASSED_ROWS_NAME, f'"{path}"').strip('"')


def differences(key: str, old: "JSON | Contents", new: "JSON | Contents", words: Words = TIME) -> list[str]:
    """The lines that show two unequal values of a setting, or contents. Hashes are not shown."""
    if isinstance(old, Contents) and isinstance(new, Contents):
        return old.differences(new, words)
    before, after = (_PASSED_ROWS.sub(_PASSED_ROWS_NAME, json.dumps(_without_nulls(value))) for value in (old, new))
    are_hashes = all(isinstance(value, str) and value.startswith(HASH) for value in (old, new))
    if are_hashes or before == after:
        return [f"{key}: {words.changed}"]
    return [f"{key}: {before} {words.before}, {after} {words.now}"]


def _without_nulls(value: object) -> object:
    """A list or dict without the fields that are not set."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(one) for name, one in value.items() if one is not None}


def _without(contents: Contents, others: Contents) -> list[Content]:
    """The contents that the others lack."""
    left, lacking = Counter(one.digest for one in others), list[Content]()
    for one in contents:
        if left[one.digest]:
            left[one.digest] -= 1
        else:
            lacking.append(one)
    return lacking


def _sizes(one: Content, other: Content, words: Words) -> str:
    if one.size is None or other.size is None:
        return ""
    if one.size == other.size:
        return f" (the size is the same, {counted(one.size, 'bytes')})"
    return f" ({counted(one.size, 'bytes')} {words.before}, {counted(other.size, 'bytes')} {words.now})"
