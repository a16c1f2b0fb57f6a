"""JSON schemas of Python functions, from their type hints and docstrings.

Source: transformers' `get_json_schema`, which returns the same schemas and refuses the same functions.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Hashable
from contextlib import suppress
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
PLAIN = SCALARS | {list: "array", tuple: "array", dict: "object"}
EXAMPLE = 'Write it as in:\n    """Search the web.\n\n    Args:\n        query: The words to search for.\n    """'
# The sections of a docstring, the parameters of `Args:`, and choices at the end of a parameter's description.
_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"(?:^|\n)([ \t]*)(\w+):\s*(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+:|\Z)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema that a chat template gets. Raises ValueError without a docstring, hints, or descriptions of
    parameters."""
    name = getattr(function, "__name__", "operation")
    text = (inspect.getdoc(function) or "").strip()
    if not text:
        raise ValueError(f"the function {name} has no docstring, so a model cannot know what it does. {EXAMPLE}")
    try:
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise ValueError(f"the type hints of {name} cannot be read ({type(error).__name__}: {error}).") from None
    if bare := [
        parameter_name for parameter_name, parameter in parameters.items() if parameter.annotation is parameter.empty
    ]:
        raise ValueError(f"{name}: the parameter {', '.join(bare)} has no type hint. Add one, as in `{bare[0]}: str`.")
    args = _ARGS.search(text)
    lines = "\n".join(line for line in args[1].split("\n") if line.strip()) if args else ""
    described = {match[2]: re.sub(r"\s*\n+\s*", " ", match[3].strip()) for match in _PARAMETER.finditer(lines)}
    if missing := [parameter_name for parameter_name in parameters if parameter_name not in described]:
        raise ValueError(f"{name}: the docstring does not describe the parameter {', '.join(missing)}. {EXAMPLE}")
    properties = {
        parameter_name: _described(
            name,
            parameter_name,
            _of_hint(hints[parameter_name], f"{name}: the parameter {parameter_name}"),
            described[parameter_name],
        )
        for parameter_name in parameters
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [
        parameter_name for parameter_name, parameter in parameters.items() if parameter.default is parameter.empty
    ]:
        schema["required"] = required
    description = _DESCRIPTION.search(text)
    made = {"name": name, "description": description[1].strip() if description else None, "parameters": schema}
    with suppress(KeyError, ValueError):  # no hint, or that of a value that a model never writes
        returns = _RETURNS.search(text)
        made["return"] = _of_hint(hints["return"], "") | ({"description": returns[1].strip()} if returns else {})
    return {"type": "function", "function": made}


def _described(function: str, name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    if match := _CHOICES.search(text):
        try:
            choices = [choice.strip() if isinstance(choice, str) else choice for choice in json.loads(match[1])]
        except (ValueError, TypeError):
            raise ValueError(
                f'{function}: the choices of {name} are {match[1]}; expected a JSON list, as ["a", "b"].'
            ) from None
        schema, text = schema | {"enum": choices}, text[: match.start()].strip()
    return schema | {"description": text}


def _of_hint(hint: object, what: str) -> dict[str, Any]:
    """The schema of a type hint. what: for the message."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        origin, args = Literal, [choice.value for choice in hint]
    if origin is Literal and args and all(type(choice) in SCALARS for choice in args):
        kinds = list(dict.fromkeys(SCALARS[type(choice)] for choice in args))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if origin is None and (hint is Any or (isinstance(hint, Hashable) and hint in PLAIN)):
        return {} if hint is Any else {"type": PLAIN[hint]}
    if origin in (Union, types.UnionType):
        members = [_of_hint(member, what) for member in args if member is not type(None)]
        schema = members[0] if len(members) == 1 else {"anyOf": members}
        if all(member.keys() == {"type"} for member in members):
            names = sorted({member["type"] for member in members})
            schema = {"type": names[0] if len(names) == 1 else names}
        return schema | ({"nullable": True} if type(None) in args else {})
    if origin is list:
        return {"type": "array", "items": _of_hint(args[0], what)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_of_hint(member, what) for member in args]}
    if origin is dict:
        return {"type": "object"} | ({"additionalProperties": _of_hint(args[1], what)} if len(args) == 2 else {})
    raise ValueError(
        f"{what} has the type {str(hint).replace('typing.', '')}. Expected int, float, str, bool, an Enum or Literal "
        "of such values, or list, tuple, dict and Union of them."
    )
