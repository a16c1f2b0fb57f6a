"""YAML for settings: the 1.2 core schema, as plain values with the lines of their keys.

`no` is text, `1e-5` is a number, `12:30` and dates are text. (PyYAML follows YAML 1.1 and reads a boolean, text, a
number and a date.) Scalars without quotes keep their spelling, because the type of `007` depends on the setting.
Anchors, tags, repeated keys, deep nesting and large files raise ValueError: presets do not need them, and the first
three make a file misleading.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16

_CORE_SCHEMA = (  # pattern of a scalar without quotes -> its value; underscores are removed before conversion
    (r"~|null|Null|NULL|", lambda text: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?0x[0-9a-fA-F][0-9a-fA-F_]{0,15}", lambda text: int(text, 16)),
    (r"[-+]?0o[0-7][0-7_]{0,21}", lambda text: int(text, 8)),
    (r"[-+]?[0-9][0-9_]{0,38}", int),
    (r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
)


class Plain(str):
    """A scalar without quotes, in its original spelling."""

    def value(self) -> bool | int | float | str | None:
        """Return the value under the core schema."""
        for pattern, read in _CORE_SCHEMA:
            if re.fullmatch(pattern, self):
                return read(self.replace("_", ""))
        return str(self)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type, so that any YAML parser reads it back."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        is_text = isinstance(Plain(data).value(), str)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_text else "'")

    def represent_plain(self, data: Plain) -> yaml.ScalarNode:
        return self.represent_scalar(self.resolve(yaml.ScalarNode, data, (True, False)), data)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(Plain, _Dumper.represent_plain)


def to_yaml(value: object, flow: bool = False) -> str:
    """Return a value as YAML with its order kept. With `flow`, write one line, such as `[0.9, 0.999]`."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...") if flow else text


def as_text(value: object) -> str:
    """Return a value as it is written on the command line. A list with one item is the item."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value if isinstance(value, str) else to_yaml(value, flow=True)


def read_yaml_file(path: Path) -> tuple[Any, dict[str, int]]:
    """Return the values of a YAML file and the lines of its keys; see `parse_yaml`.

    Raise ValueError for invalid content, and OSError if the file cannot be read.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a YAML file with settings.")
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES // 1024} KiB. Pass a YAML file with settings.")
    try:
        return parse_yaml(raw.decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start}). Pass a YAML file with settings."
        raise ValueError(f"{path}: {reason}") from None


def parse_yaml(text: str, path: Path | None = None) -> tuple[Any, dict[str, int]]:
    """Return the values of one YAML document, and a dict of dotted key -> line.

    A value is a dict, a list, quoted text (`str`) or `Plain`; None for an empty document. Raise ValueError with `path`
    in the message for invalid content.
    """
    lines: dict[str, int] = {}

    def refuse(mark: yaml.Mark | None, reason: str) -> NoReturn:
        where = f"{path}, line {mark.line + 1}: " if path and mark else f"{path}: " if path else ""
        raise ValueError(where + reason)

    def value(event: yaml.Event, place: str, depth: int) -> Any:
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent) or (isinstance(event, yaml.NodeEvent) and event.anchor):
            refuse(mark, "anchors and aliases (& and *) are not supported. Write the value out.")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            refuse(mark, f"tags ({event.tag}) are not supported. Write the plain value.")
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else Plain(event.value)
        if depth == MAX_DEPTH:
            refuse(mark, f"nested more than {MAX_DEPTH} levels deep. Settings need fewer.")
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(value(event, f"{place}[{len(items)}].", depth + 1))
            return items
        values = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key, mark = value(event, place, depth), event.start_mark
            if not isinstance(key, str):
                refuse(mark, f"expected a name before the colon, found {kind(key)}.")
            if place + key in lines:
                first = f" (first in line {lines[place + key]})" if path else ""
                refuse(mark, f"'{key}' is set twice{first}. Remove one of them.")
            lines[place + key] = mark.line + 1
            values[str(key)] = value(next(events), f"{place}{key}.", depth + 1)
        return values

    events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.BaseLoader)
    documents = (event for event in events if isinstance(event, yaml.DocumentStartEvent))
    try:
        content = value(next(events), "", 0) if next(documents, None) else None
        if another := next(documents, None):
            refuse(another.start_mark, "not valid YAML: expected a single document.")
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        refuse(getattr(error, "problem_mark", None), f"not valid YAML: {reason}.")
    return content, lines


def kind(value: object) -> str:
    """Return a description of a parsed value for messages: `a list`, `a mapping`, or the value."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    value = value.value() if isinstance(value, Plain) else value
    return "nothing" if value is None else repr(value)
