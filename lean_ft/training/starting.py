"""How a run starts: in which directory, from which checkpoint and with which models, and whether its settings allow it.

A resumed run must equal the run that never stopped. Changed settings that make it another run (model, data, batch,
update rule) are refused. How long a run lasts and how often it writes may change freely. Settings that change the
results but not the meaning of the state (learning rate, device, memory techniques) may change, with a log line.

A run that sets no directory gets `runs/<model>_<recipe>`, or the same name with _2, _3 and so on: the first directory
with an unfinished run of the same settings, and otherwise the first free one. There, a change of what the run learns
(learning rate, schedule) makes another run, because people try one value after another. To resume a run with another
value, set output_dir.

A model of the Hugging Face hub is held to one commit: `org/name` becomes `org/name@commit` before a run begins. So
config.yaml records what was trained, and a resumed run takes the same commit although the main branch has moved. In the
same way, a run directory as a model is held to its newest checkpoint.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from pydantic import BaseModel
from torch import nn

from lean_ft.data.batches import Batches
from lean_ft.hub.paths import path_at_commit
from lean_ft.models.own_families import check_own_families
from lean_ft.optim import scheduled
from lean_ft.settings import ModelConfig, OptimizerConfig, RecipeConfig, ScheduleConfig, models_of, recipe_name
from lean_ft.system.catalog import without_alias
from lean_ft.system.contents import Contents, differences
from lean_ft.system.foreign_values import JSON
from lean_ft.system.launch import decided_by_rank_zero
from lean_ft.system.log import say
from lean_ft.system.redaction import shown_as_given
from lean_ft.system.run_directory import (
    RecordedRun,
    State,
    check_usable,
    foreign_files,
    holds_run,
    list_checkpoints,
    newest_whole,
    read_named,
    read_run,
)
from lean_ft.system.units import counted
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.by_source import watched_metric
from lean_ft.training.length import Length
from lean_ft.training.metrics import Row, is_number
from lean_ft.training.records import DirectoryLock, Settings, locks, record_leaving, settings_of
from lean_ft.training.regularization import check_applied

ConfigT = TypeVar("ConfigT", bound=BaseModel)
RecipeT = TypeVar("RecipeT", bound=RecipeConfig)

# Settings that a resumed run may change: how long it lasts, where it runs, how often it writes, how data is prepared.
FREE = {"max_steps", "epochs", "stop_after_evals", "watched_source", "output_dir", "resume", "plan"}
FREE |= {"save_every", "save_async", "keep_last", "keep_every", "keep_best", "log_every", "max_bad_steps"}
FREE |= {"eval_every", "eval_answers", "eval_pattern", "eval_tasks", "eval_tasks_every", "eval_tasks_limit"}
FREE |= {"profile", "profile_steps", "data.num_processes", "data.cache_dir", "data.cache_gib"}
FREE_GROUPS = ("log.",)
# Allowed, with a log line:
LOGGED = {"compile", "device", "clip_grad_norm", "optimizer.lr", "optimizer.lr_ratios", "lora.lr_ratio"}
LOGGED |= {"data.validation_source", "neftune_alpha", "model.family"}  # the file of the row may move
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
    watched: str = "eval_loss"
    """The metric that decides for `stop_after_evals` and `keep_best`."""

    @property
    def step(self) -> int:
        return self.state.get("step", 0)

    @property
    def eval_losses(self) -> dict[int, float | None]:
        """The watched held-out losses in `rows` by step."""
        losses = {row["step"]: row[self.watched] for row in self.rows if self.watched in row}
        return {step: loss for step, loss in losses.items() if loss is None or is_number(loss)}


def decide_start(
    cfg: RecipeConfig,
    length: Length | None = None,
    data: Batches | None = None,
    base_fingerprint: str | None = None,
    earlier: RecordedRun | None = None,
) -> Start:
    """Decide how a run with these settings starts. Nothing is loaded or changed.

    Without `length` and `data`, before model and data are loaded, checksums of large files and the content of the data
    are not compared, and nothing is logged. `base_fingerprint`: of the frozen weights below an adapter. `earlier`: the
    run that is resumed, if it was read before. Raises ValueError, with the settings that differ and
    both values, if `output_dir` and `resume` cannot hold this run.
    """
    earlier = earlier or read_earlier(cfg, quick=length is None)
    folder = earlier.checkpoint
    is_own = folder is None or folder.resolve().parent == cfg.output_dir.resolve()
    before, now = _recorded_settings(earlier.state, is_own), _settings(cfg, is_own)
    if folder is None:
        if changes := _changes(before, now, ("recipe", *IDENTITY)):
            raise ValueError(_refusal(f"output_dir={cfg.output_dir} holds another run", changes))
        return Start()
    refused, logged = _differences(before, now)
    if refused:
        hint = _hint(cfg, before, refused)
        raise ValueError(_refusal(f"{folder} was written with other settings", [*refused.values()]) + hint)
    start = Start(
        folder,
        earlier.state,
        is_own,
        rows=earlier.rows,
        changes=[*logged.values()],
        watched=watched_metric(cfg),
    )
    is_complete, limits = cfg.max_steps is not None and cfg.max_steps <= start.step, "max_steps"
    if length is not None and data is not None:
        _compare_content(start, now, data, base_fingerprint)
        length = replace(length, eval_losses=start.eval_losses)
        is_complete, limits = length.is_over(start.step), length.limits
    if is_complete and (changes := _changes(before, now, sorted(before.keys() - OF_COMPLETE - CONTENT))):
        raise ValueError(
            f"output_dir={cfg.output_dir} holds a complete run of {counted(start.step, 'steps')} with other "
            f"settings:{_lines(changes)}\nSet a new output_dir for a run with the new settings, or raise {limits} to "
            "extend that run."
        )
    return replace(start, is_complete=is_complete)


def read_earlier(cfg: RecipeConfig, *, quick: bool) -> RecordedRun:
    """The run that `cfg.resume` asks for, with a verified checkpoint, or an empty record. Raises ValueError if it
    cannot go on in `output_dir`.

    `auto` skips damaged checkpoints with a log line each, and raises ValueError if no other is left: a new run would
    replace them. `quick` logs nothing, and verifies small files and the sizes of large files.
    """
    check_usable(cfg.output_dir)
    if cfg.resume == "never":
        if holds_run(cfg.output_dir):
            raise ValueError(
                f"output_dir={cfg.output_dir} holds a run, and resume=never starts a new one. Set another output_dir, "
                f"delete {cfg.output_dir}, or set resume=auto to resume that run."
            )
        return RecordedRun()
    if cfg.resume != "auto":
        return read_named(cfg.resume, cfg.output_dir, quick=quick)
    remark = "" if quick else "Skipped; the run replaces it when it reaches that step again."
    return read_run(cfg.output_dir, remark, quick=quick)


def check_recipe(cfg: RecipeConfig, model: nn.Module, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the recipe ignores a setting about its model or tokenizer."""
    check_applied(model, cfg)
    settings = cfg.group(ModelConfig)
    if settings is not None and settings.family is not None:
        check_own_families(settings.family)
    if settings is not None and any(tokenizer.token_id(token) is None for token in settings.new_tokens):
        raise ValueError(
            "the tokenizer lacks model.new_tokens. In the recipe, load it by load_tokenizer(cfg.model, ...)."
        )


def check_schedule(cfg: RecipeConfig, start: Start, total_steps: int) -> None:
    """Log the checkpoint that a run resumes from and what changed since, and compute the schedule of the steps to come:
    a user's function fails now rather than in an hour."""
    schedule, planned = cfg.group(ScheduleConfig), start.state.get("total_steps", total_steps)
    if start.folder is not None:
        say("resuming", f"from {start.folder}, after step {start.step} of {total_steps}")
    for change in start.changes:
        say("changed", f"{change}. The results may differ from a run that had this value from the start")
    if schedule is None:
        return
    if planned != total_steps and any(
        scheduled(schedule, step, planned) != scheduled(schedule, step, total_steps) for step in range(start.step)
    ):
        effect = f"schedule.name={schedule.name} uses the new total from now on"
        say("changed", f"total steps: {planned} then, {total_steps} now. {effect}")
    for step in range(start.step, total_steps):
        scheduled(schedule, step, total_steps)


# Before anything is loaded ----------------------------------------------------------------------------------------


@contextmanager
def settled(cfg: ConfigT) -> Iterator[ConfigT]:
    """Context manager with the settings as the run uses them: the directory chosen and absolute, and models held at a
    commit or checkpoint.

    A chosen directory is logged, and locked before anything is loaded, so that two starts at once take two directories.
    Raises ValueError as `decide_start` and `hold_models`.
    """
    if not isinstance(cfg, RecipeConfig):
        yield hold_models(cfg)
        return
    is_launched, size = "TORCHELASTIC_RUN_ID" in os.environ, os.environ.get("WORLD_SIZE", "1")
    requested, directory = cfg, cfg.output_dir

    def choose() -> str:
        directory, reason = choose_output_dir(requested, lock=True)
        say("output_dir", f"{directory}: {reason}")
        return str(directory)

    # Processes that nobody launched together cannot agree on a choice. They take the default name.
    if "output_dir" not in cfg.model_fields_set and (is_launched or size == "1"):
        directory = Path(decided_by_rank_zero("output_dir", choose) if is_launched else choose())
    # User code may change the current folder. Messages and records show the name as it was given.
    directory = shown_as_given(directory)
    try:
        cfg = cfg.model_copy(update={"output_dir": directory})
        earlier = read_earlier(cfg, quick=True)
        cfg = hold_rate(hold_models(cfg, earlier), earlier)
        decide_start(cfg, earlier=earlier)
        yield cfg
        record_leaving(directory, None)
    except BaseException as error:
        record_leaving(directory, error)
        raise
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
            if not lock or _locked(directory):
                return directory, reason
            obstacle = "is in use by another process"
        skipped = f"; {directory} {obstacle}"
    raise AssertionError


def _locked(directory: Path) -> bool:
    """Lock a directory for this process's run. Return False if another process holds the lock."""
    try:
        locks[directory.absolute()] = DirectoryLock(directory)
    except ValueError:
        return False
    return True


def _obstacle(cfg: RecipeConfig) -> str | None:
    """Why a run with these settings does not take `output_dir`; None if the directory is free, or holds an unfinished
    run with the same settings."""
    directory = cfg.output_dir
    if not holds_run(directory):
        return "holds other files" if foreign_files(directory) or directory.is_file() else None
    if cfg.resume != "auto":
        return f"holds a run, and resume={cfg.resume} starts a new one"
    try:
        earlier = read_run(directory, quick=True)
    except ValueError:
        earlier = RecordedRun()
    if earlier.has_ended:
        return "holds a finished run"
    if not earlier.state:
        return "holds a run with damaged files"
    before, now = (
        _recorded_settings(earlier.state),
        _settings(hold_rate(hold_models(cfg, earlier, log=False), earlier, log=False)),
    )
    refused, logged = _differences(before, now)
    changes = [*_changes(before, now, sorted(CONTENT)), *refused.values()]
    changes += [change for name, change in logged.items() if not name.startswith(HOW_IT_COMPUTES)]
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"holds a run with other settings ({changes[0]}{more})" if changes else None


def hold_models(cfg: ConfigT, earlier: RecordedRun | None = None, *, log: bool = True) -> ConfigT:
    """Return the settings with each hub model at a commit and each run directory at a checkpoint, which a training run
    logs.

    They become the commit or checkpoint that the `earlier` run began with, else the newest. A branch or tag in
    `org/name@revision` is looked up, so that resuming is refused if it has moved. Raises as `lean_ft.hub.download`, and
    ValueError if a run directory has no whole checkpoint.
    """
    is_training = isinstance(cfg, RecipeConfig)
    recorded = {} if earlier is None else earlier.state.get("settings", {})
    held: dict[str, BaseModel] = {}
    for (group, name), model_path in models_of(cfg).items():
        begun, folder = recorded.get(f"{group}.{name}"), Path(model_path).expanduser()
        label, version, path = "hub", "commit", str(path_at_commit(model_path, begun))
        # Recipes that do not train read run directories themselves, with their adapters.
        if is_training and path == model_path and list_checkpoints(folder):
            resumes = begun is not None and Path(begun).parent == folder
            label, version = "run", "checkpoint"
            path = begun if resumes else str(newest_whole(folder, "An earlier checkpoint is used."))
        if path == model_path:
            continue
        held[group] = (held.get(group) or getattr(cfg, group)).model_copy(update={name: path})
        if log and is_training:
            key = group if name == "path" else name  # model, teacher
            say(label, f"{key} {path}{f', the {version} that this run began with' if path == begun else ''}")
    return cfg.model_copy(update=held)


def hold_rate(cfg: RecipeT, earlier: RecordedRun, *, log: bool = True) -> RecipeT:
    """Return the settings with the learning rate of the `earlier` run, if it is another usual rate and none is set.

    A run of an adapter that an older version began without optimizer.lr has the usual rate of all parameters.
    """
    recorded, usual = earlier.state.get("settings", {}).get("optimizer.lr"), cfg.usual_lr.all_parameters
    for name, group in cfg:
        if isinstance(group, OptimizerConfig) and "lr" not in group.model_fields_set and recorded == usual != group.lr:
            if log:
                say("optimizer", f"lr {usual:g}, the default that this run began with. A new run takes {group.lr:g}")
            cfg = cfg.model_copy(update={name: group.model_copy(update={"lr": usual})})
    return cfg


# Comparing settings -----------------------------------------------------------------------------------------------


def _settings(cfg: RecipeConfig, is_own: bool = True) -> Settings:
    """The settings of this start, with the recipe, unless it branches from another run."""
    return {**settings_of(cfg), **({"recipe": recipe_name(cfg)} if is_own else {})}


def _recorded_settings(state: State, is_own: bool = True) -> Settings:
    """The same settings in a checkpoint's or start's state; empty if nothing is recorded."""
    recipe = {"recipe": without_alias(state["recipe"])} if is_own and "recipe" in state else {}
    return {**state.get("settings", {}), **recipe}


def _differences(before: Settings, now: Settings) -> tuple[dict[str, str], dict[str, str]]:
    """The settings that differ, by name, with both values: first those that make another run, then those that a resumed
    run may change. Data is not compared."""
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
    return math.prod(number for key in BATCH if isinstance(number := settings.get(key, 1), int))


def _hint(cfg: RecipeConfig, before: Settings, refused: Collection[str]) -> str:
    """How the batches may change."""
    rows, size = _rows_per_step(before), cfg.batch_size
    if not set(BATCH) & set(refused):
        return ""
    if rows % size:
        return f"\nbatch_size and gradient_accumulation_steps may change if a step keeps its {rows} rows."
    return f"\nWith batch_size={size}, set gradient_accumulation_steps={rows // size} to keep {rows} rows per step."


def _compare_content(start: Start, now: Settings, data: Batches, base_fingerprint: str | None) -> None:
    """Compare the content of the data, and the weights below an adapter, with those that the checkpoint was trained on.

    Checkpoints of early versions and models with random weights have no fingerprint of weights, and are not compared.
    """
    state = start.state
    assert start.folder is not None
    if data.fingerprint != state["data_fingerprint"]:
        lines, weights, merge = _lines(_changed_data(state, now, data)), str(start.folder), ""
        if (start.folder / "adapter_config.json").is_file():
            weights, merge = "merged", f"run `leanft export {quote(weights)} merged --merge`, and "
        raise ValueError(
            f"{start.folder} was trained on other data:{lines}\nRestore what changed to resume the run. To go on from "
            f"its weights with the new data, {merge}start another run: set model.path={quote(weights)} and a new "
            "output_dir."
        )
    before = state.get("base_fingerprint")
    if before is not None and base_fingerprint is not None and before != base_fingerprint:
        raise ValueError(
            f"{start.folder} holds an adapter of another model: the weights of model.path={now.get('model.path')} "
            "changed since the checkpoint.\nRestore these weights to resume the run, or set a new output_dir to train "
            "a new adapter."
        )


def _changed_data(state: State, now: Settings, data: Batches) -> list[str]:
    """What changed in the data since a checkpoint, by name."""
    settings = _recorded_settings(state)
    if not (before := Contents.of(state.get("data_contents", []))):
        changes = _changes(settings, now, sorted(CONTENT))
        return [*changes, "the data changed since the checkpoint, which has no record of its files"]
    lines = before.differences(Contents.of(data.contents.as_json()))
    # A text is the name of what `lines` name. A list may also have other weights.
    is_named = isinstance(settings.get("data.source"), str) and isinstance(now.get("data.source"), str)
    lines += [] if is_named else _changes(settings, now, ["data.source"])
    # Older checkpoints lack newer settings.
    newer = [key for key in sorted(now.keys() - settings.keys()) if key.startswith("data.")]
    lines = lines or [f"{key}: not on record then, {json.dumps(now[key])} now" for key in newer]
    return lines or ["the way in which lean_ft or your code arranges the rows"]


def _changes(before: Settings, now: Settings, keys: Iterable[str]) -> list[str]:
    """The settings in both that differ. A setting that one side lacks belongs to another version or an edited
    recipe."""
    in_both = before.keys() & now.keys()
    return [_change(key, before[key], now[key]) for key in keys if key in in_both and before[key] != now[key]]


def _change(key: str, old: JSON, new: JSON) -> str:
    [line] = differences(key, old, new)
    return line


def _lines(changes: list[str]) -> str:
    return "".join(f"\n  {change}" for change in changes)


def _refusal(what: str, changes: list[str]) -> str:
    return (
        f"{what}:{_lines(changes)}\n"
        f"Restore these settings to resume the run, or set a new output_dir to start another run."
    )
