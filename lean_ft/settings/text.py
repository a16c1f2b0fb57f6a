"""Conversion between text and settings: a YAML preset and `key=value` overrides become a validated pydantic model.

The settings of a recipe come from the JSON schema of its `Config`. The schema decides how a value is read. If a setting
accepts only text, the value keeps its spelling, so `data.source=007` names a file. Otherwise `optimizer.lr=1e-5` is a
number (see `lean_ft.settings.strict_yaml`). Values are not converted further: neither `"4"` nor `2.0` is an integer.
One error message lists all problems of a config with their locations.

Presets deliberately support no includes, interpolation or environment variables, so that a file shows its exact values.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lean_ft.settings.describing import (
    Schema,
    Setting,
    all_settings,
    alternative,
    alternatives,
    entry_schema,
    in_reading_order,
)
from lean_ft.settings.hints import hint_for_name, hint_for_value
from lean_ft.settings.other_tools import RECIPE
from lean_ft.settings.strict_yaml import Plain, kind, parse_yaml, read_yaml_file, to_yaml
from lean_ft.system.foreign_values import JSON

ConfigT = TypeVar("ConfigT", bound=BaseModel)

COMMAND_LINE = "command line"
MAX_PROBLEMS = 20  # listed in one message
_DATA_FILE = re.compile(r"\.(jsonl?|[ct]sv|txt|md|parquet)(\.gz|\.zst)?$")


def load_config(
    config_class: type[ConfigT], preset: Path | None, overrides: Sequence[str] = (), given_by: str = COMMAND_LINE
) -> ConfigT:
    """Read a preset (a YAML file, or None), apply `key=value` overrides in order, and validate the result.

    Keys are dotted (`optimizer.lr=1e-5`, `data.columns.prompt=question`). The last value for a key wins. Missing keys
    of a group come from its default instance. A list needs no brackets (`freeze=mlp`, `lora.targets=q_proj,v_proj`),
    so that a shell takes it unquoted; its items may be quoted. An item of a list in an override may begin with `*` and
    contain paired brackets: `lora.targets=model.layers.[0-3].*`.
    Messages name `given_by` as the location of an override; "" omits the location.

    Raise ValueError with all problems in one message: unknown keys with the nearest valid key, values of the wrong type
    with the expected type, and missing required settings. Raise OSError if the preset cannot be opened.
    """
    reader = _Reader(config_class, given_by)
    if preset is not None:
        reader.read_preset(preset)
    for override in overrides:
        reader.read_override(override)
    return reader.config()


def preset_fits(config_class: type[BaseModel], preset: Path) -> bool:
    """Whether a recipe accepts the settings of a preset. Required settings may be missing."""
    reader = _Reader(config_class)
    try:
        reader.read_preset(preset)
    except (ValueError, OSError):
        return False
    reader.validate()
    return not reader.problems


def problems_of(config_class: type[BaseModel], values: dict[str, Any]) -> tuple[list[str], list[Setting]]:
    """Return the problems of nested values, most of them as `key: reason`, and the required settings that are
    missing."""
    reader, (read, _) = _Reader(config_class, ""), parse_yaml(to_yaml(values))
    for name, value in (read or {}).items():
        reader._take(name, value, lambda key: "")
    _, missing = reader.validate()
    return reader.problems, missing


def preset_recipe(preset: Path) -> str | None:
    """Return the recipe that a preset names with `recipe: NAME`, or None."""
    values, _ = read_yaml_file(preset)
    name = values.get(RECIPE) if isinstance(values, dict) else None
    return str(name) if isinstance(name, str) else None


def preset_values(preset: Path) -> dict[str, str]:
    """Return the settings of a preset as dotted key -> value on one line, without validation against a recipe."""

    values, _ = read_yaml_file(preset)
    settings = dotted(values) if isinstance(values, dict) else ()
    return {k: v if isinstance(v, Plain) else to_yaml(v, flow=True) for k, v in settings if k != RECIPE}


def dotted(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values as (`group.name`, value) in order. An empty group is a value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def dump(config: BaseModel) -> str:
    """Return all settings as YAML. `load_config` reads them back into an equal config."""
    return to_yaml(config.model_dump(mode="json"))


def dump_chosen(config: BaseModel) -> str:
    """Return as YAML the settings that are required, common, or not at their default. `load_config` reads them back
    into an equal config."""
    values, chosen = config.model_dump(mode="json"), dict[str, Any]()
    for setting in in_reading_order(all_settings(type(config))):
        *groups, name = setting.key.split(".")
        inside, into = values, chosen
        for group in groups:
            inside = inside and inside[group]
        if inside is None:  # the group is off
            continue
        is_changed = inside[name] != setting.default
        if (
            setting.required
            or (is_changed and setting.is_off)
            or (not setting.group and (is_changed or setting.is_common))
        ):
            for group in groups:
                into = into.setdefault(group, {})
            into[name] = {} if setting.group else inside[name]
    return to_yaml(chosen)


class _Reader:
    """Collects the values of a preset and overrides, and their problems."""

    def __init__(self, config_class: type[BaseModel], given_by: str = COMMAND_LINE) -> None:
        self.config_class, self.given_by = config_class, given_by
        self.settings = all_settings(config_class)
        self.values: dict[str, Any] = {}
        self.given: dict[str, tuple[Any, str]] = {}  # key -> value and its location
        self.problems: list[str] = []
        for setting in self.settings.values():
            if setting.group and setting.required:
                self._inside(setting.key)  # so that errors name each missing setting

    def read_preset(self, preset: Path) -> None:
        values, lines = read_yaml_file(preset)
        if values is None:  # an empty preset
            return
        if not isinstance(values, dict):
            raise ValueError(
                f"{preset}: expected settings as `key: value`, found {kind(values)}. "
                "`leanft cat RECIPE` prints the settings of a recipe as YAML."
            )
        for name, value in values.items():
            if name == RECIPE and name not in self.settings:  # the preset's recipe, which the caller reads
                continue
            self._take(name, value, lambda key: f"{preset}, line {lines[key]}")

    def read_override(self, override: str) -> None:
        key, equals, text = override.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            self.problems.append(f"'{override}': expected key=value{self._example(override)}")
            return
        owner = self._owner(names)
        setting, entry = self.settings.get(owner), key.removeprefix(owner).removeprefix(".")
        mapping = alternative(setting.schema, "object") if setting and not setting.group else None
        try:
            if setting and mapping and entry:  # set one entry and keep the others
                before, _ = self.given.get(owner, (setting.default, ""))
                value = _read(_override_value(key, text, entry_schema(mapping)), entry_schema(mapping))
                self._give(owner, {**(before if isinstance(before, dict) else {}), entry: value}, self.given_by)
            elif (part := self._part_of_item(owner, entry)) is not None:
                before, _ = self.given.get(owner, ([], ""))
                item = before[0] if isinstance(before, list) and len(before) == 1 else {}
                value = _read(_override_value(key, text, part), part)
                self._give(owner, [{**(item if isinstance(item, dict) else {}), entry: value}], self.given_by)
            else:
                value = (
                    _override_value(key, text, self._schema(setting, text)) if setting and not entry else Plain(text)
                )
                self._take(key, value, lambda _: self.given_by)
        except ValueError as error:  # invalid YAML
            self.problems.append(f"{_at(override, self.given_by)}: {error}")

    def _example(self, word: str) -> str:
        """Return the end of the message for an override that is only a value or a name."""
        path = Path(word).expanduser()
        is_data = path.is_file() or _DATA_FILE.search(word) is not None
        key = "data.source" if is_data else "model.path" if word and path.is_dir() else "prompt"
        if key in self.settings:
            return f". Did you mean '{key}={word}'?" if key != "prompt" else f", such as prompt='{word}'."
        return f", such as batch_size=4.{self._meant(word)}"

    def _part_of_item(self, owner: str, entry: str) -> Schema | None:
        """Return the schema of `rewards.weight`: a part of the one item of a list."""
        setting = self.settings.get(owner)
        items = _items_of_list(setting.schema) if setting and not setting.group else None
        return ((alternative(items, "object") or {}).get("properties") or {}).get(entry) if items else None

    def _schema(self, setting: Setting, text: str) -> Schema:
        """Return the schema that a text is read by: of a list, also where the list stands for its group."""
        name = setting.group.get("list_of") if setting.group and not text.startswith("{") else None
        return self.settings[f"{setting.key}.{name}"].schema if name else setting.schema

    def _take(self, key: str, value: JSON, where: Callable[[str], str]) -> None:
        setting = self.settings.get(key)
        is_null = isinstance(value, Plain) and value.value() is None
        if setting is None:
            hint = self._meant(key, value) or " `leanft cat RECIPE` lists them."
            self.problems.append(f"{_at(key, where(key))}: no such setting.{hint}")
        elif setting.group is None or (is_null and alternative(setting.schema, "null")):
            self._give(key, _read(value, setting.schema), where(key))
        elif isinstance(value, dict):
            self._inside(key)  # turns the group on
            self.given[key] = value, where(key)
            for name, inner in value.items():
                self._take(f"{key}.{name}", inner, where)
        elif not is_null and (name := setting.group.get("list_of")):  # a value of this setting of the group
            self._take(f"{key}.{name}", value, lambda _: where(key))
        elif not is_null:  # an empty group sets nothing
            example = f"{key}.{next(iter(setting.group['properties']))}"
            self.problems.append(
                f"{_at(key, where(key))}: expected its settings one by one, such as {example}, found {kind(value)}."
                f"{self._meant(key, value)}"
            )

    def _give(self, key: str, value: JSON, where: str) -> None:
        group, _, name = key.rpartition(".")
        self._inside(group)[name] = value
        self.given[key] = value, where

    def _inside(self, group: str) -> dict[str, Any]:
        """Return the values of a group. If the group is off, turn it on with the values of its default instance."""
        if not group:
            return self.values
        above, _, name = group.rpartition(".")
        values = self._inside(above)
        if not isinstance(values.get(name), dict):
            values[name] = deepcopy(self.settings[group].default or {})
        return values[name]

    def _owner(self, names: list[str]) -> str:
        """Return the longest key of a setting or group that is a prefix: `data.columns` for data.columns.prompt."""
        keys = (".".join(names[:count]) for count in range(len(names), 0, -1))
        return next((key for key in keys if key in self.settings), "")

    def _meant(self, key: str, value: JSON = "") -> str:
        """Return a hint for a key that is no setting."""
        if len(self.problems) >= MAX_PROBLEMS:  # the hint would not be shown, and a search takes milliseconds
            return ""
        return hint_for_name(key, value, self.settings)

    def config(self) -> Any:
        """Return the validated config. Raise ValueError with all problems."""
        config, missing = self.validate()
        blocks = list(self.problems)
        # A setting that the hint of another problem proposes is not missing too.
        missing = [setting for setting in missing if not any(f"'{setting.key}" in block for block in blocks)]
        if missing:
            width = max(len(setting.key) for setting in missing)
            rows = "".join(f"\n  {s.key:<{width}}  {s.description} ({s.type})" for s in missing)
            example = " ".join(f"{setting.key}=..." for setting in missing)
            what = "a required setting is missing" if len(missing) == 1 else "required settings are missing"
            how = "Give it" if len(missing) == 1 else "Give them"
            blocks.append(f"{what}:{rows}\n  {how} in a preset, or as {example}")
        if len(blocks) == 1:
            raise ValueError(blocks[0])
        left_out = len(blocks) - MAX_PROBLEMS
        if left_out > 0:
            blocks[MAX_PROBLEMS:] = [f"and {left_out:,} more"]
        if blocks:
            bullets = "\n".join("- " + textwrap.indent(block, "  ").strip() for block in blocks)
            raise ValueError(f"{len(self.problems) + len(missing)} problems in the settings:\n{bullets}")
        return config

    def validate(self) -> tuple[BaseModel | None, list[Setting]]:
        """Return the config, or None for invalid values, and the missing settings. Add invalid values to `problems`."""
        try:
            # Validate JSON, because pydantic's strict mode then accepts text for a path and a list for a tuple.
            return self.config_class.model_validate_json(json.dumps(self.values), strict=True), []
        except ValidationError as error:
            first_details, of_entries = dict[str, Any](), dict[str, dict[str, str]]()
            # Of the errors of a union's alternatives, take the first with a reason.
            for detail in error.errors(include_url=False):
                key = self._owner([str(part) for part in detail["loc"]])
                has_reason = "error" in detail.get("ctx", {})
                of_entries[key] = _problem_of_entry(detail) | of_entries.get(key, {})
                if key not in first_details or (has_reason and "error" not in first_details[key].get("ctx", {})):
                    first_details[key] = detail
        missing = []
        for key, detail in first_details.items():
            setting, reason = self.settings.get(key), detail.get("ctx", {}).get("error")
            current, where = self.given.get(key, (setting and setting.default, ""))
            place = _at(key, where)
            if setting and detail["type"] == "missing" and key not in self.given:
                missing.append(setting)
            elif setting is None or setting.group or reason is not None:  # from a validator of the recipe or a group
                self.problems.append(f"{place}: {reason or detail['msg']}".removeprefix(": "))
            else:
                problems = "".join(of_entries[key].values())
                hint = problems or hint_for_value(setting, current, self.settings)
                self.problems.append(
                    f"{place}: expected {setting.type}, found {_shown(current)}.{hint}\n  {setting.description}"
                )
        return None, missing


def _problem_of_entry(detail: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with a field of a list's entry, by the place of both; nothing for other errors."""
    place = detail["loc"]
    i = next((i for i, part in enumerate(place) if isinstance(part, int)), len(place))
    if len(place) < i + 3:  # the number of the entry, the kind of the entry, its field
        return {}
    entry, field = f" Entry {place[i] + 1}", place[i + 2]
    if detail["type"] in ("extra_forbidden", "missing"):
        problem = f"{entry}: {'unknown' if detail['type'] == 'extra_forbidden' else 'missing'} field {field}."
    else:
        problem = f"{entry}: {field} is {_shown(detail['input'])}. {detail['msg']}."
    return {f"{entry}, {field}": problem}


# List items on the command line that begin with a wildcard or contain paired brackets. They are text, but YAML would
# read an alias or a nested list. Quoted items are skipped.
_TEXT = r"(?:(?!:\s)[^\[\]{},])*"
_WILDCARDS = re.compile(
    rf"""(?<=[\[,{{:\s])(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')"""
    rf"""|(?:(?<=[\[,])|(?<=[\[,]\s))(\*{_TEXT}|[^\s\[\]{{}},'"]{_TEXT}(?:\[[^\[\]]*\]{_TEXT})+)"""
)


def _takes_only_text(schema: Schema) -> bool:
    """Whether text is the only scalar that fits: a string, a path or a choice."""
    return {member.get("type") for member in alternatives(schema)} - {"array", "object", "null"} == {"string"}


# A quoted text, and the items of a list without brackets. An item may be quoted, or have paired brackets.
_QUOTED = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')""")
_ITEM = rf"(?:{_QUOTED.pattern}(?=,|$)|(?!\s)(?:\[[^\[\]]*\]|[^,])+)"
_ITEMS = re.compile(rf"{_ITEM}(?:,{_ITEM})*")


def _override_value(key: str, text: str, schema: Schema) -> JSON:
    """Return the value of an override. If only text fits, keep it as written, unless it is quoted or a [list]. If only
    a list fits, `a,b` is a list. Raises ValueError for invalid YAML and unclear commas."""
    is_quoted = _QUOTED.fullmatch(text) is not None
    is_container = text[:1] in ("[", "{") and alternative(schema, "array", "object")
    if _takes_only_text(schema) and not is_quoted and not is_container:
        return Plain(text)
    if _is_list(schema) and text[:1] != "[" and not is_quoted and Plain(text).value() is not None:
        if not ("{" in text and alternative(_items_of_list(schema) or {}, "object")):
            return _without_brackets(key, text)
        text, is_container = f"[{text}]", True
    if is_container:
        text = _WILDCARDS.sub(lambda item: to_yaml([item[1].rstrip()], flow=True)[1:-1] if item[1] else item[0], text)
    try:
        value, _ = parse_yaml(text)
    except ValueError as error:
        closing = {"[": "]", "{": "}"}.get(text[:1])
        if closing is None or text.rstrip().endswith(closing):
            raise
        whole = shlex.quote(f"{key}={text} ...{closing}")
        raise ValueError(f"{error} A shell divides words at spaces. Quote the setting, such as {whole}.") from None
    return Plain() if value is None else value


def _without_brackets(key: str, text: str) -> JSON:
    """Return the items of `a,b`. Raises ValueError for commas that may be a part of a text."""
    if "," not in text:
        return [Plain(text)]
    if _ITEMS.fullmatch(text) is None:
        one = json.dumps(text, ensure_ascii=False)
        raise ValueError(
            f"a comma without an item on each side, or with a space after it. Write several values as "
            f"{shlex.quote(f'{key}=[a, b]')}, and one text with a comma as {shlex.quote(f'{key}={one}')}."
        )
    return [parse_yaml(item)[0] if item[0] in "\"'" else Plain(item) for item in re.findall(_ITEM, text)]


def _is_list(schema: Schema) -> bool:
    """Whether a list is all that fits, or null."""
    return {member.get("type") for member in alternatives(schema)} - {"null"} == {"array"}


def _items_of_list(schema: Schema) -> Schema | None:
    """Return the schema of a list's items if only a list of any length fits, otherwise None."""
    array = alternative(schema, "array")
    return array.get("items") if array and _is_list(schema) and "prefixItems" not in array else None


def _read(value: JSON, schema: Schema) -> JSON:
    """Return the JSON value of a parsed value. Scalars stay text if only text fits `schema`. A single value for a list
    becomes a list with one item."""
    items = _items_of_list(schema)
    if items and isinstance(value, (str, int, float, dict) if alternative(items, "object") else (str, int, float)):
        is_null = isinstance(value, Plain) and value.value() is None
        value = value if is_null else [value]
    if isinstance(value, list):
        array = alternative(schema, "array") or {}
        kinds = array.get("prefixItems") or [array.get("items", {})]
        return [_read(item, kinds[min(index, len(kinds) - 1)]) for index, item in enumerate(value)]
    if isinstance(value, dict):
        mapping = alternative(schema, "object") or {}
        kinds, other = mapping.get("properties", {}), entry_schema(mapping)
        return {name: _read(inner, kinds.get(name, other)) for name, inner in value.items()}
    stands_for = value.value() if isinstance(value, Plain) else value
    return str(value) if stands_for is not None and _takes_only_text(schema) else stands_for


def _at(what: str, where: str) -> str:
    """Return a key with its location, such as `optimizer.lr (command line)`. Values from Python have no location."""
    return f"{what} ({where})" if where else what


def _shown(value: JSON) -> str:
    """Return a value for a message, truncated if long."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:76]} ..."
