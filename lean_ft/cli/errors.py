"""Convert an error into a message and an exit code.

Exit code 2 means wrong input: lean_ft or the recipe raised ValueError, or a file could not be opened. Exit code 1 means
that the run failed: any other error, including a ValueError raised inside torch. Ctrl-C exits with 130.
"""

import contextlib
import errno
import itertools
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from lean_ft.settings.describing import describe
from lean_ft.settings.hints import hint_for_command, replacement
from lean_ft.settings.other_tools import VALUE, assigned
from lean_ft.system import catalog
from lean_ft.system.foreign_values import valid_text
from lean_ft.system.redaction import redact
from lean_ft.system.spelling import did_you_mean, nearest
from lean_ft.system.whole_files import open_in_place

# click's UsageError. Some versions of typer import it from click, others include a copy.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

TRACEBACK_FILE = "traceback.log"  # in the run directory
INTERRUPTED = 130  # the shells' convention: 128 + SIGINT
_OPENING_A_FILE = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_BAD_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.EROFS)
_OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


def explain(error: BaseException, arguments: Sequence[str] = ()) -> tuple[str, int]:
    """Return the message and the exit code for an error of the command line `arguments`. The message of a failed run
    names its traceback or the --debug option."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted.{notes}", INTERRUPTED
    if isinstance(error, _UsageError):
        return _usage(error, arguments), 2
    if isinstance(error, _OPENING_A_FILE) or getattr(error, "errno", None) in _BAD_PATHS:
        assert isinstance(error, OSError)
        text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        return text + notes, 2
    if isinstance(error, ValueError) and _raised_by_us(error):
        return f"{error}{notes}", 2
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return f"a path contains a zero byte. Remove it.{notes}", 2
    if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":
        return f"a path begins with ~NAME, and this machine has no user of that name. Write the whole path.{notes}", 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {error.filename or 'a file could not be written'}. Free some space.{notes}", 1
    if _is_made_to_be_read(error) or (isinstance(error, OSError) and error.errno is None and _raised_by_us(error)):
        return f"{error}{notes}", 1
    if type(error).__name__ == "PanicException":
        return f"a library failed ({error}). The tokenizer's files or the weights may be damaged.{notes}", 1
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    message = ": ".join(filter(None, [type(error).__name__, first_line]))
    where = "" if TRACEBACK_FILE in notes else "\nUse --debug to print the whole traceback."
    return f"{message}{notes}{where}", 1


def add_place(error: Exception, recipe: Path, is_shipped: bool, output_dir: Path | None) -> None:
    """Add notes on where a run failed: the line of the user's recipe or of a file beside it, and the path of the
    traceback in the run directory. Input errors of shipped recipes, and lean_ft's own RuntimeErrors, get no notes."""
    if _is_made_to_be_read(error) or (is_shipped and explain(error)[1] == 2):
        return
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == recipe.parent]
    if frames and not is_shipped:
        error.add_note(f"In {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}")
    if output_dir is not None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in output_dir.iterdir() if not path.name.startswith(".")}
            if not names <= {TRACEBACK_FILE} and "config.yaml" not in names:
                return  # not a run directory, which may be the cause of the error
            with open_in_place(output_dir / TRACEBACK_FILE, "a") as file:
                text = valid_text(redact("".join(traceback.format_exception(error))))
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n{text}\n")
        except (OSError, ValueError):
            return
        error.add_note(f"The whole traceback is in {output_dir / TRACEBACK_FILE}.")


def _is_made_to_be_read(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and type(error).__module__.startswith("lean_ft.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory. Does not import torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        # torch on a CPU, cuBLAS without room for its workspace, and CUDA (AcceleratorError, also for pinned memory)
        or any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def _raised_by_us(error: BaseException) -> bool:
    """Whether lean_ft or a recipe raised the error, and not a library."""
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return module.partition(".")[0] in ("lean_ft", "recipes")


_NO_DASHES = " Settings take no dashes:"


def _usage(error: Any, arguments: Sequence[str]) -> str:
    """Return the message for a mistyped verb, option or argument."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "leanft"
    if context is None or not hasattr(error, "possibilities") or not hasattr(error, "option_name"):
        message = error.format_message()
        if (unknown := re.match(r"No such command '([^']+)'", message)) and context is not None and not context.parent:
            return unknown_command(unknown[1], context.command.commands)
        return f"{message[:1].lower()}{message[1:]} See: {command} --help"
    parameters = context.command.params
    options = [name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)]
    takes_settings = any(parameter.name == "overrides" for parameter in parameters)
    known, unknown = {*options, *context.help_option_names}, {error.option_name: None}
    if takes_settings:  # name all options of a command of another tool
        words = [word.partition("=")[0] for word in arguments if word[:2] == "--" and len(word) > 2]
        unknown |= dict.fromkeys(word for word in words if word not in known)
    hints = {option: _of_option(option, options, arguments, takes_settings) for option in unknown}
    if len(hints) == 1:
        return f"{command} has no option {error.option_name}.{hints[error.option_name] or f' See: {command} --help'}"
    lines = "".join(f"\n  {option}:{hint.replace(_NO_DASHES, '') or ' unknown'}" for option, hint in hints.items())
    return f"{command} has no options {', '.join(hints)}.{_NO_DASHES}{lines}"


def _of_option(option: str, options: Sequence[str], arguments: Sequence[str], takes_settings: bool) -> str:
    """Return a hint for a mistyped option: the nearest option, or the setting that replaces it."""
    hint = did_you_mean(option, [name for name in options if name.startswith(option)])
    hint = hint or (_as_setting(option, arguments) if takes_settings else "") or did_you_mean(option, options)
    return hint or (_as_setting(option, arguments, or_nearest=True) if takes_settings else "")


def unknown_command(name: str, verbs: Iterable[str]) -> str:
    """Return the message for a word that is neither a verb nor a recipe."""
    hint = hint_for_command(name) or did_you_mean(name, [*verbs, *catalog.recipes()])
    return f"no such command '{name}'.{hint} See: leanft --help"


def _as_setting(option: str, arguments: Sequence[str], or_nearest: bool = False) -> str:
    """Return a hint that names the setting for an option: `optimizer.lr=1e-4` for `--lr 1e-4`. With `or_nearest`,
    suggest the nearest name if no setting has this one."""
    name, recipes = option.lstrip("-").replace("-", "_"), {**catalog.recipes(), **catalog.aliases()}
    recipe = next((word for word in arguments if word in recipes or word.endswith(".py")), "finetune")
    keys = list[str]()
    with contextlib.suppress(ValueError, OSError):
        keys = [setting.key for setting in describe(catalog.load_recipe(catalog.find_recipe(recipe)).Config)]
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    value = next((after for word, after in itertools.pairwise(words) if word == option), "--")
    value = VALUE if value.startswith("--") else value
    if name in keys or or_nearest:
        settings, sentence = {name if name in keys else nearest(name, keys) or name: VALUE}, ""
    else:
        settings, sentence = replacement(name, value, {*keys, *(key.partition(".")[0] for key in keys)})
    meant = assigned(settings, value, is_whole=True)
    if not meant:
        return f" {sentence}" if sentence else ""
    return f"{_NO_DASHES} {meant}" + (f". {sentence}" if sentence else "")
