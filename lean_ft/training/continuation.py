"""Which checkpoint a run resumes from, and whether its settings allow it.

A resumed run must equal the run that never stopped. Changed settings that make it another run (model, data, batch, update
rule) are refused. How long a run lasts and how often it writes may change freely. Settings that change the results but not
the meaning of the state (learning rate, device, memory techniques) may change, with a log line.

A model of the Hugging Face hub is held to one commit: `org/name` becomes `org/name@commit` before a run begins. So
config.yaml records what was trained, and a resumed run takes the same commit although the main branch has moved.
"""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from lean_ft.hub import download as hub
from lean_ft.hub.paths import path_at_commit, repository_name
from lean_ft.settings import RecipeConfig, models_of
from lean_ft.system.catalog import without_alias
from lean_ft.system.launch import COMMAND_VARIABLE
from lean_ft.system.log import say
from lean_ft.system.redaction import redact_values
from lean_ft.training.checkpoint import (
    TRAINING_STATE_FILE,
    check_whole,
    checkpoint_step,
    from_checkpoint,
    list_checkpoints,
    newest_whole,
    read_training_state,
)
from lean_ft.training.run_directory import Settings, check_usable, holds_run, read_starts, recipe_name, settings_of

ConfigT = TypeVar("ConfigT", bound=BaseModel)

# Settings that a resumed run may change. First how long it lasts, where it runs and how often it writes:
FREE = {
    "max_steps",
    "epochs",
    "stop_after_evals",
    "save_every",
    "eval_every",
    "log_every",
    "output_dir",
    "resume",
    "plan",
}
FREE |= {"data.num_processes", "data.cache_dir", "data.cache_gib"}  # how data is prepared, not its content
FREE |= {"eval_answers", "eval_pattern", "save_async", "keep_last", "keep_every", "keep_best", "max_bad_steps"}
FREE |= {"profile", "profile_steps", "eval_tasks", "eval_tasks_every", "eval_tasks_limit"}
FREE_GROUPS = ("log.",)
# Allowed, with a log line:
LOGGED = {
    "compile",
    "device",
    "clip_grad_norm",
    "optimizer.lr",
    "lora.lr_ratio",
    "data.validation_source",
    "neftune_alpha",
}
LOGGED_GROUPS = ("memory.", "schedule.", "parallel.")
BATCH = ("batch_size", "gradient_accumulation_steps")  # may change together if a step has the same number of rows
# May differ when a complete run is started again, which only answers questions.
OF_COMPLETE = {"plan", "device", "output_dir", "resume", "eval_answers", "eval_pattern"}
OF_COMPLETE |= {"data.num_processes", "data.cache_dir", "data.cache_gib"}
CONTENT = {"data.source", "data.chat_template"}  # files may move: compare_data compares their content
IDENTITY = ("model.path", "data.source")  # a change makes another run, even before the first checkpoint
QUICK_BYTES = 2**20  # before a model is loaded, checksums of larger files are not verified
UNKNOWN = object()


def check_output_dir(cfg: RecipeConfig) -> None:
    """Raise ValueError if `output_dir` and `resume` cannot work together. Nothing is loaded or changed.

    Checksums of large files and the data are checked later, when the run resumes.
    """
    directory = cfg.output_dir
    check_usable(directory)
    if cfg.resume == "never" and holds_run(directory):
        raise ValueError(
            f"output_dir={directory} holds a run, and resume=never starts a new one. Set another output_dir, "
            f"delete {directory}, or set resume=auto to resume that run."
        )
    folder = find_checkpoint(cfg, quick=True)
    if folder is not None:
        state = read_training_state(folder)
        with from_checkpoint(folder):
            compare_settings(cfg, state, folder)
        if cfg.max_steps is not None and cfg.max_steps <= state["step"]:
            check_complete(cfg, state)
    elif starts := read_starts(directory):
        compare_identity(cfg, starts[-1])


def find_checkpoint(cfg: RecipeConfig, *, quick: bool = False) -> Path | None:
    """The verified checkpoint that `cfg.resume` asks for; None to begin at step 0.

    `auto` skips damaged checkpoints with a log line each, and raises ValueError if no other is left: a new run would replace
    them. `quick` logs nothing, and verifies small files and the sizes of large files.
    """
    checksum_up_to_bytes = QUICK_BYTES if quick else None
    if cfg.resume == "never":
        return None
    if cfg.resume != "auto":
        folder = _named_checkpoint(cfg)
        check_whole(folder, checksum_up_to_bytes)
        return folder
    remark = "" if quick else "Skipped; the run replaces it when it reaches that step again."
    try:
        return newest_whole(cfg.output_dir, remark, checksum_up_to_bytes)
    except ValueError as error:
        raise ValueError(f"{error} Set another output_dir to start a new run, or delete {cfg.output_dir}.") from None


def is_own(cfg: RecipeConfig, folder: Path) -> bool:
    """Whether a checkpoint belongs to the run in `output_dir`, rather than to a run that it branches from."""
    return folder.resolve().parent == cfg.output_dir.resolve()


def _named_checkpoint(cfg: RecipeConfig) -> Path:
    """The checkpoint folder of `resume=PATH`. Raises ValueError if resuming from it would overwrite later checkpoints."""
    folder = Path(cfg.resume).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"resume={cfg.resume}: no such folder. Expected auto, never, or a checkpoint (runs/a/step_00000100)."
        )
    if not (folder / TRAINING_STATE_FILE).is_file():
        inside = list_checkpoints(folder)
        hint = "To start from a model's weights, set model.path to its folder."
        if inside:
            hint = f"It is a run directory. Its newest checkpoint is {inside[-1]}."
        raise ValueError(f"resume={cfg.resume} is not a checkpoint: it has no {TRAINING_STATE_FILE}. {hint}")
    own = is_own(cfg, folder)
    later = [
        p.name for p in list_checkpoints(cfg.output_dir) if not own or checkpoint_step(p) > checkpoint_step(folder)
    ]
    if later:
        remedy = "delete them" if own else f"delete {cfg.output_dir}"
        raise ValueError(
            f"resume={cfg.resume} would overwrite {', '.join(later)} in output_dir={cfg.output_dir}. Set resume=auto to "
            f"resume from {later[-1]}, set another output_dir for the branch, or {remedy}."
        )
    return folder


def compare_settings(cfg: RecipeConfig, state: dict[str, Any], folder: Path) -> list[str]:
    """Compare `cfg` with the settings in a checkpoint's state, and return the allowed changes to log.

    The recipe is compared too, unless the run branches from another one. Raises ValueError with every setting whose change
    makes this another run, and both values.
    """
    before, now = dict(state["settings"]), settings_of(cfg)
    if is_own(cfg, folder):
        before["recipe"], now["recipe"] = without_alias(state["recipe"]), recipe_name(cfg)
    refused, logged, hint = [], [], ""
    rows_then, rows_now = (math.prod(settings.get(key, 1) for key in BATCH) for settings in (before, now))
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, UNKNOWN), now.get(key, UNKNOWN)
        if old == new or UNKNOWN in (old, new) or key in FREE | CONTENT or key.startswith(FREE_GROUPS):
            continue
        change = _change(key, old, new)
        is_allowed = key in LOGGED or key.startswith(LOGGED_GROUPS) or (key in BATCH and rows_then == rows_now)
        (logged if is_allowed else refused).append(change)
        if key in BATCH and rows_then != rows_now:
            hint = f"\nbatch_size and gradient_accumulation_steps may change if a step keeps its {rows_then} rows."
            size = now["batch_size"]
            if rows_then % size == 0:
                hint = f"\nWith batch_size={size}, set gradient_accumulation_steps={rows_then // size} to keep {rows_then} rows per step."
    if refused:
        raise ValueError(_refusal(f"{folder} was written with other settings", refused) + hint)
    return logged


def check_complete(cfg: RecipeConfig, state: dict[str, Any], limits: str = "max_steps") -> None:
    """Raise ValueError if a run that `limits` ended is started again with other settings, with each setting and both values."""
    before, now = state["settings"], settings_of(cfg)
    if changes := _changes(before, now, sorted(before.keys() - OF_COMPLETE - CONTENT)):
        raise ValueError(
            f"output_dir={cfg.output_dir} holds a complete run of {state['step']} steps with other settings:{_lines(changes)}\n"
            f"Set a new output_dir for a run with the new settings, or raise {limits} to extend that run."
        )


def compare_identity(cfg: RecipeConfig, start: dict[str, Any]) -> None:
    """Raise ValueError if a run without a checkpoint has another recipe, model or data."""
    before: Settings = {"recipe": without_alias(start.get("recipe", "")), **start["settings"]}
    now: Settings = {"recipe": recipe_name(cfg), **settings_of(cfg)}
    if changes := _changes(before, now, ("recipe", *IDENTITY)):
        raise ValueError(_refusal(f"output_dir={cfg.output_dir} holds another run", changes))


def compare_data(cfg: RecipeConfig, fingerprint: str, state: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if the content of the data differs from what the checkpoint was trained on."""
    if fingerprint == state["data_fingerprint"]:
        return
    changes = _changes(state["settings"], settings_of(cfg), sorted(CONTENT))
    changes.append(_change("data fingerprint", state["data_fingerprint"], fingerprint))
    raise ValueError(_refusal(f"{folder} was trained on other data", changes))


def compare_base(fingerprint: str | None, state: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if an adapter was trained with other base weights.

    Checkpoints of early versions and models with random weights have no fingerprint, and are not compared.
    """
    before = state.get("base_fingerprint")
    if before is not None and fingerprint is not None and before != fingerprint:
        change = _change("fingerprint of the weights of model.path", before, fingerprint)
        raise ValueError(_refusal(f"{folder} holds an adapter of another model", [change]))


def _changes(before: Settings, now: Settings, keys: Iterable[str]) -> list[str]:
    """The settings in both that differ. A setting that one side lacks belongs to another version or an edited recipe."""
    return [
        _change(key, before[key], now[key])
        for key in keys
        if key in before.keys() & now.keys() and redact_values(before[key]) != now[key]
    ]


def _change(key: str, old: Any, new: Any) -> str:
    return f"{key}: {json.dumps(old)} then, {json.dumps(new)} now"


def _lines(changes: list[str]) -> str:
    return "".join(f"\n  {change}" for change in changes)


def _refusal(what: str, changes: list[str]) -> str:
    return (
        f"{what}:{_lines(changes)}\n"
        f"Restore these settings to resume the run, or set a new output_dir to start another run."
    )


def command_to_continue(resume: str) -> str:
    """The command that resumes this run: the command that started it, with resume=auto if it had another value.
    In a notebook or at Python's prompt, a sentence instead."""
    if COMMAND_VARIABLE in os.environ:  # the command that started all processes of the run
        program, *arguments = shlex.split(os.environ[COMMAND_VARIABLE])
    else:
        program, *arguments = sys.argv
    if Path(program).name in ("", "-", "-c", "ipykernel_launcher.py"):
        return "the same call again" if resume == "auto" else "the same call again, with resume='auto'"
    if resume != "auto":
        arguments = [a for a in arguments if not a.startswith("resume=")] + ["resume=auto"]
    # `python -m lean_ft` counts; a user's script may be in a folder that is called lean_ft.
    is_leanft = Path(program).name == "leanft" or Path(program).parts[-2:] == ("lean_ft", "__main__.py")
    return shlex.join((["leanft"] if is_leanft else ["python", program]) + arguments)


def hold_models_to_commits(cfg: ConfigT) -> ConfigT:
    """Return the settings with every hub model at a commit, which a training run logs.

    `org/name` becomes the commit that the run in `output_dir` began with, else the newest commit of its main branch. A branch
    or tag in `org/name@revision` is looked up, so that resuming is refused if it has moved. Raises as `lean_ft.hub.download`.
    """
    recorded = _recorded_settings(cfg) if isinstance(cfg, RecipeConfig) else {}
    held: dict[str, BaseModel] = {}
    for (group, field), asked in models_of(cfg).items():
        name = repository_name(asked)
        if name is None or name.names_commit:
            continue
        begun = hub.parse_name(str(recorded.get(f"{group}.{field}")))
        resumes = (
            name.revision is None and begun is not None and begun._replace(revision=None) == name and begun.names_commit
        )
        path = str(begun) if resumes else str(path_at_commit(asked))
        held[group] = getattr(cfg, group).model_copy(update={field: path})
        if isinstance(cfg, RecipeConfig):
            key = group if field == "path" else field  # model, teacher
            say("hub", f"{key} {path}{', the commit that this run began with' if resumes else ''}")
    return cfg.model_copy(update=held)


def _recorded_settings(cfg: RecipeConfig) -> Settings:
    """The settings of the run that `cfg` resumes, or {}. Whether it can be resumed is checked later."""
    if cfg.resume == "never":
        return {}
    checkpoints = list_checkpoints(cfg.output_dir) if cfg.resume == "auto" else [Path(cfg.resume)]
    for folder in reversed(checkpoints):
        try:
            return read_training_state(folder)["settings"]
        except (OSError, ValueError, KeyError):
            continue  # damaged, or no checkpoint: find_checkpoint reports it
    starts = read_starts(cfg.output_dir) if cfg.resume == "auto" else []
    return starts[-1]["settings"] if starts else {}
