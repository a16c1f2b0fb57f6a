"""Descriptions of a recipe's settings, from the JSON schema of its `Config`: names, types in words, defaults and
meaning.

`leanft cat` prints them as a commented preset, `leanft run RECIPE --help` as a line each, and `lean_ft.settings.text`
reads values as the schema says.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ComputedField, DataclassField, ModelField, TypedDictField

from lean_ft.settings.base import Settings
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.system.foreign_values import JSON
from lean_ft.system.spelling import did_you_mean

Schema = dict[str, Any]  # JSON schema of a setting or a group

# Settings that people change first, in this order. A recipe has about ten of them.
COMMON = [
    *("loss.name", "generation.num_answers", "generation.max_new_tokens", "lora.rank", "optimizer.lr", "epochs"),
    *("max_steps", "batch_size", "gradient_accumulation_steps", "data.max_length", "data.packing"),
    *("memory.activation_checkpointing", "output_dir"),
]


class _PresetSchema(GenerateJsonSchema):
    """Marks no field as required, because the command line may set it, and includes defaults from factories."""

    def field_is_required(
        self, field: ModelField | DataclassField | TypedDictField | ComputedField, total: bool
    ) -> bool:
        return False

    def default_schema(self, schema: Any) -> Schema:
        factory = schema.get("default_factory")
        return super().default_schema(schema | {"default": factory()} if factory else schema)


def config_schema(config_class: type[BaseModel]) -> Schema:
    """Return the JSON schema of a recipe's presets, for editors. It requires no key: the command line may set the
    rest."""
    schema = config_class.model_json_schema(schema_generator=_PresetSchema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@dataclass(frozen=True)
class Setting:
    """Description of a setting or a group of settings."""

    key: str  # dotted
    type: str  # in words: `whole number > 0 or null`
    required: bool
    default: Any  # as a YAML value; None if required
    description: str  # unit and meaning
    schema: Schema = field(repr=False)
    group: Schema | None = field(repr=False)  # schema of the group's settings; None for a single setting
    null: str = ""  # the value that replaces null, if each recipe has its own

    @property
    def is_off(self) -> bool:
        """Whether this is a group that is off by default."""
        return self.group is not None and self.default is None and not self.required

    @property
    def is_common(self) -> bool:
        return self.key in COMMON


def describe(config_class: type[BaseModel]) -> list[Setting]:
    """Return all settings of a recipe in declaration order."""
    return [setting for setting in all_settings(config_class).values() if setting.group is None]


def commented_yaml(config_class: type[BaseModel], width: int = 100, only: Sequence[str] = ()) -> str:
    """Return all settings as YAML, each with its meaning above and its type after it. Required and common settings come
    first, and groups that are off by default are commented out. `only` selects settings and groups.

    Raise ValueError with the nearest name for an unknown name in `only`.
    """
    settings, lines = all_settings(config_class), list[str]()
    for name in only:
        if name not in settings:
            raise ValueError(f"no setting and no group is called '{name}'.{did_you_mean(name, settings)}")
    off = ""  # the current group, if it is off
    for setting in in_reading_order(settings):
        if only and not any(
            f"{selected}.".startswith(f"{setting.key}.") or _is_in(setting.key, selected) for selected in only
        ):
            continue
        *groups, name = setting.key.split(".")
        if lines and not groups:
            lines.append("")
        off = off if off and _is_in(setting.key, off) else setting.key if setting.is_off else ""
        indent = f"{'# ' if off else ''}{'  ' * len(groups)}"
        comment = textwrap.wrap(setting.description, width - len(f"{indent}# "), break_on_hyphens=False)
        lines += [f"{indent}# {line}" for line in comment]
        if setting.is_off:
            lines.append(f"{indent}{name}:  # off by default: any of its settings, or {{}}, turns it on")
        elif setting.group:
            lines.append(f"{indent}{name}:")
        elif setting.required:
            lines.append(f"{indent}{name}:  # required: {setting.type}")
        else:
            lines.append(f"{indent}{name}: {to_yaml(setting.default, flow=True)}  # {setting.type}")
    return "\n".join(lines) + "\n"


def one_line_each(config_class: type[BaseModel]) -> str:
    """Return a line per setting: `key=default`, or `key=...` for a required setting, and its type in words. Required
    settings come first, then common ones, then the others by group."""
    parts: dict[str, list[str]] = {"Required": [], "Often changed": []}
    settings = all_settings(config_class)
    for s in in_reading_order(settings):
        if s.group is None:
            group = s.key.rpartition(".")[0].partition(".")[0] or "Others"
            is_off = group in settings and settings[group].is_off
            title = "Required" if s.required else "Often changed" if s.is_common else group
            text = f"{s.key}={'...' if s.required else to_yaml(s.default, flow=True)}"
            notes = ["(off unless set)"] * is_off + [f"(null: {s.null})"] * bool(s.null)
            parts.setdefault(title, []).append(f"  {text:<44} {' '.join([s.type, *notes])}\n")
    return "\n".join(f"{title}\n{''.join(lines)}" for title, lines in parts.items() if lines)


def in_reading_order(settings: dict[str, Setting]) -> list[Setting]:
    """Return settings and groups with those first that are required or have a required setting, then common ones, then
    groups, and engine settings last."""
    first = [key for key, setting in settings.items() if setting.required]
    first += [key for key in COMMON if key in settings]
    numbers = {key: number for number, key in enumerate(settings)}

    def ranks(key: str) -> list[tuple[int, int]]:
        above, last = key.rpartition(".")[0], len(first) + (settings[key].group is None)
        place = next((place for place, leader in enumerate(first) if _is_in(leader, key)), last)
        return [*(ranks(above) if above else []), (place, numbers[key])]

    return sorted(settings.values(), key=lambda setting: ranks(setting.key))


def _is_in(key: str, group: str) -> bool:
    """Whether a key equals a group or is inside it."""
    return f"{key}.".startswith(f"{group}.")


@cache
def all_settings(config_class: type[BaseModel]) -> dict[str, Setting]:
    """Return all settings and groups by key, each group before its settings."""
    schema = config_schema(config_class)
    definitions, settings = schema.get("$defs", {}), {}
    nulls = config_class.meanings_of_null() if issubclass(config_class, Settings) else {}

    def follow(part: JSON) -> None:  # replaces each `$ref` by its definition
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            follow(inner)
        if isinstance(part, dict) and isinstance(reference := part.pop("$ref", None), str):
            part |= {**definitions[reference.rpartition("/")[2]], **part}

    def add(above: Schema, prefix: str, instance: Schema, is_required: bool) -> None:
        for name, schema in above["properties"].items():
            key, group = f"{prefix}{name}", next((m for m in alternatives(schema) if "properties" in m), None)
            default = instance.get(name, schema.get("default"))
            required = name not in instance and "default" not in schema and (is_required or group is None)
            meaning = (group or schema).get("description", "").partition("\n\n")[0]
            words = "" if group else _type_text(schema)
            null = nulls.get(key, "")
            meaning += f" Here: {null}." if null else ""
            settings[key] = Setting(key, words, required, default, meaning, schema, group, null)
            if group:
                add(group, f"{key}.", default or {}, required)

    follow(schema)
    add(schema, "", {}, is_required=True)
    return settings


def alternatives(schema: Schema) -> list[Schema]:
    """Return the alternatives of a union, or the schema itself for another type."""
    members = schema.get("anyOf") or schema.get("oneOf")
    return [inner for member in members for inner in alternatives(member)] if members else [schema]


def alternative(schema: Schema, *types: str) -> Schema | None:
    """Return the first alternative with one of these types, or None."""
    return next((member for member in alternatives(schema) if member.get("type") in types), None)


def entry_schema(mapping: Schema) -> Schema:
    """Return the schema of a mapping's values; {} accepts anything."""
    values = mapping.get("additionalProperties")
    return values if isinstance(values, dict) else {}


_WORDS = {"boolean": "true or false", "integer": "whole number", "string": "text"}
_BOUNDS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
    "multipleOf": "a multiple of",
}


def _type_text(schema: Schema) -> str:
    """Return a type in words with its bounds: `number >= 0 and < 1`, `none | bfd`, `text or list of text`."""
    members, kind_of = alternatives(schema), schema.get("type", "any value")
    if len(members) > 1:
        return " or ".join(map(_type_text, members))
    if "const" in schema or "enum" in schema:
        return " | ".join(map(str, schema.get("enum") or [schema["const"]]))
    if "prefixItems" in schema:
        items = list(map(_type_text, schema["prefixItems"]))
        return f"list of {len(items)}, each {items[0]}" if len(set(items)) == 1 else f"list of: {', '.join(items)}"
    if kind_of == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    if "properties" in schema:  # an element of a list
        return f"{{{', '.join(schema['properties'])}}}"
    if kind_of == "object":
        return f"mapping of text to {_type_text(entry_schema(schema))}"
    formats = {"path": "path", "function": "FILE.py:FUNCTION", "class": "FILE.py:CLASS"}
    text = formats.get(schema.get("format", ""), _WORDS.get(kind_of, kind_of))
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return f"{text} {' and '.join(bounds)}".rstrip()
