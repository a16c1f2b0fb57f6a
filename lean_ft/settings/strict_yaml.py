"""YAML for settings: the 1.2 core schema, as plain values with the lines of their keys.

`no` is text, `1e-5` is a number, `12:30` and dates are text (PyYAML's 1.1 reads a boolean, text, a number and a
date). What has no quotes is kept as it was written, since whether `007` is a number depends on what it is for.
Anchors, tags, repeated keys, deep nesting and large files are refused: no preset needs them, and with the first
three a file says something else than it seems to say.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16

_CORE_SCHEMA = (  # what a scalar without quotes stands for; it is read without its underscores
    (r"~|null|Null|NULL|", lambda text: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?0x[0-9a-fA-F][0-9a-fA-F_]{0,15}", lambda text: int(text, 16)),
    (r"[-+]?0o[0-7][0-7_]{0,21}", lambda text: int(text, 8)),
    (r"[-+]?[0-9][0-9_]{0,38}", int),
    (r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
)


class Plain(str):
    """A scalar without quotes, as it was written."""

    def value(self) -> bool | int | float | str | None:
        """What it stands for."""
        for pattern, read in _CORE_SCHEMA:
            if re.fullmatch(pattern, self):
                return read(self.replace("_", ""))
        return str(self)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, so that any reader reads it back."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        is_text = isinstance(Plain(data).value(), str)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_text else "'")

    def represent_plain(self, data: Plain) -> yaml.ScalarNode:
        return self.represent_scalar(self.resolve(yaml.ScalarNode, data, (True, False)), data)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(Plain, _Dumper.represent_plain)


def to_yaml(value: Any, flow: bool = False) -> str:
    """A value as YAML, in the order it has; `flow` puts it on one line, as in `[0.9, 0.999]`."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...") if flow else text


def read_yaml_file(path: Path) -> tuple[Any, dict[str, int]]:
    """The values of a YAML file and the lines of its keys, as `parse_yaml` does.

    Raises ValueError, or OSError where it cannot be read.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a YAML file with settings.")
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES // 1024} KiB, as no preset is. Is it the right file?")
    try:
        return parse_yaml(raw.decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        reason = f"expected text in UTF-8, but byte {error.start} is not. Is it the right file?"
        raise ValueError(f"{path}: {reason}") from None


def parse_yaml(text: str, path: Path | None = None) -> tuple[Any, dict[str, int]]:
    """The values of one YAML document, and dotted key -> line.

    A value is a dict, a list, text that had quotes (`str`), or `Plain`; None where the document is empty. `path` is
    named in errors. Raises ValueError.
    """
    lines: dict[str, int] = {}

    def refuse(mark: Any, reason: str) -> NoReturn:
        where = f"{path}, line {mark.line + 1}: " if path and mark else f"{path}: " if path else ""
        raise ValueError(where + reason)

    def value(event: Any, place: str, depth: int) -> Any:
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            refuse(mark, "anchors and aliases (& and *) are not used in settings; write the value out.")
        if event.tag:
            refuse(mark, f"tags ({event.tag}) are not used in settings; write the plain value.")
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else Plain(event.value)
        if depth == MAX_DEPTH:
            refuse(mark, f"nested more than {MAX_DEPTH} deep, as no setting is.")
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(value(event, f"{place}[{len(items)}].", depth + 1))
            return items
        values = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key, mark = value(event, place, depth), event.start_mark
            if not isinstance(key, str):
                refuse(mark, f"expected a name before the colon, came {kind(key)}.")
            if place + key in lines:
                first = f" (first in line {lines[place + key]})" if path else ""
                refuse(mark, f"'{key}' is given twice{first}; keep one of them.")
            lines[place + key] = mark.line + 1
            values[str(key)] = value(next(events), f"{place}{key}.", depth + 1)
        return values

    events = yaml.parse(text, Loader=yaml.BaseLoader)
    documents = (event for event in events if isinstance(event, yaml.DocumentStartEvent))
    try:
        found = value(next(events), "", 0) if next(documents, None) else None
        if another := next(documents, None):
            refuse(another.start_mark, "not valid YAML: expected a single document.")
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        refuse(getattr(error, "problem_mark", None), f"not valid YAML: {reason}.")
    return found, lines


def kind(value: Any) -> str:
    """What a parsed value is, for messages: `a list`, `a mapping`, or itself."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    value = value.value() if isinstance(value, Plain) else value
    return "nothing" if value is None else repr(value)
