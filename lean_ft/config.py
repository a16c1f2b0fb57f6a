"""Strict settings: a YAML preset and `key=value` overrides become one validated pydantic model.

A value is read with the type of its setting in hand. Where only text fits, the text stays as it was written, so
`data.source=007` names a file; elsewhere `optimizer.lr=1e-5` is a number (see `lean_ft.strict_yaml`). Nothing is
converted after that: neither `"4"` nor `2.0` is a whole number. Everything that is wrong with one config is told
in one message, each with where it came from.

Left out on purpose: includes, interpolation, environment variables. A preset states what differs from the
defaults, and what it states is what one reads.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lean_ft.spelling import did_you_mean
from lean_ft.strict_yaml import kind, parse_yaml, plain_scalar, read_yaml_file, scalar_value, to_yaml

ConfigT = TypeVar("ConfigT", bound=BaseModel)

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

    def one_line(node: yaml.Node) -> str:
        if isinstance(node, yaml.SequenceNode):
            return f"[{', '.join(map(one_line, node.value))}]"
        if isinstance(node, yaml.MappingNode):  # an empty one: the others are keys of their own
            return "{}"
        return to_yaml(node.value, flow=True) if getattr(node, "style", None) else node.value

    def flatten(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if isinstance(node, yaml.MappingNode) and node.value:
            for key, value in node.value:
                yield from flatten(value, (*path, key.value))
        else:
            yield ".".join(path), one_line(node)

    node = read_yaml_file(preset)
    return dict(flatten(node, ())) if isinstance(node, yaml.MappingNode) else {}


def dump(config: BaseModel) -> str:
    """The settings as YAML, every one of them; `load_config` reads it back to an equal config."""
    return to_yaml(config.model_dump(mode="json"))


def config_schema(config_class: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of a recipe's presets, for editors. Nothing in it is required: the command line may give it."""

    def without_required(part: Any) -> Any:
        if isinstance(part, list):
            return [without_required(item) for item in part]
        if not isinstance(part, dict):
            return part
        # A setting may be called `required` too; the keyword is the one that holds a list.
        kept = {k: v for k, v in part.items() if not (k == "required" and isinstance(v, list))}
        return {k: without_required(v) for k, v in kept.items()}

    schema = without_required(config_class.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


# What the settings are ---------------------------------------------------------------------------------------


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

    def leaves(model: type[BaseModel], prefix: str, instance: BaseModel | None) -> Iterator[Setting]:
        for name, field in model.model_fields.items():
            default = _default(field) if instance is None else getattr(instance, name)
            group = _group(field.annotation)
            if group is not None:
                yield from leaves(group, f"{prefix}{name}.", default if isinstance(default, BaseModel) else None)
                continue
            required = default is PydanticUndefined
            yield Setting(
                key=f"{prefix}{name}",
                type=_type_text(field.annotation, field.metadata),
                required=required,
                default=None if required else _plain(default),
                description=field.description or "",
            )

    return list(leaves(config_class, "", None))


def commented_yaml(config_class: type[BaseModel], width: int = 100) -> str:
    """Every setting as YAML to cut a preset from: its meaning above it, its type behind it."""
    settings = {setting.key: setting for setting in describe(config_class)}

    def comment(text: str, indent: str) -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
        )

    def lines(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
        indent = "  " * len(path)
        for name, field in model.model_fields.items():
            if not path:
                yield ""
            group = _group(field.annotation)
            if group is not None:
                yield from comment((group.__doc__ or "").strip().partition("\n")[0], indent)
                yield f"{indent}{name}:"
                yield from lines(group, (*path, name))
                continue
            setting = settings[".".join((*path, name))]
            yield from comment(setting.description, indent)
            if setting.required:
                yield f"{indent}{name}:  # required: {setting.type}"
            else:
                yield f"{indent}{name}: {to_yaml(setting.default, flow=True)}  # {setting.type}"

    return "\n".join(lines(config_class, ())).strip("\n") + "\n"


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def _plain(value: Any) -> Any:
    """A default as YAML holds it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union, without their bounds; a type that is no union is its only one."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _members(args[0])
    if origin in (Union, UnionType):
        return [member for arg in args for member in _members(arg)]
    return [annotation]


def _group(annotation: Any) -> type[BaseModel] | None:
    """The settings class of a group (`OptimizerConfig`, or `| None`); None for a single setting."""
    classes = [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]
    return classes[0] if classes else None


def _containers(annotation: Any) -> list[Any]:
    return [m for m in _members(annotation) if (get_origin(m) or m) in (list, tuple, set, frozenset, dict)]


def _takes_only_text(annotation: Any) -> bool:
    """Whether every single value that fits is text: a string, a path, or one of some words."""

    def is_text(member: Any) -> bool:
        if get_origin(member) is Literal:
            return all(isinstance(word, str) for word in get_args(member))
        return isinstance(member, type) and issubclass(member, str | Path)

    mappings_and_lists = [*_containers(annotation), _group(annotation)]
    scalars = [m for m in _members(annotation) if m is not NoneType and m not in mappings_and_lists]
    return bool(scalars) and all(is_text(member) for member in scalars)


_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    NoneType: "null",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}


def _type_text(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds: `number >= 0 and < 1`, `none | bfd`, `text or list of text`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [c for extra in args[1:] for c in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _type_text(args[0], [*nested, *constraints])
    if origin is Literal:
        text = " | ".join(str(word) for word in args)
    elif origin in (Union, UnionType):
        text = " or ".join(_type_text(arg) for arg in args)
    elif origin is tuple and Ellipsis not in args:
        kinds = list(dict.fromkeys(_type_text(arg) for arg in args))
        text = f"list of {len(args)}, each {kinds[0]}" if len(kinds) == 1 else f"list of: {', '.join(kinds)}"
    elif origin in (list, tuple, set, frozenset):
        text = f"list of {_type_text(args[0])}"
    elif origin is dict:
        text = f"mapping of {_type_text(args[0])} to {_type_text(args[1])}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):  # an element of a list
        text = f"{{{', '.join(annotation.model_fields)}}}"
    else:
        text = _WORDS.get(annotation) or getattr(annotation, "__name__", str(annotation))
    bounds = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in constraints
        for name, sign in _BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    return f"{text} {' and '.join(bounds)}" if bounds else text


# How they are read -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """A value that somebody gave, and where."""

    value: Any
    where: str


class _Reader:
    """Gathers what a preset and overrides give, and everything that is wrong with it."""

    def __init__(self, config_class: type[BaseModel]) -> None:
        self.config_class = config_class
        self.settings = {setting.key: setting for setting in describe(config_class)}
        self.given: dict[tuple[str, ...], _Given] = {}
        self.problems: list[str] = []

    def read_preset(self, preset: Path) -> None:
        node = read_yaml_file(preset)
        if node is None:  # nothing differs from the defaults
            return
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(
                f"{preset}: expected settings as `key: value`, came {kind(node)}. "
                "`leanft cat RECIPE` prints the settings of a recipe as YAML."
            )
        self._take_mapping((), self.config_class, node, lambda part: f"{preset}, line {part.start_mark.line + 1}")

    def read_override(self, override: str) -> None:
        key, equals, text = override.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            hint = did_you_mean(key, self.settings)
            self.problems.append(f"'{override}': expected key=value, such as batch_size=4.{hint}")
            return
        model = self.config_class
        for depth, name in enumerate(path):
            field = model.model_fields.get(name)
            if field is None:
                self._unknown(path, COMMAND_LINE)
                return
            group, inner = _group(field.annotation), path[depth + 1 :]
            if group is None or not inner:
                try:
                    self._take_override(path[: depth + 1], field, inner, text)
                except ValueError as error:  # not valid YAML
                    self.problems.append(f"{override} ({COMMAND_LINE}): {error}")
                return
            model = group

    def _take_override(self, path: tuple[str, ...], field: FieldInfo, inner: tuple[str, ...], text: str) -> None:
        if not inner:
            self._take(path, field, _override_node(text, field.annotation), lambda _: COMMAND_LINE)
            return
        mapping = next((m for m in _containers(field.annotation) if get_origin(m) is dict), None)
        if mapping is None:
            self._unknown((*path, *inner), COMMAND_LINE)
            return
        # One entry of a mapping is set; its other entries stay.
        entry_type = get_args(mapping)[1]
        before = self.given[path].value if path in self.given else _plain(_default(field))
        entry = {".".join(inner): _read(_override_node(text, entry_type), entry_type)}
        self._give(path, {**(before if isinstance(before, dict) else {}), **entry}, COMMAND_LINE)

    def _give(self, path: tuple[str, ...], value: Any, where: str) -> None:
        self.given.pop(path, None)  # so that what is given last comes last
        self.given[path] = _Given(value, where)

    def _take_mapping(
        self,
        path: tuple[str, ...],
        model: type[BaseModel],
        node: yaml.MappingNode,
        where: Callable[[yaml.Node], str],
    ) -> None:
        for key, value in node.value:
            field = model.model_fields.get(key.value)
            if field is None:
                self._unknown((*path, key.value), where(key))
            else:
                self._take((*path, key.value), field, value, where)

    def _take(
        self, path: tuple[str, ...], field: FieldInfo, node: yaml.Node, where: Callable[[yaml.Node], str]
    ) -> None:
        group = _group(field.annotation)
        is_null = isinstance(node, yaml.ScalarNode) and scalar_value(node) is None
        if group is not None and isinstance(node, yaml.MappingNode):
            self._give(path, {}, where(node))  # the group is there, whatever it held before
            self._take_mapping(path, group, node, where)
        elif group is None or (is_null and NoneType in _members(field.annotation)):
            self._give(path, _read(node, field.annotation), where(node))
        elif not is_null:  # a group with nothing under it sets nothing
            key, example = ".".join(path), next(iter(group.model_fields))
            self.problems.append(
                f"{key} ({where(node)}): expected its settings one by one, such as {key}.{example}, came {kind(node)}"
            )

    def _unknown(self, path: tuple[str, ...], where: str) -> None:
        key = ".".join(path)
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
        tree = _group_defaults(self.config_class)
        for path, given in self.given.items():
            part = tree
            for name in path[:-1]:
                part[name] = part[name] if isinstance(part.get(name), dict) else {}
                part = part[name]
            is_group = ".".join(path) not in self.settings and given.value is not None
            part[path[-1]] = part.get(path[-1]) or {} if is_group else given.value
        try:
            # Through JSON, because pydantic's strict mode then still takes text for a path and a list for a tuple.
            return self.config_class.model_validate_json(json.dumps(tree), strict=True), []
        except ValidationError as error:
            return None, self._translate(error)

    def _translate(self, error: ValidationError) -> list[Setting]:
        """Puts pydantic's errors into `problems`, one a setting; returns the settings that are missing."""
        first_details: dict[str, Any] = {}
        for detail in error.errors(include_url=False):
            path = [str(part) for part in detail["loc"]]
            while path and not any(f"{key}.".startswith(".".join(path) + ".") for key in self.settings):
                path.pop()  # an alternative of a union, or an element of a list
            first_details.setdefault(".".join(path), detail)
        missing = []
        for key, detail in first_details.items():
            given = self.given.get(tuple(key.split(".")))
            where = f" ({given.where})" if given else ""
            reason = detail.get("ctx", {}).get("error")
            if detail["type"] == "missing" and given is None:
                missing.append(self.settings[key])
            elif key not in self.settings or reason is not None:  # a validator of the recipe's own
                self.problems.append(f"{key}{where}: {reason or detail['msg']}".removeprefix(": "))
            else:
                setting = self.settings[key]
                came = given.value if given else setting.default
                is_choice = isinstance(came, str) and " | " in setting.type
                hint = did_you_mean(came, setting.type.split(" | ")) if is_choice else ""
                self.problems.append(
                    f"{key}{where}: expected {setting.type}, came {_shown(came)}.{hint}\n  {setting.description}"
                )
        return missing


def _group_defaults(model: type[BaseModel]) -> dict[str, Any]:
    """What the default instances of groups set beyond their classes' defaults, to lay the given values on."""
    tree: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        group, default = _group(field.annotation), _default(field)
        if isinstance(default, BaseModel):
            tree[name] = default.model_dump(mode="json", exclude_unset=True)
        elif group is not None and default is PydanticUndefined:
            tree[name] = _group_defaults(group)  # so that what is missing is named setting by setting
    return tree


def _override_node(text: str, expected: Any) -> yaml.Node:
    """The value of an override; where only text fits it is taken as it stands, unless quoted or a [list]."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    is_container = text[:1] in ("[", "{") and bool(_containers(expected))
    if _takes_only_text(expected) and not is_quoted and not is_container:
        return plain_scalar(text)
    return parse_yaml(text) or plain_scalar("")


def _read(node: yaml.Node, expected: Any) -> Any:
    """The JSON value of a node; scalars stay text where only text fits `expected`, a type annotation."""
    containers = _containers(expected)
    if isinstance(node, yaml.SequenceNode):
        kinds = next((get_args(m) for m in containers if get_origin(m) not in (dict, None)), ())
        kinds = [k for k in kinds if k is not Ellipsis] or [Any]
        return [_read(item, kinds[min(index, len(kinds) - 1)]) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        kind_of_value = next((get_args(m)[1] for m in containers if get_origin(m) is dict), Any)
        return {key.value: _read(value, kind_of_value) for key, value in node.value}
    value = scalar_value(node)
    return node.value if value is not None and _takes_only_text(expected) else value


def _shown(value: Any) -> str:
    """A value as a message shows it, cut where it is long."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:76]} ..."
