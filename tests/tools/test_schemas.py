"""Schemas of functions, next to transformers' `get_json_schema`."""

from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lean_ft.tools.schemas import json_schema


class Color(Enum):
    RED = "red"
    TWO = 2


class Empty(Enum):
    pass


class Pair(Enum):
    ONE = (1, 2)


class Own:
    pass


# fmt: off
HINTS = [int, float, str, bool, list, tuple, dict, Any, None, Color, Literal["a", "b"], Literal[1, "a", None],
    list[int]]
HINTS += [list[list[str]], tuple[int, str], dict[str, int], dict, int | None, int | str | None]
HINTS += [Optional[str], Union[int, str]]  # noqa: UP007, UP045
HINTS += [list[int] | None, list[int] | str, list | tuple, dict[str, list[int]], Literal["a"] | None, Color | int,
    float | int]
REFUSED = [Own, Empty, Pair, tuple[int], tuple[int, ...], set, set[int], bytes, Callable, Literal[b"a"], list[Own],
    Own | None]
# fmt: on


def of_hint(hint: Any, default: bool) -> Callable[..., Any]:
    def tool(x, y=1):
        """Do it.

        Args:
            x: A value.
            y: Another.

        Returns:
            What came of it.
        """

    tool.__annotations__ = {"x": hint, "y": hint if default else int, "return": hint}
    return tool


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_every_type_hint_has_the_schema_of_transformers(hint: Any) -> None:
    for default in (False, True):
        function = of_hint(hint, default)
        assert json_schema(function) == get_json_schema(function)


@pytest.mark.parametrize("hint", REFUSED, ids=str)
def test_type_hints_that_transformers_refuses(hint: Any) -> None:
    with pytest.raises(TypeHintParsingException):
        get_json_schema(of_hint(hint, False))
    with pytest.raises(ValueError, match="tool: the parameter x has the type"):
        json_schema(of_hint(hint, False))


def of_docstring(text: str | None) -> Callable[..., Any]:
    def tool(query: str, most: int = 3) -> Own: ...

    tool.__doc__ = text
    return tool


DOCSTRINGS = [
    "Search.\n\n    Args:\n        query: Words.\n        most: Number.\n    ",
    "Search.\n    More of it.\n\n    And more.\n\n    Args:\n        query: Words\n            in two lines.\n\n        most: Number: 3.\n\n    Returns:\n        Text\n",  # noqa: E501
    "Args:\n    query: a\n    most: b",
    "\n    Search.\n\n    Args:\n        query: Words (choices: [\"a\", \" b \"])\n        most: Number (Choices: [1, 2])\n    Raises:\n        ValueError: never",  # noqa: E501
    "Search.\n\nArgs:\n    query: a\n      sub: not a parameter\n    most: b\n    third: unknown\n",
    "Search.\n    Args:\n    query: a\n    most: b\n    Returns:\n    c",
]  # fmt: skip
INCOMPLETE = ["Search.", "Search.\n\nArgs:\n    query: a", None, "  \n", "Search.\n\nArgs:\n    most: a\n"]


@pytest.mark.parametrize("text", DOCSTRINGS)
def test_every_docstring_has_the_schema_of_transformers(text: str) -> None:
    try:
        expected = get_json_schema(of_docstring(text))
    except DocstringParsingException:
        with pytest.raises(ValueError, match="does not describe"):
            json_schema(of_docstring(text))
    else:
        assert json_schema(of_docstring(text)) == expected


@pytest.mark.parametrize("text", INCOMPLETE)
def test_docstrings_that_transformers_refuses(text: str | None) -> None:
    with pytest.raises(DocstringParsingException):
        get_json_schema(of_docstring(text))
    with pytest.raises(ValueError, match="has no docstring|does not describe"):
        json_schema(of_docstring(text))


class Shelf:
    def bound(self, x: int) -> None:
        """A.

        Args:
            x: B.
        """

    async def waits(self, x: "int", *more: int, **named: str) -> None:
        """A.

        Args:
            x: B.
            more: C.
            named: D.
        """


def bare(x, y: int) -> None:
    """A.

    Args:
        x: B.
        y: C.
    """


def test_methods_and_missing_hints() -> None:
    for function in (Shelf().bound, Shelf().waits):
        assert json_schema(function) == get_json_schema(function)
    with pytest.raises(TypeHintParsingException):
        get_json_schema(bare)
    with pytest.raises(ValueError, match="bare: the parameter x has no type hint. Add one, as in `x: str`"):
        json_schema(bare)
