"""What an error means to the person at the terminal: one message and an exit code.

The user's input is wrong (2) where lean_ft or the recipe itself raised a ValueError, since that is how both refuse
input, or where a file could not be opened. The same ValueError from inside torch means that the run failed (1), as
does everything else. Ctrl-C is neither.
"""

import time
import traceback
from pathlib import Path
from typing import Any

import typer

from lean_ft.redaction import redact
from lean_ft.spelling import did_you_mean

# click's UsageError, which some versions of typer import from click and others carry inside.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

TRACEBACK_FILE = "traceback.log"  # in a run directory, which takes logs
INTERRUPTED = 130  # as shells count it: 128 + SIGINT
_OPENING_A_FILE = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


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
    if _is_made_to_be_read(error):
        return f"{error}{notes}", 1
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    message = ": ".join(filter(None, [type(error).__name__, first_line]))
    where = "" if TRACEBACK_FILE in notes else "\nWith --debug you see the whole traceback."
    return f"{message}{notes}{where}", 1


def add_place(error: Exception, recipe: Path, is_shipped: bool, output_dir: Path | None) -> None:
    """Note where a run failed: the line of the user's own recipe, or of what lies beside it, and the file in the run
    directory that has the whole traceback. What a shipped recipe refuses, or tells in full, needs neither."""
    if _is_made_to_be_read(error) or (is_shipped and explain(error)[1] == 2):
        return
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == recipe.parent]
    if frames and not is_shipped:
        error.add_note(f"In {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}")
    if output_dir is not None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in output_dir.iterdir()}
            if not names <= {TRACEBACK_FILE} and "config.yaml" not in names:
                return  # no run's folder, which is what the error may be about
            with (output_dir / TRACEBACK_FILE).open("a", encoding="utf-8") as file:
                text = redact("".join(traceback.format_exception(error)))
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n{text}\n")
        except OSError:
            return
        error.add_note(f"The whole traceback is in {output_dir / TRACEBACK_FILE}.")


def _is_made_to_be_read(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and type(error).__module__.startswith("lean_ft.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory, told without importing torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        # torch on a CPU, cuBLAS where its workspace no longer fits, and CUDA itself (AcceleratorError, of pinned memory too)
        or any(words in str(error) for words in _OUT_OF_MEMORY)
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
