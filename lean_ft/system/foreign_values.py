"""The gate for values from outside: rows, tools, requests, observations, results of user code, variables of templates.

`plain` walks every container and string, names of objects included. What it returns is a copy made of dicts with text as
names, lists, texts, numbers, booleans and None: valid text without markers, within one budget for depth and size. Code
behind the gate may rely on that, and the budget is ours, because the interpreter's own limit of recursion depends on the
caller and is changed by libraries.

Valid text has no half surrogate pair, which no file and no tokenizer can encode. Markers are the noncharacters U+FDD0 to
U+FDEF, which Unicode reserves for a program's internal use; the renderer of chats uses them.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 100  # containers in containers; JSON schemas and calls in use have fewer than 20
MAX_VALUES = 1 << 23  # as many as a row of a JSON file may have
MAX_CHARACTERS = 1 << 29  # as a line of a file
MARKERS = re.compile("[\ufdd0-\ufdef]")
_HALVES = re.compile("[\ud800-\udfff]")
_SCALARS = frozenset((int, float, bool, type(None)))

Unpack = Callable[[Any], Any]
"""Returns the plain value of an object of another type. Raises TypeError if there is none."""


def plain(
    value: Any,
    what: str,
    unpack: Unpack | None = None,
    *,
    markers: bool = False,
    finite: bool = False,
    repair: bool = False,
) -> Any:
    """Return a copy of `value` as JSON types.

    markers: allow them, in values that no chat template gets; finite: refuse NaN and infinity, which are not JSON; repair:
    replace what is not valid text, as `valid_text` does, instead of refusing it. Raises ValueError that names the place inside
    `what`: a half surrogate pair, a marker, another type, a name that is no text, too deep, too large.
    """

    def text(given: str, path: tuple[Any, ...], prefix: str = "") -> str:
        if given.isascii():
            return given
        return valid_text(given) if repair else check_text(given, prefix + where(what, path), markers=markers)

    result: list[Any] = [None]
    work: list[tuple[Any, Any, Any, tuple[Any, ...]]] = [(value, result, 0, ())]  # value, where its copy goes, its path
    num_values = num_characters = 0
    while work:
        item, target, key, path = work.pop()
        item = _exact(item, unpack, what, path)
        target[key] = item
        if isinstance(item, str):
            num_characters += len(item)
            target[key] = text(item, path)
        elif isinstance(item, float):
            if finite and not math.isfinite(item):
                raise ValueError(f"{where(what, path)} is {item}, which is not JSON. Give a finite number or null.")
        elif isinstance(item, dict | list):
            if len(path) >= MAX_DEPTH:
                raise ValueError(f"{what} is nested more than {MAX_DEPTH} deep. Flatten it.")
            num_values += len(item)
            if isinstance(item, list):
                target[key] = copy = list(item)
                if not (_SCALARS.issuperset(map(type, item)) and not finite):
                    work += [(inner, copy, i, (*path, i)) for i, inner in enumerate(item)]
            else:
                target[key] = copy = {}
                for name, inner in item.items():
                    num_characters += len(name)
                    name = text(name, path, "a name in ")
                    copy[name] = inner  # keeps the order
                    work.append((inner, copy, name, (*path, name)))
        if num_values > MAX_VALUES or num_characters > MAX_CHARACTERS:
            raise ValueError(
                f"{what} has more than {MAX_VALUES:,} values or {MAX_CHARACTERS:,} characters. Shorten it."
            )
    return result[0]


def check_text(text: str, what: str, *, markers: bool = True) -> str:
    """Return `text`. Raises ValueError that names `what` for half a surrogate pair, and for a marker unless they are allowed."""
    if text.isascii():
        return text
    if half := _HALVES.search(text):
        raise ValueError(
            f"{what} has half a surrogate pair (\\u{ord(half[0]):04x}) at character {half.start()}, so it is not valid "
            "text. Repair it."
        )
    if not markers and MARKERS.search(text):
        raise ValueError(f"{what} contains one of the Unicode noncharacters U+FDD0 to U+FDEF. Remove it.")
    return text


def valid_text(text: str) -> str:
    """Return `text` with U+FFFD in place of half surrogate pairs and markers: for text that must not end a run."""
    return text if text.isascii() else MARKERS.sub("\ufffd", _HALVES.sub("\ufffd", text))


def where(what: str, path: tuple[Any, ...]) -> str:
    """Name a place in `what`: `the row: messages[0].content`."""
    if not path:
        return what
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    return f"{what}: `{steps[:200]}`"


def _exact(item: Any, unpack: Unpack | None, what: str, path: tuple[Any, ...]) -> Any:
    """Return a value of exactly one of the JSON types: a template may call methods of others. Containers are not copied."""
    if type(item) in _SCALARS or type(item) in (str, list):
        return item
    if isinstance(item, str):
        return str.__str__(item)
    if isinstance(item, bool | int | float):  # enums of numbers, NumPy's float64
        return int(item) if isinstance(item, int) else float(item)
    if isinstance(item, tuple):
        return list(item)
    if isinstance(item, Mapping):
        return {_name(name, what, path): inner for name, inner in item.items()}
    try:
        if unpack is None:
            raise TypeError
        return _exact(unpack(item), None, what, path)
    except TypeError:
        raise ValueError(
            f"{where(what, path)} is a {type(item).__name__}; expected text, a number, a boolean, null, a list or an object."
        ) from None


def _name(name: Any, what: str, path: tuple[Any, ...]) -> str:
    if type(name) is str:
        return name
    if isinstance(name, str):
        return str.__str__(name)
    if isinstance(name, int | float | None):
        return json.dumps(_exact(name, None, what, path))  # as JSON's encoder writes it
    raise ValueError(f"{where(what, path)} has a name that is a {type(name).__name__}; expected text.")
