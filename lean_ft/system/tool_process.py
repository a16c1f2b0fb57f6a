"""The process of one call of a tool: it reads the call from standard input, and writes the result to standard output.

It imports neither torch nor the rest of the library, so it starts in a fraction of a second.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from lean_ft.system.user_functions import load_function


def as_text(value: Any, most_characters: int) -> str:
    """Return a tool's result as text: JSON unless it is one already, and cut with a note."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return cut(value, most_characters)


def error_text(error: BaseException, most_characters: int) -> str:
    """Return the result of a call that raised an error."""
    return cut(f"error: {traceback.format_exception_only(error)[-1].strip()}", most_characters)


def cut(text: str, most_characters: int) -> str:
    if len(text) <= most_characters:
        return text
    return f"{text[:most_characters]}\n[cut after {most_characters:,} of {len(text):,} characters]"


def outcome_of(function: Callable[..., Any], arguments: dict[str, Any], most_characters: int) -> tuple[str, bool]:
    """Call a tool. Return its result as text, and whether it failed."""
    try:
        value = function(**arguments)
        return as_text(asyncio.run(awaited(value)) if inspect.isawaitable(value) else value, most_characters), False
    except BaseException as error:  # SystemExit too
        return error_text(error, most_characters), True


def answer_a_call() -> None:
    """Read {function, arguments, characters}, and write [text, failed], all as JSON."""
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the tool prints is no result
    try:
        outcome = outcome_of(load_function(asked["function"]), asked["arguments"], asked["characters"])
    except BaseException as error:  # of the file
        outcome = error_text(error, asked["characters"]), True
    json.dump(outcome, answers)
    answers.flush()
    os._exit(0)  # threads that the tool started do not delay the result


async def awaited(value: Any) -> Any:
    """The coroutine of any awaitable."""
    return await value
