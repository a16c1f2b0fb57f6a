"""Settings as text: a YAML preset and `key=value` overrides become one validated pydantic model, and back.

What a recipe's settings are is read from the JSON schema that pydantic makes of its `Config`. A value is read with
its setting's schema in hand. Where only text fits, the text stays as it was written, so `data.source=007` names a
file; elsewhere `optimizer.lr=1e-5` is a number (see `lean_ft.strict_yaml`). Nothing is converted after that: neither
`"4"` nor `2.0` is a whole number. Everything that is wrong with one config is told in one message, each with where
it came from.

Left out on purpose: includes, interpolation, environment variables. A preset states what differs from the
defaults, and what it states is what one reads.
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from lean_ft.spelling import did_you_mean
from lean_ft.strict_yaml import Plain, kind, parse_yaml, read_yaml_file, to_yaml

ConfigT = TypeVar("ConfigT", bound=BaseModel)
Schema = dict[str, Any]  # JSON schema of a setting, or of a group of them
Place = tuple[str, ...]  # the names that lead to a setting

COMMAND_LINE = "command line"


def load_config(config_class: type[ConfigT], preset: Path | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Reads a preset (a YAML file, or None), applies `key=value` overrides in order, and validates the result.

    Keys are dotted (`optimizer.lr=1e-5`, `data.columns.prompt=question`). Of two values for one key the last
    wins. A group's default instance holds for the keys of it that nobody gives.

    Raises ValueError with every problem in one message: unknown keys with the nearest valid one, values of the
    wrong type with what was expected, and the required settings that are missing. A preset that cannot be opened
    raises its OSError.
    """
    reader = _Reader(config_class)
    if preset is not None:
        reader.read_preset(preset)
    for override in overrides:
        reader.read_override(override)
    return reader.config()


def preset_fits(config_class: type[BaseModel], preset: Path) -> bool:
    """Whether a recipe takes what a preset sets. Required settings may still be missing: they can be given later."""
    reader = _Reader(config_class)
    try:
        reader.read_preset(preset)
    except (ValueError, OSError):
        return False
    reader.validate()
    return not reader.problems


def preset_values(preset: Path) -> dict[str, str]:
    """What a preset sets, as dotted key -> value on one line as written, whichever recipe it is for."""

    def flatten(value: Any, place: Place) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from flatten(inner, (*place, name))
        else:
            yield ".".join(place), value if isinstance(value, Plain) else to_yaml(value, flow=True)

    values, _ = read_yaml_file(preset)
    return dict(flatten(values, ())) if isinstance(values, dict) else {}


def dump(config: BaseModel) -> str:
    """The settings as YAML, every one of them; `load_config` reads it back to an equal config."""
    return to_yaml(config.model_dump(mode="json"))


# What the settings are ---------------------------------------------------------------------------------------


class _PresetSchema(GenerateJsonSchema):
    """Requires nothing, since the command line may give it; knows the default that a factory makes."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return False

    def default_schema(self, schema: Any) -> Schema:
        factory = schema.get("default_factory")
        return super().default_schema(schema | {"default": factory()} if factory else schema)


def config_schema(config_class: type[BaseModel]) -> Schema:
    """JSON schema of a recipe's presets, for editors. Nothing in it is required: the command line may give it."""
    schema = config_class.model_json_schema(schema_generator=_PresetSchema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@dataclass(frozen=True)
class Setting:
    """One setting of a recipe, for people to read."""

    key: str  # dotted
    type: str  # in words: `whole number > 0 or null`
    required: bool
    default: Any  # as YAML holds it; None where required
    description: str  # unit and meaning


def describe(config_class: type[BaseModel]) -> list[Setting]:
    """Every setting of a recipe, in the order they are declared."""
    return [part for _, part in _parts(_schema(config_class)) if isinstance(part, Setting)]


def commented_yaml(config_class: type[BaseModel], width: int = 100) -> str:
    """Every setting as YAML to cut a preset from: its meaning above it, its type behind it."""
    lines: list[str] = []
    for place, part in _parts(_schema(config_class)):
        indent, name = "  " * (len(place) - 1), place[-1]
        meaning = part.description if isinstance(part, Setting) else part.get("description", "").partition("\n")[0]
        lines += [""] if len(place) == 1 and lines else []
        lines += textwrap.wrap(
            meaning, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
        )
        if not isinstance(part, Setting):
            lines.append(f"{indent}{name}:")
        elif part.required:
            lines.append(f"{indent}{name}:  # required: {part.type}")
        else:
            lines.append(f"{indent}{name}: {to_yaml(part.default, flow=True)}  # {part.type}")
    return "\n".join(lines) + "\n"


@cache
def _schema(config_class: type[BaseModel]) -> Schema:
    """The schema of all settings, with what each `$ref` refers to in its place."""
    schema = config_schema(config_class)
    definitions = schema.get("$defs", {})

    def follow(part: Any) -> None:
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            follow(inner)
        if isinstance(part, dict) and "$ref" in part:
            part |= {**definitions[part.pop("$ref").rpartition("/")[2]], **part}

    follow(schema)
    return schema


def _parts(group: Schema, default: Any = None, above: Place = ()) -> Iterator[tuple[Place, Setting | Schema]]:
    """The settings of a group, whose default instance may be `default`, and the schemas of groups before theirs."""
    for name, schema in group["properties"].items():
        place, inner, own = (
            (*above, name),
            _group(schema),
            {**schema, **({"default": default[name]} if default else {})},
        )
        if inner is None:
            key, is_required = ".".join(place), "default" not in own
            yield place, Setting(key, _type_text(schema), is_required, own.get("default"), own.get("description", ""))
        else:
            yield place, inner
            yield from _parts(inner, own.get("default"), place)


def _alternatives(schema: Schema) -> list[Schema]:
    """The members of a union; a type that is no union is its only one."""
    members = schema.get("anyOf") or schema.get("oneOf")
    return [each for member in members for each in _alternatives(member)] if members else [schema]


def _group(schema: Schema) -> Schema | None:
    """The schema of a group (`OptimizerConfig`, or `| None`); None for a single setting."""
    return next((member for member in _alternatives(schema) if "properties" in member), None)


def _takes(schema: Schema, *types: str) -> Schema | None:
    return next((member for member in _alternatives(schema) if member.get("type") in types), None)


def _entry(mapping: Schema) -> Schema:
    """The schema of a mapping's values; one that takes anything where it does not tell."""
    values = mapping.get("additionalProperties")
    return values if isinstance(values, dict) else {}


def _takes_only_text(schema: Schema) -> bool:
    """Whether every single value that fits is text: a string, a path, or one of some words."""
    types = {member.get("type") for member in _alternatives(schema)} - {"array", "object", "null"}
    return types == {"string"}


_WORDS = {
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "path": "path",
    "null": "null",
}
_BOUNDS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
    "multipleOf": "a multiple of",
}


def _type_text(schema: Schema) -> str:
    """A type in words, with its bounds: `number >= 0 and < 1`, `none | bfd`, `text or list of text`."""
    alternatives = _alternatives(schema)
    if len(alternatives) > 1:
        return " or ".join(map(_type_text, alternatives))
    if words := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " | ".join(map(str, words))
    if items := schema.get("prefixItems"):
        kinds = list(dict.fromkeys(map(_type_text, items)))
        return f"list of {len(items)}, each {kinds[0]}" if len(kinds) == 1 else f"list of: {', '.join(kinds)}"
    if schema.get("type") == "array":
        return f"list of {_type_text(schema['items'])}"
    if "properties" in schema:  # an element of a list
        return f"{{{', '.join(schema['properties'])}}}"
    if schema.get("type") == "object":
        return f"mapping of text to {_type_text(_entry(schema))}"
    text = _WORDS.get(schema.get("format", "")) or _WORDS.get(schema.get("type", ""), "any value")
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return f"{text} {' and '.join(bounds)}" if bounds else text


# How they are read -------------------------------------------------------------------------------------------


class _Reader:
    """Gathers what a preset and overrides give, and everything that is wrong with it."""

    def __init__(self, config_class: type[BaseModel]) -> None:
        self.config_class = config_class
        self.schema = _schema(config_class)
        self.settings = {setting.key: setting for setting in describe(config_class)}
        self.values = _group_defaults(self.schema)
        self.where: dict[str, str] = {}  # key -> where its value came from
        self.problems: list[str] = []

    def read_preset(self, preset: Path) -> None:
        values, lines = read_yaml_file(preset)
        if values is None:  # nothing differs from the defaults
            return
        if not isinstance(values, dict):
            raise ValueError(
                f"{preset}: expected settings as `key: value`, came {kind(values)}. "
                "`leanft cat RECIPE` prints the settings of a recipe as YAML."
            )
        self._take((), self.schema, values, lambda place: f"{preset}, line {lines[place]}")

    def read_override(self, override: str) -> None:
        key, equals, text = override.partition("=")
        place = tuple(key.split("."))
        if not equals or not all(place):
            hint = did_you_mean(key, self.settings)
            self.problems.append(f"'{override}': expected key=value, such as batch_size=4.{hint}")
            return
        schema, inside = self.schema, place
        while inside and (group := _group(schema)):
            schema, inside = group["properties"].get(inside[0]), inside[1:]
            if schema is None:
                return self._unknown(place, COMMAND_LINE)
        mapping = _takes(schema, "object")
        if inside and mapping is None:
            return self._unknown(place, COMMAND_LINE)
        try:
            if inside and mapping:  # one entry is set; the others stay
                place, entry = place[: -len(inside)], _entry(mapping)
                before = self._given(place) or schema.get("default")
                value = _read(_override_value(text, entry), entry)
                self._put(place, {**(before or {}), ".".join(inside): value}, COMMAND_LINE)
            else:
                self._take(place, schema, _override_value(text, schema), lambda _: COMMAND_LINE)
        except ValueError as error:  # not valid YAML
            self.problems.append(f"{override} ({COMMAND_LINE}): {error}")

    def _take(self, place: Place, schema: Schema, value: Any, where: Callable[[Place], str]) -> None:
        group, is_null = _group(schema), isinstance(value, Plain) and value.value() is None
        if group and isinstance(value, dict):
            if place:  # the group is there, whatever it held before
                self._put(place, self._given(place) or {}, where(place))
            for name, inner in value.items():
                if name in group["properties"]:
                    self._take((*place, name), group["properties"][name], inner, where)
                else:
                    self._unknown((*place, name), where((*place, name)))
        elif group is None or (is_null and _takes(schema, "null")):
            self._put(place, _read(value, schema), where(place))
        elif not is_null:  # a group with nothing under it sets nothing
            key, example = ".".join(place), next(iter(group["properties"]))
            self.problems.append(
                f"{key} ({where(place)}): expected its settings one by one, such as {key}.{example}, came {kind(value)}"
            )

    def _given(self, place: Place) -> Any:
        part: Any = self.values
        for name in place:
            part = part.get(name) if isinstance(part, dict) else None
        return part

    def _put(self, place: Place, value: Any, where: str) -> None:
        part = self.values
        for name in place[:-1]:
            part[name] = part[name] if isinstance(part.get(name), dict) else {}
            part = part[name]
        part[place[-1]] = value
        self.where[".".join(place)] = where

    def _unknown(self, place: Place, where: str) -> None:
        key = ".".join(place)
        hint = did_you_mean(key, self.settings) or " `leanft cat RECIPE` lists them."
        self.problems.append(f"{key} ({where}): no such setting.{hint}")

    def config(self) -> Any:
        """The validated config; raises ValueError with all problems."""
        config, missing = self.validate()
        blocks = list(self.problems)
        if missing:
            width = max(len(setting.key) for setting in missing)
            rows = "".join(f"\n  {s.key:<{width}}  {s.description} ({s.type})" for s in missing)
            example = " ".join(f"{setting.key}=..." for setting in missing)
            what = "a required setting is missing" if len(missing) == 1 else "required settings are missing"
            how = "Give it" if len(missing) == 1 else "Give them"
            blocks.append(f"{what}:{rows}\n  {how} in a preset, or as {example}")
        if len(blocks) == 1:
            raise ValueError(blocks[0])
        if blocks:
            bullets = "\n".join("- " + textwrap.indent(block, "  ").strip() for block in blocks)
            raise ValueError(f"{len(self.problems) + len(missing)} problems in the settings:\n{bullets}")
        return config

    def validate(self) -> tuple[BaseModel | None, list[Setting]]:
        """The config, if the values given fit; adds what does not fit to `problems` and returns what is missing."""
        try:
            # Through JSON, because pydantic's strict mode then still takes text for a path and a list for a tuple.
            return self.config_class.model_validate_json(json.dumps(self.values), strict=True), []
        except ValidationError as error:
            return None, self._translate(error)

    def _translate(self, error: ValidationError) -> list[Setting]:
        """Puts pydantic's errors into `problems`, one a setting; returns the settings that are missing."""
        first_details: dict[str, Any] = {}
        for detail in error.errors(include_url=False):
            names = [str(part) for part in detail["loc"]]
            while names and not any(f"{key}.".startswith(".".join(names) + ".") for key in self.settings):
                names.pop()  # an alternative of a union, or an element of a list
            first_details.setdefault(".".join(names), detail)
        missing = []
        for key, detail in first_details.items():
            where = f" ({self.where[key]})" if key in self.where else ""
            reason = detail.get("ctx", {}).get("error")
            if detail["type"] == "missing" and not where:
                missing.append(self.settings[key])
            elif key not in self.settings or reason is not None:  # a validator of the recipe's own
                self.problems.append(f"{key}{where}: {reason or detail['msg']}".removeprefix(": "))
            else:
                setting = self.settings[key]
                came = self._given(tuple(key.split("."))) if where else setting.default
                is_choice = isinstance(came, str) and " | " in setting.type
                hint = did_you_mean(came, setting.type.split(" | ")) if is_choice else ""
                self.problems.append(
                    f"{key}{where}: expected {setting.type}, came {_shown(came)}.{hint}\n  {setting.description}"
                )
        return missing


def _group_defaults(group: Schema) -> Schema:
    """The default instances of groups, to lay the given values on."""
    groups = {name: schema for name, schema in group["properties"].items() if _group(schema)}
    return {
        # A group that has none is there, so that what is missing is named setting by setting.
        name: deepcopy(schema["default"]) if "default" in schema else _group_defaults(_group(schema) or {})
        for name, schema in groups.items()
    }


# In a list on the command line, an item that begins with a wildcard or holds brackets, in pairs: as text, where YAML
# sees an alias or another list. What has quotes is passed over.
_TEXT = r"(?:(?!:\s)[^\[\]{},])*"
_WILDCARDS = re.compile(
    rf"""(?<=[\[,{{:\s])(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')"""
    rf"""|(?:(?<=[\[,])|(?<=[\[,]\s))(\*{_TEXT}|[^\s\[\]{{}},'"]{_TEXT}(?:\[[^\[\]]*\]{_TEXT})+)"""
)


def _override_value(text: str, schema: Schema) -> Any:
    """The value of an override; where only text fits it is taken as it stands, unless quoted or a [list]."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    is_container = text[:1] in ("[", "{") and _takes(schema, "array", "object")
    if _takes_only_text(schema) and not is_quoted and not is_container:
        return Plain(text)
    if is_container:
        text = _WILDCARDS.sub(lambda item: to_yaml(item[1].rstrip(), flow=True) if item[1] else item[0], text)
    value, _ = parse_yaml(text)
    return Plain() if value is None else value


def _read(value: Any, schema: Schema) -> Any:
    """The JSON value of a parsed one; scalars stay text where only text fits `schema`."""
    if isinstance(value, list):
        array = _takes(schema, "array") or {}
        kinds = array.get("prefixItems") or [array.get("items", {})]
        return [_read(item, kinds[min(index, len(kinds) - 1)]) for index, item in enumerate(value)]
    if isinstance(value, dict):
        mapping = _takes(schema, "object") or {}
        return {
            name: _read(inner, mapping.get("properties", {}).get(name, _entry(mapping)))
            for name, inner in value.items()
        }
    stands_for = value.value() if isinstance(value, Plain) else value
    return str(value) if stands_for is not None and _takes_only_text(schema) else stands_for


def _shown(value: Any) -> str:
    """A value as a message shows it, cut where it is long."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:76]} ..."
