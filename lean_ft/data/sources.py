"""Rows of JSONL and JSON files, each with the place it came from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lean_ft.assets import resolve_data_path


class Digest(Protocol):
    """A hash of `hashlib` that is being fed."""

    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class Row:
    """One JSON object and where it stands."""

    fields: dict[str, Any]
    place: str
    """`train.jsonl, line 12`: for messages to the user."""


def read_rows(source: str | list[str], digest: Digest | None = None) -> Iterator[Row]:
    """Rows of the file or files `source`, in order; `digest` is fed every byte read.

    `tiny/train.jsonl` and `tiny/validation.jsonl` are the embedded data. A file that begins with `[` is one JSON
    array, any other is JSONL: one object a line, empty lines skipped; the name's ending does not matter. Raises
    ValueError for a missing, empty or malformed file, with its name, line and reason.
    """
    paths = [source] if isinstance(source, str) else source
    if not paths:
        raise ValueError("data.source is an empty list; expected one or more JSONL or JSON files.")
    for path in paths:
        yield from _read_file(resolve_data_path(path), digest)


def _read_file(path: Path, digest: Digest | None) -> Iterator[Row]:
    _check_is_file(path)
    if _first_character(path) == b"[":
        yield from _read_array(path, digest)
        return
    any_row = False
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if digest is not None:
                digest.update(line)
            place = f"{path}, line {number}"
            text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, place)
            if text.strip():
                any_row = True
                yield Row(_object(_parse(text, place, path), place), place)
    if not any_row:
        raise ValueError(f"{path} has no rows: the file is empty. Expected one JSON object a line.")


def _read_array(path: Path, digest: Digest | None) -> Iterator[Row]:
    content = path.read_bytes()
    if digest is not None:
        digest.update(content)
    text = _decode(content.removeprefix(b"\xef\xbb\xbf"), str(path))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: malformed JSON: {error.msg} (column {error.colno}).") from None
    if not rows:
        raise ValueError(f"{path} has no rows: its JSON array is empty.")
    for number, row in enumerate(rows, start=1):
        yield Row(_object(row, f"{path}, row {number}"), f"{path}, row {number}")


def _check_is_file(path: Path) -> None:
    if path.is_file():
        return
    if path.is_dir():
        inside = sorted(child.name for child in path.iterdir() if child.suffix in (".jsonl", ".json"))
        found = f"it holds {', '.join(inside[:5])}; name one, or several as a list" if inside else "it holds none"
        raise ValueError(f"data source {path} is a folder; expected a JSONL or JSON file ({found}).")
    raise ValueError(f"data source {path} does not exist; expected a JSONL or JSON file.")


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(4096)
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 (byte 0x{content[error.start]:02x} at position {error.start}). Expected "
            "JSON or JSONL in UTF-8; convert the file, for example with `iconv -t UTF-8`."
        ) from None


def _parse(text: str, place: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "" if path.suffix == ".jsonl" else " Expected JSONL (one object a line) or a JSON array."
        raise ValueError(f"{place}: malformed JSON: {error.msg} (column {error.colno}).{hint}") from None


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected a JSON object with named fields, found a {type(value).__name__}.")
    return value
