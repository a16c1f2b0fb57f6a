"""How a run starts: in which directory, from which checkpoint and with which models, and whether its settings allow it.

A resumed run must equal the run that never stopped. Changed settings that make it another run (model, data, batch, update
rule) are refused. How long a run lasts and how often it writes may change freely. Settings that change the results but not
the meaning of the state (learning rate, device, memory techniques) may change, with a log line.

A run that sets no directory gets `runs/<model>_<recipe>`, or the same name with _2, _3 and so on: the first directory with an
unfinished run of the same settings, and otherwise the first free one. There, a change of what the run learns (learning rate,
schedule) makes another run, because people try one value after another. To resume a run with another value, set output_dir.

A model of the Hugging Face hub is held to one commit: `org/name` becomes `org/name@commit` before a run begins. So
config.yaml records what was trained, and a resumed run takes the same commit although the main branch has moved. In the same
way, a run directory as a model is held to its newest checkpoint.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from lean_ft.hub.paths import path_at_commit, repository_name
from lean_ft.settings import RecipeConfig, models_of, recipe_name
from lean_ft.system.catalog import without_alias
from lean_ft.system.checkpoint_folder import (
    TRAINING_STATE_FILE,
    State,
    check_whole,
    checkpoint_step,
    from_checkpoint,
    list_checkpoints,
    newest_whole,
    read_training_state,
)
from lean_ft.system.launch import decided_by_rank_zero
from lean_ft.system.log import say
from lean_ft.system.redaction import redact_values
from lean_ft.system.units import counted
from lean_ft.training.length import Length
from lean_ft.training.metrics import Row, is_number, lines_until
from lean_ft.training.run_directory import (
    METRICS_FILE,
    DirectoryLock,
    Settings,
    check_usable,
    foreign_files,
    holds_run,
    locks,
    read_starts,
    settings_of,
)

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
    "optimizer.lr_ratios",
    "lora.lr_ratio",
    "data.validation_source",
    "neftune_alpha",
}
LOGGED_GROUPS = ("memory.", "schedule.", "parallel.")
BATCH = ("batch_size", "gradient_accumulation_steps")  # may change together if a step has the same number of rows
HOW_IT_COMPUTES = ("compile", "device", "memory.", "parallel.", *BATCH)  # no other run in a directory that was not set
# May differ when a complete run is started again, which only answers questions.
OF_COMPLETE = {"plan", "device", "output_dir", "resume", "eval_answers", "eval_pattern"}
OF_COMPLETE |= {"data.num_processes", "data.cache_dir", "data.cache_gib"}
CONTENT = {"data.source", "data.chat_template"}  # files may move: the data's fingerprint compares their content
IDENTITY = ("model.path", "data.source")  # a change makes another run, even before the first checkpoint
UNKNOWN = object()


@dataclass(frozen=True)
class Start:
    """How a run starts: at step 0, from a checkpoint, or with all of its steps done."""

    folder: Path | None = None
    """The checkpoint; None at step 0."""
    state: State = field(default_factory=dict)
    """The checkpoint's training state."""
    is_own: bool = False
    """Whether the checkpoint belongs to the run in `output_dir`, rather than to a run that it branches from."""
    is_complete: bool = False
    rows: list[Row] = field(default_factory=list)
    """The run's own lines of metrics.jsonl, up to the checkpoint."""
    changes: list[str] = field(default_factory=list)
    """The settings that changed since the checkpoint, of those that may change with a log line."""

    @property
    def step(self) -> int:
        return self.state.get("step", 0)

    @property
    def eval_losses(self) -> dict[int, float | None]:
        """The held-out losses in `rows` by step."""
        losses = {row["step"]: row["eval_loss"] for row in self.rows if "eval_loss" in row}
        return {step: loss for step, loss in losses.items() if loss is None or is_number(loss)}


def decide_start(
    cfg: RecipeConfig, length: Length | None = None, data_fingerprint: str = "", base_fingerprint: str | None = None
) -> Start:
    """Decide how a run with these settings starts. Nothing is loaded or changed.

    Without `length`, before model and data are loaded, checksums of large files and the content of the data are not compared,
    and nothing is logged. `base_fingerprint`: of the frozen weights below an adapter. Damaged checkpoints are skipped. Raises
    ValueError, with the settings that differ and both values, if `output_dir` and `resume` cannot hold this run.
    """
    check_usable(cfg.output_dir)
    if cfg.resume == "never" and holds_run(cfg.output_dir):
        raise ValueError(
            f"output_dir={cfg.output_dir} holds a run, and resume=never starts a new one. Set another output_dir, "
            f"delete {cfg.output_dir}, or set resume=auto to resume that run."
        )
    folder, before = _recorded(cfg, quick=length is None)
    if folder is None:
        if before:
            _compare_identity(cfg, before)
        return Start()
    is_own = folder.resolve().parent == cfg.output_dir.resolve()
    with from_checkpoint(folder):
        start = Start(folder, before, is_own, changes=_compare_settings(cfg, before, folder, is_own))
    if length is None:
        is_complete, limits = cfg.max_steps is not None and cfg.max_steps <= start.step, "max_steps"
    else:
        _compare_data(cfg, data_fingerprint, before, folder)
        _compare_base(base_fingerprint, before, folder)
        rows = lines_until(cfg.output_dir / METRICS_FILE, start.step)[0] if is_own else []
        start = replace(start, rows=rows)
        length = replace(length, eval_losses=start.eval_losses)
        is_complete, limits = length.is_over(start.step), length.limits
    if is_complete:
        _check_complete(cfg, before, limits)
    return replace(start, is_complete=is_complete)


def _recorded(cfg: RecipeConfig, *, quick: bool) -> tuple[Path | None, State]:
    """The verified checkpoint that `cfg.resume` asks for and its training state, or None and the record of the last start.

    `auto` skips damaged checkpoints with a log line each, and raises ValueError if no other is left: a new run would replace
    them. `quick` logs nothing, and verifies small files and the sizes of large files.
    """
    if cfg.resume == "never":
        return None, {}
    if cfg.resume != "auto":
        folder = _named_checkpoint(cfg)
        check_whole(folder, quick=quick)
        return folder, read_training_state(folder)
    remark = "" if quick else "Skipped; the run replaces it when it reaches that step again."
    try:
        folder = newest_whole(cfg.output_dir, remark, quick=quick)
    except ValueError as error:
        raise ValueError(f"{error} Set another output_dir to start a new run, or delete {cfg.output_dir}.") from None
    if folder is not None:
        return folder, read_training_state(folder)
    starts = read_starts(cfg.output_dir)
    return None, starts[-1] if starts else {}


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
    is_own = folder.resolve().parent == cfg.output_dir.resolve()
    later = [
        p.name for p in list_checkpoints(cfg.output_dir) if not is_own or checkpoint_step(p) > checkpoint_step(folder)
    ]
    if later:
        remedy = "delete them" if is_own else f"delete {cfg.output_dir}"
        raise ValueError(
            f"resume={cfg.resume} would overwrite {', '.join(later)} in output_dir={cfg.output_dir}. Set resume=auto to "
            f"resume from {later[-1]}, set another output_dir for the branch, or {remedy}."
        )
    return folder


# Before anything is loaded ----------------------------------------------------------------------------------------


@contextmanager
def settled(cfg: ConfigT) -> Iterator[ConfigT]:
    """Context manager with the settings as the run uses them: the directory chosen, and models held at a commit or checkpoint.

    A chosen directory is logged, and locked before anything is loaded, so that two starts at once take two directories.
    Raises ValueError as `decide_start` and `hold_models`.
    """
    if not isinstance(cfg, RecipeConfig):
        yield hold_models(cfg)
        return
    is_launched, size = "TORCHELASTIC_RUN_ID" in os.environ, os.environ.get("WORLD_SIZE", "1")
    asked, directory = cfg, cfg.output_dir

    def choose() -> str:
        directory, reason = choose_output_dir(asked, lock=True)
        say("output_dir", f"{directory}: {reason}")
        return str(directory)

    # Processes that nobody launched together cannot agree on a choice. They take the default name.
    if "output_dir" not in cfg.model_fields_set and (is_launched or size == "1"):
        directory = Path(decided_by_rank_zero("output_dir", choose) if is_launched else choose())
    try:
        cfg = hold_models(cfg.model_copy(update={"output_dir": directory}))
        decide_start(cfg)
        yield cfg
    finally:
        if directory in locks:  # the run did not begin
            locks.pop(directory).release()
            if [path.name for path in directory.iterdir()] == [".lock"]:
                (directory / ".lock").unlink()
                directory.rmdir()


def choose_output_dir(cfg: RecipeConfig, *, lock: bool = False) -> tuple[Path, str]:
    """Return the directory for a run that sets none, and the reason. `lock`: lock it for this process's run.

    Raises ValueError if the directory cannot be written.
    """
    first, skipped = cfg.default_output_dir, ""
    for number in count(1):
        directory = first if number == 1 else first.with_name(f"{first.name}_{number}")
        obstacle = _obstacle(cfg.model_copy(update={"output_dir": directory}))
        if obstacle is None:
            check_usable(directory)
            reason = f"{'resumes its unfinished run' if holds_run(directory) else 'a new run'}{skipped}"
            try:
                locks.update({directory: DirectoryLock(directory)} if lock else {})
                return directory, reason
            except ValueError:
                obstacle = "is in use by another process"
        skipped = f"; {directory} {obstacle}"
    raise AssertionError


def _obstacle(cfg: RecipeConfig) -> str | None:
    """Why a run with these settings does not take `output_dir`; None if the directory is free, or holds an unfinished run
    with the same settings."""
    directory = cfg.output_dir
    if not holds_run(directory):
        return "holds other files" if foreign_files(directory) or directory.is_file() else None
    if cfg.resume != "auto":
        return f"holds a run, and resume={cfg.resume} starts a new one"
    try:
        if (starts := read_starts(directory)) and "ended" in starts[-1]:
            return "holds a finished run"
        before = _recorded(cfg, quick=True)[1]
    except ValueError:
        before = {}
    if not before:
        return "holds a run with damaged files"
    cfg = hold_models(cfg, log=False)
    refused, logged = _differences(cfg, before, own=True)
    changes = [*_changed(before["settings"], settings_of(cfg), sorted(CONTENT)), *refused.values()]
    changes += [change for name, change in logged.items() if not name.startswith(HOW_IT_COMPUTES)]
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"holds a run with other settings ({changes[0]}{more})" if changes else None


def hold_models(cfg: ConfigT, *, log: bool = True) -> ConfigT:
    """Return the settings with each hub model at a commit and each run directory at a checkpoint, which a training run logs.

    They become the commit or checkpoint that the run in `output_dir` began with, else the newest. A branch or tag in
    `org/name@revision` is looked up, so that resuming is refused if it has moved. Raises as `lean_ft.hub.download`, and
    ValueError if a run directory has no whole checkpoint.
    """
    is_training = isinstance(cfg, RecipeConfig)
    recorded = _recorded(cfg, quick=True)[1].get("settings", {}) if is_training else {}
    held: dict[str, BaseModel] = {}
    for (group, name), asked in models_of(cfg).items():
        begun = recorded.get(f"{group}.{name}")
        if repository_name(asked) is not None:
            label, kind, path = "hub", "commit", path_at_commit(asked, begun)
        # Recipes that do not train read run directories themselves, with their adapters.
        elif is_training and list_checkpoints(folder := Path(asked).expanduser()):
            resumes = begun is not None and Path(begun).parent == folder
            label, kind = "run", "checkpoint"
            path = begun if resumes else newest_whole(folder, "An earlier checkpoint is used.")
        else:
            continue
        held[group] = (held.get(group) or getattr(cfg, group)).model_copy(update={name: str(path)})
        if log and is_training and str(path) != asked:
            key = group if name == "path" else name  # model, teacher
            say(label, f"{key} {path}{f', the {kind} that this run began with' if path == begun else ''}")
    return cfg.model_copy(update=held)


# Comparing settings -----------------------------------------------------------------------------------------------


def _compare_settings(cfg: RecipeConfig, state: State, folder: Path, is_own: bool) -> list[str]:
    """Compare `cfg` with the settings in a checkpoint's state, and return the allowed changes to log.

    The recipe is compared too, unless the run branches from another one.
    """
    refused, logged = _differences(cfg, state, own=is_own)
    hint, rows, size = "", _rows_per_step(state["settings"]), cfg.batch_size
    if refused.keys() & set(BATCH):
        hint = f"\nbatch_size and gradient_accumulation_steps may change if a step keeps its {rows} rows."
        if rows % size == 0:
            hint = f"\nWith batch_size={size}, set gradient_accumulation_steps={rows // size} to keep {rows} rows per step."
    if refused:
        raise ValueError(_refusal(f"{folder} was written with other settings", list(refused.values())) + hint)
    return list(logged.values())


def _differences(cfg: RecipeConfig, state: State, *, own: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The settings that differ from those in a checkpoint's or start's `state`, by name, with both values: first those that
    make another run, then those that a resumed run may change. Data is not compared. `own`: compare the recipe too."""
    before, now = dict(state["settings"]), settings_of(cfg)
    if own:
        before["recipe"], now["recipe"] = without_alias(state["recipe"]), recipe_name(cfg)
    keeps_rows = _rows_per_step(before) == _rows_per_step(now)
    refused, logged = dict[str, str](), dict[str, str]()
    for key in sorted(before.keys() | now.keys()):
        old, new = (settings.get(key, _of_group(settings, key)) for settings in (before, now))
        if old == new or UNKNOWN in (old, new) or key in FREE | CONTENT or key.startswith(FREE_GROUPS):
            continue
        is_allowed = key in LOGGED or key.startswith(LOGGED_GROUPS) or (key in BATCH and keeps_rows)
        (logged if is_allowed else refused)[key] = _change(key, old, new)
    return refused, logged


def _of_group(settings: Settings, key: str) -> Any:
    """`on` for a group of settings that is null elsewhere, such as lora; UNKNOWN for a setting that is missing."""
    return "on" if any(name.startswith(f"{key}.") for name in settings) else UNKNOWN


def _rows_per_step(settings: Settings) -> int:
    return math.prod(settings.get(key, 1) for key in BATCH)


def _check_complete(cfg: RecipeConfig, state: State, limits: str) -> None:
    """Compare a complete run, which `limits` ended, with the settings that start it again."""
    before, now = state["settings"], settings_of(cfg)
    if changes := _changed(before, now, sorted(before.keys() - OF_COMPLETE - CONTENT)):
        raise ValueError(
            f"output_dir={cfg.output_dir} holds a complete run of {counted(state['step'], 'steps')} with other settings:{_lines(changes)}\n"
            f"Set a new output_dir for a run with the new settings, or raise {limits} to extend that run."
        )


def _compare_identity(cfg: RecipeConfig, start: State) -> None:
    """Compare the recipe, model and data of a run without a checkpoint."""
    before: Settings = {"recipe": without_alias(start.get("recipe", "")), **start["settings"]}
    now: Settings = {"recipe": recipe_name(cfg), **settings_of(cfg)}
    if changes := _changed(before, now, ("recipe", *IDENTITY)):
        raise ValueError(_refusal(f"output_dir={cfg.output_dir} holds another run", changes))


def _compare_data(cfg: RecipeConfig, fingerprint: str, state: State, folder: Path) -> None:
    """Compare the content of the data with what the checkpoint was trained on."""
    if fingerprint == state["data_fingerprint"]:
        return
    changes = _changed(state["settings"], settings_of(cfg), sorted(CONTENT))
    changes.append(_change("data fingerprint", state["data_fingerprint"], fingerprint))
    raise ValueError(_refusal(f"{folder} was trained on other data", changes))


def _compare_base(fingerprint: str | None, state: State, folder: Path) -> None:
    """Compare the base weights that an adapter was trained with. Checkpoints of early versions and models with random weights
    have no fingerprint, and are not compared."""
    before = state.get("base_fingerprint")
    if before is not None and fingerprint is not None and before != fingerprint:
        change = _change("fingerprint of the weights of model.path", before, fingerprint)
        raise ValueError(_refusal(f"{folder} holds an adapter of another model", [change]))


def _changed(before: Settings, now: Settings, keys: Iterable[str]) -> list[str]:
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
