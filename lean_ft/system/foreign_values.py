"""Check values from outside: rows, tools, requests, observations, results of user code, variables of templates.

`plain` walks every container and string, names of objects included. It returns a copy made of dicts with text as names,
lists,
texts, numbers, booleans and None: valid text, within one budget for depth and size, and without markers if a chat
template reads it. Later code relies on that. The limit of depth is our own, because the interpreter's limit of
recursion depends on the caller, and libraries raise it.

Valid text has no half surrogate pair, which no file and no tokenizer can encode. Markers are the noncharacters U+FDD0
to U+FDEF, which Unicode reserves for a program's internal use; the renderer of chats uses them.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

MAX_DEPTH = 100  # containers in containers; JSON schemas and calls in use have fewer than 20
MAX_VALUES = 1 << 25  # a line of a file may have a quarter of it, an array of rows one value in 8 bytes
MAX_CHARACTERS = 1 << 29  # as a line of a file
MARKERS = re.compile("[\ufdd0-\ufdef]")
_HALVES = re.compile("[\ud800-\udfff]")
_SCALARS = frozenset((int, float, bool, type(None)))

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"
"""A value as JSON has it, which is what `plain` makes of others."""
Unpack = Callable[[Any], Any]
"""Returns the value of an object of another type as JSON types. Raises TypeError if there is none."""


def plain(
    value: object,
    what: str,
    unpack: Unpack | None = None,
    *,
    markers: bool = False,
    finite: bool = False,
    repair: bool = False,
    leaves: tuple[type, ...] = (),
) -> Any:
    """Return a copy of `value` as JSON types.

    markers: allow them, in values that no chat template gets; finite: refuse NaN and infinity, which are not JSON;
    repair: replace invalid text, as `valid_text` does, instead of refusing it; leaves: other types that are kept, such
    as bytes.

    Raises ValueError that names the place in `what` for half a surrogate pair, a marker, another type, a name that is
    no text, and a value that is too deep or too large.
    """
    try:
        return _Walk(unpack, markers, finite, repair, leaves).copy(value, 0)
    except _Problem as problem:
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in reversed(problem.steps))
        steps = steps.lstrip(".")
        place = f"{what}: `{steps if len(steps) <= 80 else steps[:80] + ' ...'}`" if steps else what
        raise ValueError(f"{place} {problem}") from None


def check_text(text: str, what: str, *, markers: bool = True) -> str:
    """Return `text`. Raises ValueError that names `what` for half a surrogate pair, and for a marker unless they are
    allowed."""
    try:
        return _Walk(None, markers, False, False, ()).text(text)
    except _Problem as problem:
        raise ValueError(f"{what} {problem}") from None


def valid_text(text: str) -> str:
    """Return `text` with U+FFFD in place of half surrogate pairs and markers: for text that must not end a run."""
    return text if text.isascii() else MARKERS.sub("\ufffd", _HALVES.sub("\ufffd", text))


class _Problem(ValueError):
    """What is wrong with a value, and the steps to it, the innermost first."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.steps: list[str | int] = []


class _Walk:
    """One walk with its settings and what is left of its budget."""

    def __init__(
        self, unpack: Unpack | None, markers: bool, finite: bool, repair: bool, leaves: tuple[type, ...]
    ) -> None:
        self._unpack, self._markers, self._finite, self._leaves = unpack, markers, finite, leaves
        self._repair = repair
        self._values, self._characters = MAX_VALUES, MAX_CHARACTERS

    def copy(self, value: object, depth: int) -> Any:
        if type(value) is str:
            return self.text(value)
        if type(value) in _SCALARS and not (type(value) is float and self._finite):
            return value
        if type(value) is dict or type(value) is list:
            return self._container(value, depth)
        return self._other(value, depth)

    def text(self, text: str) -> str:
        self._characters -= len(text)
        if self._characters < 0:
            raise _Problem(f"has more than {MAX_CHARACTERS:,} characters. Shorten it.")
        if text.isascii():
            return text
        if self._repair:
            return valid_text(text)
        if half := _HALVES.search(text):
            raise _Problem(
                f"has half a surrogate pair (\\u{ord(half[0]):04x}) at character {half.start()}, so it is not valid "
                "text. Repair it."
            )
        if not self._markers and MARKERS.search(text):
            raise _Problem("contains one of the Unicode noncharacters U+FDD0 to U+FDEF. Remove it.")
        return text

    def _container(self, value: dict[Any, Any] | list[Any], depth: int) -> Any:
        self._values -= len(value)
        if depth >= MAX_DEPTH:
            raise _Problem(f"is nested too deeply: more than {MAX_DEPTH} containers. Shorten it.")
        if self._values < 0:
            raise _Problem(f"has more than {MAX_VALUES:,} values. Shorten it.")
        step: str | int | None = None
        try:
            if isinstance(value, dict):
                copies = {}
                for name, inner in value.items():
                    step = None
                    named = self.text(name) if type(name) is str else self._name(name)
                    if named in copies:
                        raise _Problem(f"is {named!r:.80} twice, as text and as a number. Remove one.")
                    step = named
                    copies[named] = self.copy(inner, depth + 1)
                return copies
            if _SCALARS.issuperset(map(type, value)) and not self._finite:  # such as ids
                return value.copy()
            items = []
            for step, inner in enumerate(value):  # noqa: B007 - the place of a problem
                items.append(self.copy(inner, depth + 1))
            return items
        except _Problem as problem:
            if step is not None:
                problem.steps.append(step)
            elif not problem.steps:
                problem.args = (f"has a name that {problem}",)
            raise

    def _other(self, value: object, depth: int) -> Any:
        """Copy a value whose type is not exactly one of JSON's, because a template could call its methods."""
        if isinstance(value, self._leaves):
            return value
        if isinstance(value, str):
            return self.text(str.__str__(value))
        if isinstance(value, float):
            if self._finite and not math.isfinite(value):
                raise _Problem(f"is {float(value)}, which is not JSON. Give a finite number or null.")
            return float(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, tuple | list):
            return self._container(list(value), depth)
        if isinstance(value, Mapping):
            return self._container(dict(value), depth)
        if self._unpack is not None and depth < MAX_DEPTH:
            try:
                unpacked = self._unpack(value)
            except TypeError:
                unpacked = value
            if unpacked is not value:
                return self.copy(unpacked, depth + 1)
        expected = "text, a number, a boolean, null, a list or an object"
        raise _Problem(f"is a {type(value).__name__}; expected {expected}.")

    def _name(self, name: object) -> str:
        if isinstance(name, str):
            return self.text(str.__str__(name))
        if name is None or isinstance(name, int | float):
            return json.dumps(name)  # as JSON's encoder writes it
        raise _Problem(f"is a {type(name).__name__}; expected text.")
