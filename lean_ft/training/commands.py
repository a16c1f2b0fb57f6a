"""Commands that a run prints: to resume it, to try its model, and to repeat an evaluation that was interrupted."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lean_ft.settings import DataConfig, DistillConfig, ModelConfig, RecipeConfig, RowsConfig, SFTDataConfig
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


def command_that_tries(cfg: RecipeConfig, checkpoint: Path, tokenizer: Tokenizer, *, scores: bool) -> str:
    """The command that tries the trained model: chat or generate, or with `scores` score on the run's rows."""
    family = None if (model := cfg.group(ModelConfig)) is None else model.family
    if not scores:
        chats = tokenizer.chat_template is not None
        asked = ["chat", str(checkpoint)] if chats else ["generate", str(checkpoint), "prompt=Hello"]
        return shlex.join(["leanft", *asked, *([f"model.family={family}"] if family else [])])
    rows = cfg.needed(DataConfig).model_dump(
        mode="json", include=set(RowsConfig.model_fields) - {"validation_fraction"}, exclude_defaults=True
    )
    source, held_out = rows.pop("source"), rows.pop("validation_source", None)
    asked = ["score", str(checkpoint), _text(held_out or source), *(_words({"data": rows}) if rows else ())]
    return shlex.join(["leanft", *asked, *(["--family", family] if family else [])])


def commands_to_evaluate(cfg: RecipeConfig, checkpoint: Path, *, rows: bool, tasks: bool) -> Iterator[str]:
    """The commands that evaluate a checkpoint as the run would have: on its held-out `rows`, and with its `tasks`.

    No command evaluates the rows of an objective that is not next-token prediction.
    """
    own: dict[str, Any] = {"seed": cfg.seed} if cfg.seed else {}
    if (model := cfg.group(ModelConfig)) is not None:
        own["model"] = {"dtype": model.dtype} | ({"family": model.family} if model.family else {})
    data, evaluate = cfg.group(DataConfig), ["leanft", "evaluate", str(checkpoint)]
    if rows and isinstance(data, SFTDataConfig) and cfg.group(DistillConfig) is None:
        asked = {"data": data.model_dump(mode="json", exclude_defaults=True), "loss": True}
        pattern = {"pattern": cfg.eval_pattern} if cfg.eval_pattern else {}
        yield shlex.join([*evaluate, *_words(asked | pattern | own)])
    if tasks:
        limit = {"limit": cfg.eval_tasks_limit} if cfg.eval_tasks_limit else {}
        yield shlex.join([*evaluate, *_words({"tasks": cfg.eval_tasks} | limit | own)])


def _words(settings: dict[str, Any]) -> list[str]:
    """Settings as `key=value`."""
    return [f"{key}={_text(value)}" for key, value in dotted(settings)]


def _text(value: Any) -> str:
    return to_yaml(value, flow=True)
