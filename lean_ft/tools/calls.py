"""Tool calls in the text of an assistant's turn, in the form that each family of models writes."""

from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]
    error: str = ""  # of a malformed call: the model gets this text instead of a result


class Turn(NamedTuple):
    """What an assistant's turn says."""

    content: str  # without the calls
    calls: list[Call]
