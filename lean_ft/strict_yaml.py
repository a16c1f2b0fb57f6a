"""YAML for settings: the 1.2 core schema, read as nodes that know their line.

`no` is text, `1e-5` is a number, `12:30` and dates are text (PyYAML's 1.1 reads a boolean, text, a number and a
date). Anchors, tags, repeated keys, deep nesting and large files are refused: no preset needs them, and with the
first three a file says something else than it seems to say.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16

_CORE_SCHEMA = [  # kind, pattern, characters it may start with
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"[-+]?(?:0x[0-9a-fA-F_]{1,16}|0o[0-7_]{1,22}|[0-9][0-9_]{0,38})$", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _name, _pattern, _starts in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_starts))


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, so that any reader reads it back."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _starts in _CORE_SCHEMA:
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_starts))


def to_yaml(value: Any, flow: bool = False) -> str:
    """A value as YAML, in the order it has; `flow` puts it on one line, as in `[0.9, 0.999]`."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...") if flow else text


def read_yaml_file(path: Path) -> yaml.Node | None:
    """The node tree of a YAML file, None if it is empty. Raises ValueError, or OSError where it cannot be read."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a YAML file with settings.")
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES // 1024} KiB, as no preset is. Is it the right file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected text in UTF-8, but byte {error.start} is not. Is it the right file?"
        ) from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path | None = None) -> yaml.Node | None:
    """The node tree of one YAML document, None if it is empty; `path` is named in errors. Raises ValueError."""

    def refuse(mark: Any, reason: str) -> NoReturn:
        where = f"{path}, line {mark.line + 1}: " if path and mark else f"{path}: " if path else ""
        raise ValueError(where + reason)

    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                refuse(
                    event.start_mark,
                    "anchors and aliases (& and *) are not used in settings; write the value out.",
                )
            if tag := getattr(event, "tag", None):
                refuse(event.start_mark, f"tags ({tag}) are not used in settings; write the plain value.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                refuse(event.start_mark, f"nested more than {MAX_DEPTH} deep, as no setting is.")
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        refuse(getattr(error, "problem_mark", None), f"not valid YAML: {reason}.")

    def refuse_repeated_keys(part: yaml.Node | None) -> None:
        if isinstance(part, yaml.SequenceNode):
            for item in part.value:
                refuse_repeated_keys(item)
        if isinstance(part, yaml.MappingNode):
            first_lines: dict[str, int] = {}
            for key, value in part.value:
                if not isinstance(key, yaml.ScalarNode):
                    refuse(key.start_mark, f"expected a name before the colon, came {kind(key)}.")
                if key.value in first_lines:
                    first = f" (first in line {first_lines[key.value]})" if path else ""
                    refuse(key.start_mark, f"'{key.value}' is given twice{first}; keep one of them.")
                first_lines[key.value] = key.start_mark.line + 1
                refuse_repeated_keys(value)

    refuse_repeated_keys(node)
    return node


def plain_scalar(text: str) -> yaml.ScalarNode:
    """The node of a scalar written without quotes, whatever characters it has."""
    resolvers = _Loader.yaml_implicit_resolvers.get(text[:1], [])
    tag = next((tag for tag, pattern in resolvers if pattern.match(text)), "tag:yaml.org,2002:str")
    return yaml.ScalarNode(tag, text)


def scalar_value(node: yaml.Node) -> bool | int | float | str | None:
    """What a scalar node stands for. Quoted text is text."""
    text, tag = str(node.value), node.tag.rpartition(":")[2]
    if getattr(node, "style", None) is not None or tag == "str":
        return text
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    digits = text.replace("_", "").lower()
    if tag == "int":
        return int(digits, 16 if "0x" in digits else 8 if "0o" in digits else 10)
    return float(digits.replace(".inf", "inf").replace(".nan", "nan"))


def kind(node: yaml.Node) -> str:
    """What a node is, for messages: `a list`, `a mapping`, or its value."""
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    value = scalar_value(node)
    return "nothing" if value is None else repr(value)
