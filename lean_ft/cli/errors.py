"""What an error means to the person at the terminal: one message and an exit code.

The user's input is wrong (2) where lean_ft or the recipe itself raised a ValueError, since that is how both refuse
input, or where a file could not be opened. The same ValueError from inside torch means that the run failed (1), as
does everything else. Ctrl-C is neither.
"""

import traceback
from typing import Any

import typer

from lean_ft.spelling import did_you_mean

# click's UsageError, which some versions of typer import from click and others carry inside.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

INTERRUPTED = 130  # as shells count it: 128 + SIGINT
_OPENING_A_FILE = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def explain(error: BaseException) -> tuple[str, int]:
    """The message and the exit code for an error; a failed run's says how to see its traceback."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted.{notes}", INTERRUPTED
    if isinstance(error, _UsageError):
        return _usage(error), 2
    if isinstance(error, _OPENING_A_FILE):
        text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        return text + notes, 2
    if isinstance(error, ValueError) and _raised_by_us(error):
        return f"{error}{notes}", 2
    if isinstance(error, RuntimeError) and type(error).__module__.startswith("lean_ft."):  # made to be read
        return f"{error}{notes}", 1
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    message = ": ".join(filter(None, [type(error).__name__, first_line]))
    return f"{message}{notes}\nWith --debug you see where.", 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory, told without importing torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        # torch on a CPU, and cuBLAS where its workspace no longer fits
        or any(words in str(error) for words in ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"))
    )


def _raised_by_us(error: BaseException) -> bool:
    """Whether the frame that raised belongs to lean_ft or to a recipe."""
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return module.partition(".")[0] in ("lean_ft", "recipes")


def _usage(error: Any) -> str:
    """A mistyped verb, option or argument, in our words."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "leanft"
    if context is None or not hasattr(error, "possibilities") or not hasattr(error, "option_name"):
        message = error.format_message()
        return f"{message[:1].lower()}{message[1:]} See: {command} --help"
    parameters, option = context.command.params, error.option_name
    hint = did_you_mean(option, [name for parameter in parameters for name in parameter.opts])
    if not hint and any(parameter.name == "overrides" for parameter in parameters):
        hint = f" Settings take no dashes: {option.lstrip('-')}=VALUE"
    return f"{command} has no option {option}.{hint or f' See: {command} --help'}"
