"""The process of one call of a tool: it reads the call from standard input, and writes the result to standard output.

It imports neither torch nor the rest of the library, so it starts in a fraction of a second. It ends, with the
processes that
the tool started, when the run does: the run alone holds the other end of a pipe.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

from lean_ft.system.user_code import Caller, Failed, TookTooLong, as_text, cut, error_text
from lean_ft.system.user_functions import load_function


def outcome_of(
    caller: Caller, function: Callable[..., Any], arguments: dict[str, Any], most_characters: int
) -> tuple[str, bool]:
    """Call a tool. Return its result as text, and whether it failed. Raises TookTooLong."""
    try:
        return as_text(caller.call(function, **arguments), caller.what, most_characters), False
    except TookTooLong:
        raise
    except Failed as failed:
        return error_text(failed.error, most_characters), True
    except ValueError as error:
        return cut(f"error: {error}", most_characters), True


def answer_a_call() -> None:
    """Read {function, arguments, characters, pipe}, and write [text, failed], all as JSON."""
    request = json.load(sys.stdin)
    Thread(target=_end_with_the_run, args=(request["pipe"],), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.register_at_fork(after_in_child=lambda: os.close(answers.fileno()))  # or the run would wait for that process too
    os.dup2(2, 1)  # what the tool prints is no result
    try:
        function = load_function(request["function"])
        caller = Caller(f"the tool {getattr(function, '__name__', 'function')}")
        outcome = outcome_of(caller, function, request["arguments"], request["characters"])
    except BaseException as error:  # of the file
        outcome = error_text(error, request["characters"]), True
    json.dump(outcome, answers)
    answers.flush()
    os._exit(0)  # threads that the tool started do not delay the result


def _end_with_the_run(pipe: int) -> None:
    os.read(pipe, 1)  # returns at its end
    os.killpg(0, signal.SIGKILL)
