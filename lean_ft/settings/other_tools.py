"""Settings of other tools, and what replaces them here: assets/other_tools.yaml, which describes its own form."""

import re
import shlex
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lean_ft.settings.strict_yaml import parse_yaml

FILE = Path(__file__).resolve().parents[1] / "assets" / "other_tools.yaml"
VALUE = "VALUE"  # stands for their value
RECIPE = "recipe"  # key of a preset, or of an answer, that is not a setting
NEEDLESS, UNSUPPORTED = "not needed", "not supported"

Row = str | dict[str, str]  # an answer, or one for each value
Settings = dict[str, str]  # our settings -> values as text, in which VALUE may stand


class Equivalent(NamedTuple):
    """What replaces a setting that has some value."""

    alternatives: list[Settings]  # the first that a recipe has is meant; none with a verdict
    verdict: str  # `not needed`, `not supported` or empty
    note: str


@cache
def _file() -> dict[str, Any]:
    return parse_yaml(FILE.read_text(encoding="utf-8"), FILE)[0]  # all scalars are text


def tools() -> dict[str, dict[str, Any]]:
    """Return the tools and their parts of the file."""
    return {name: part for name, part in _file().items() if "version" in part}


def by_name(rows: dict[str, Any]) -> dict[str, Any]:
    """Return rows by single name: a row may have several."""
    return {name: row for names, row in rows.items() for name in names.split()}


@cache
def table(part: str) -> dict[str, Row]:
    """Return the rows of a tool by setting, with those of tools that it extends, or the rows of a part without a
    version."""
    rows = _file()[part]
    if "version" not in rows:
        return by_name(rows)
    grouped = {
        f"{group}.{name}": row for group, of in rows.get("groups", {}).items() for name, row in table(of).items()
    }
    inherited = table(rows["extends"]) if "extends" in rows else {}
    return inherited | grouped | by_name(rows["rest"]) | by_name(rows["common"])


def equivalent(part: str, name: str, value: str) -> Equivalent | None:
    """Return what replaces a setting with a value, or None if the file does not say."""
    rows = table(part)
    matching = (row for pattern, row in rows.items() if "*" in pattern and fnmatchcase(name, pattern))
    row = rows[name] if name in rows else next(matching, None)
    if isinstance(row, dict):
        values = by_lower_value(row)
        alike = (text for pattern, text in values.items() if "*" in pattern and fnmatchcase(value.lower(), pattern))
        row = values[value.lower()] if value.lower() in values else next(alike, row.get("any"))
    return None if row is None else read_equivalent(row)


def by_lower_value(row: dict[str, str]) -> dict[str, str]:
    return {value.lower(): text for value, text in by_name(row).items()}


def read_equivalent(text: str) -> Equivalent:
    target, _, note = text.partition("; ")
    if target in (NEEDLESS, UNSUPPORTED):
        return Equivalent([], target, note)
    split = [re.split(r"\s+(?=[\w.]+=)", alternative) for alternative in target.split(" or ")]
    pairs = [[assignment.partition("=") for assignment in alternative] for alternative in split]
    return Equivalent([{key: value or VALUE for key, _, value in alternative} for alternative in pairs], "", note)


def assigned(settings: Settings, value: str, is_whole: bool = False) -> str:
    """Return settings as on the command line, quoted for a shell where it needs that. Unless `is_whole`, one setting
    that takes their value is its name alone."""
    is_whole = is_whole or len(settings) > 1  # the names of some beside the values of others could not be typed
    return " ".join(
        key if text == VALUE and not is_whole else shell_word(key, filled(text, value), takes_list=text[:1] == "[")
        for key, text in settings.items()
    )


def shell_word(key: str, value: str, takes_list: bool = False) -> str:
    """Return `key=value` as a word that all shells take. A list of plain items for a setting that `takes_list` needs no
    brackets and then no quotes."""
    if takes_list and value.endswith("]"):
        with suppress(ValueError):  # a value of the user, which may be invalid YAML
            items, _ = parse_yaml(value)
            if items and all(isinstance(item, str) and re.fullmatch(r"[^\s,\[\]{}'\"]+", item) for item in items):
                value = ",".join(items)
    return shlex.quote(f"{key}={value}")


def filled(text: str, value: str) -> str:
    """Return a value of ours, such as `[VALUE]`, for a value of theirs, which may be such a list. `1/VALUE`, `1-VALUE`
    and `VALUE/60` are computed."""
    if text == f"[{VALUE}]" and value[:1] == "[":
        return value
    computed = re.fullmatch(r"(1[/-])?VALUE(/60)?", text)
    if computed is None or computed.groups() == (None, None):
        return text.replace(VALUE, value)
    try:
        number = float(value)
        ours = 1 / number if computed[1] == "1/" else 1 - number if computed[1] else number / 60
        return f"{int(ours) if ours == int(ours) else round(ours, 6)}"
    except (ValueError, ArithmeticError):
        return text.replace(VALUE, value)


def are_in(recipe_names: Collection[str], settings: Settings) -> bool:
    """Whether a recipe has all settings. `data.columns.prompt` is an entry of `data.columns`."""
    return all(
        key in recipe_names or (key.count(".") == 2 and key.rpartition(".")[0] in recipe_names) for key in settings
    )
