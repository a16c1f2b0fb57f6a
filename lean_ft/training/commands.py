"""Commands that a run prints: to resume it, and to try its model."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from lean_ft.data.objective import objective_of
from lean_ft.settings import DataConfig, ModelConfig, RecipeConfig, RowsConfig
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.settings.text import dotted
from lean_ft.system.launch import COMMAND_VARIABLE
from lean_ft.tokenizers import Tokenizer


def command_to_continue(cfg: RecipeConfig) -> str:
    """The command that resumes this run: the command that started it, with resume=auto if it had another value, and the
    output_dir if it was chosen after others. In a notebook or at Python's prompt, a sentence instead."""
    if COMMAND_VARIABLE in os.environ:  # the command that started all processes of the run
        program, *arguments = shlex.split(os.environ[COMMAND_VARIABLE])
    else:
        program, *arguments = sys.argv
    more = {"resume": "auto"} if cfg.resume != "auto" else {}
    if re.fullmatch(rf"{re.escape(str(cfg.default_output_dir.absolute()))}_\d+", str(cfg.output_dir.absolute())):
        more["output_dir"] = str(cfg.output_dir)
    if Path(program).name in ("", "-", "-c", "ipykernel_launcher.py"):
        return "the same call again" + "".join(f", with {name}={value!r}" for name, value in more.items())
    arguments = [word for word in arguments if word.partition("=")[0] not in more]
    arguments += [f"{name}={value}" for name, value in more.items()]
    # `python -m lean_ft` counts; a user's script may be in a folder that is called lean_ft.
    is_leanft = Path(program).name == "leanft" or Path(program).parts[-2:] == ("lean_ft", "__main__.py")
    return shlex.join((["leanft"] if is_leanft else ["python", program]) + arguments)


def command_that_tries(cfg: RecipeConfig, checkpoint: Path, tokenizer: Tokenizer, *, scores: bool) -> str | None:
    """The command that tries the trained model: the objective's own; or chat or generate with the run, whose newest
    checkpoint they take; or with `scores` the one that scores the run's rows. None if there is none."""
    family = None if (model := cfg.group(ModelConfig)) is None else model.family
    of_rows = cfg.group(DataConfig)
    if of_rows is not None and (words := objective_of(of_rows).words_to_try(of_rows, cfg.output_dir)) is not None:
        return shlex.join(["leanft", *words])
    if not scores:
        chats = tokenizer.chat_template is not None
        words = ["chat", str(cfg.output_dir)] if chats else ["generate", str(cfg.output_dir), "prompt=Hello"]
        return shlex.join(["leanft", *words, *([f"model.family={family}"] if family else [])])
    data = cfg.needed(DataConfig)
    if (command := objective_of(data).scored_by) is None:
        return None
    rows = data.model_dump(
        mode="json", include=set(RowsConfig.model_fields) - {"validation_fraction"}, exclude_defaults=True
    )
    source, held_out = rows.pop("source"), rows.pop("validation_source", None)
    words = [command, str(checkpoint), _text(held_out or source), *(_words({"data": rows}) if rows else ())]
    return shlex.join(["leanft", *words, *(["--family", family] if family else [])])


def _words(settings: dict[str, Any]) -> list[str]:
    """Settings as `key=value`."""
    return [f"{key}={_text(value)}" for key, value in dotted(settings)]


def _text(value: object) -> str:
    return to_yaml(value, flow=True)
