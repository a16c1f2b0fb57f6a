"""Which checkpoint a run goes on from, and whether its settings let it.

A continuation must be the run that never stopped. Settings that make it another run (the model, the data, the batch,
the update rule) are refused when they changed; how long it runs and how often it writes are free; what moves the
numbers without making the state wrong (the learning rate, the device, the memory techniques) is allowed and said.
"""

import json
import math
from pathlib import Path
from typing import Any

from lean_ft.settings import RecipeConfig
from lean_ft.system.catalog import without_alias
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

FREE = {
    "plan",
    "max_steps",
    "epochs",
    "save_every",
    "eval_every",
    "stop_after_evals",
    "log_every",
    "output_dir",
    "resume",
}
FREE |= {"data.num_processes", "data.cache_dir", "data.cache_gib"}  # how data is prepared, not what comes of it
FREE |= {"eval_answers", "eval_pattern", "save_async", "keep_last", "keep_every", "keep_best", "max_bad_steps"}
FREE |= {"profile", "profile_steps", "eval_tasks", "eval_tasks_every", "eval_tasks_limit"}
FREE_GROUPS = ("log.",)
# Allowed, with a word:
SAID = {"compile", "device", "clip_grad_norm", "optimizer.lr", "lora.lr_ratio", "data.validation_source"}
SAID |= {"neftune_alpha"}
SAID_GROUPS = ("memory.", "schedule.", "parallel.")
BATCH = ("batch_size", "gradient_accumulation_steps")  # allowed together, where a step's rows stay the same
# May differ when a complete run is started again: it is asked for answers, or nothing is left to prepare.
OF_COMPLETE = {"plan", "device", "output_dir", "resume", "eval_answers", "eval_pattern"}
OF_COMPLETE |= {"data.num_processes", "data.cache_dir", "data.cache_gib"}
CONTENT = {"data.source", "data.chat_template"}  # files may move: what is in them is compared, by compare_data
IDENTITY = ("model.path", "data.source")  # what makes it another run even when nothing was saved yet
QUICK_BYTES = 2**20  # before a model is loaded, only the checksums of files up to this size are verified
UNKNOWN = object()


def check_output_dir(cfg: RecipeConfig) -> None:
    """Refuse, before anything is loaded or changed, an `output_dir` and `resume` that cannot work together.

    Raises ValueError. Checksums of large files and the data are checked later, when the run goes on.
    """
    directory = cfg.output_dir
    check_usable(directory)
    if cfg.resume == "never" and holds_run(directory):
        raise ValueError(
            f"output_dir={directory} holds a run, and resume=never starts only new ones. Set another output_dir, "
            f"delete {directory}, or set resume=auto to go on with that run."
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
    """The whole checkpoint that `cfg.resume` asks for, its files verified; None to begin at step 0.

    `auto` passes over damaged checkpoints, naming what is wrong with each, and raises ValueError if that leaves none:
    beginning anew would bury them. `quick` names nothing, and verifies small files and the sizes of large ones.
    """
    checksum_up_to_bytes = QUICK_BYTES if quick else None
    if cfg.resume == "never":
        return None
    if cfg.resume != "auto":
        folder = _named_checkpoint(cfg)
        check_whole(folder, checksum_up_to_bytes)
        return folder
    remark = "" if quick else "Passed over; it is replaced when the run comes to that step again."
    try:
        return newest_whole(cfg.output_dir, remark, checksum_up_to_bytes)
    except ValueError as error:
        raise ValueError(f"{error} Set another output_dir to begin anew, or delete {cfg.output_dir}.") from None


def is_own(cfg: RecipeConfig, folder: Path) -> bool:
    """Whether a checkpoint is of the run in `output_dir`, and not one that it branches off."""
    return folder.resolve().parent == cfg.output_dir.resolve()


def _named_checkpoint(cfg: RecipeConfig) -> Path:
    """The checkpoint folder that `resume=PATH` names, if this run may go on from it into its output_dir."""
    folder = Path(cfg.resume).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"resume={cfg.resume} is not a folder. Expected auto, never, or a checkpoint (runs/a/step_00000100)."
        )
    if not (folder / TRAINING_STATE_FILE).is_file():
        inside = list_checkpoints(folder)
        hint = "To start from a model's weights, set model.path to its folder."
        if inside:
            hint = f"It is a run directory; its newest checkpoint is {inside[-1]}."
        raise ValueError(f"resume={cfg.resume} is not a checkpoint: it has no {TRAINING_STATE_FILE}. {hint}")
    own = is_own(cfg, folder)
    later = [
        p.name for p in list_checkpoints(cfg.output_dir) if not own or checkpoint_step(p) > checkpoint_step(folder)
    ]
    if later:
        remedy = "delete them to go back" if own else f"delete {cfg.output_dir}"
        raise ValueError(
            f"resume={cfg.resume} would overwrite {', '.join(later)} in output_dir={cfg.output_dir}. Set resume=auto to "
            f"go on from {later[-1]}, set another output_dir for the branch, or {remedy}."
        )
    return folder


def compare_settings(cfg: RecipeConfig, state: dict[str, Any], folder: Path) -> list[str]:
    """Compare `cfg` with the settings in a checkpoint's state; returns what changed and is allowed but worth saying.

    The recipe is compared too, unless the run branches off another.

    Raises ValueError naming every setting whose change would make this another run, with both values.
    """
    before, now = dict(state["settings"]), settings_of(cfg)
    if is_own(cfg, folder):
        before["recipe"], now["recipe"] = without_alias(state["recipe"]), recipe_name(cfg)
    refused, said, hint = [], [], ""
    rows_then, rows_now = (math.prod(settings.get(key, 1) for key in BATCH) for settings in (before, now))
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, UNKNOWN), now.get(key, UNKNOWN)
        # A setting known on one side only is another version's, or an edited recipe's: nothing to compare.
        if old == new or UNKNOWN in (old, new) or key in FREE | CONTENT or key.startswith(FREE_GROUPS):
            continue
        change = _change(key, old, new)
        is_allowed = key in SAID or key.startswith(SAID_GROUPS) or (key in BATCH and rows_then == rows_now)
        (said if is_allowed else refused).append(change)
        if key in BATCH and rows_then != rows_now:
            hint = (
                f"\nbatch_size and gradient_accumulation_steps may change together: {rows_then} rows a step, as then."
            )
            size = now["batch_size"]
            if rows_then % size == 0:
                hint = f"\nbatch_size={size} goes on with gradient_accumulation_steps={rows_then // size}: the same rows a step."
    if refused:
        raise ValueError(_refusal(f"{folder} was written with other settings", refused) + hint)
    return said


def check_complete(cfg: RecipeConfig, state: dict[str, Any]) -> None:
    """Refuse settings that leave a run nothing to train, and that differ from those it was trained with.

    Raises ValueError naming all of them, with both values.
    """
    before, now = state["settings"], settings_of(cfg)
    changes = [
        _change(key, before[key], now[key])
        for key in sorted((before.keys() & now.keys()) - OF_COMPLETE - CONTENT)
        if before[key] != now[key]
    ]
    if changes:
        bound = "epochs" if cfg.max_steps is None else "max_steps"
        raise ValueError(
            f"output_dir={cfg.output_dir} holds a run with {state['step']} steps done, and nothing is left to train. Its settings "
            f"differ:{_lines(changes)}\nSet a new output_dir for a run with the new settings, or a larger {bound} to extend that run."
        )


def compare_identity(cfg: RecipeConfig, start: dict[str, Any]) -> None:
    """Refuse a directory whose run saved nothing yet, but is plainly another one: recipe, model or data."""
    before: Settings = {"recipe": without_alias(start.get("recipe", "")), **start["settings"]}
    now: Settings = {"recipe": recipe_name(cfg), **settings_of(cfg)}
    changes = [
        _change(key, before[key], now[key])
        for key in ("recipe", *IDENTITY)
        if key in before and key in now and before[key] != now[key]
    ]
    if changes:
        raise ValueError(_refusal(f"output_dir={cfg.output_dir} holds another run", changes))


def compare_data(cfg: RecipeConfig, fingerprint: str, state: dict[str, Any], folder: Path) -> None:
    """Refuse data that is not what the checkpoint was trained on, whatever the settings that name it say."""
    if fingerprint == state["data_fingerprint"]:
        return
    before, now = state["settings"], settings_of(cfg)
    changes = [_change(key, before.get(key), now.get(key)) for key in CONTENT if before.get(key) != now.get(key)]
    changes.append(_change("data fingerprint", state["data_fingerprint"], fingerprint))
    raise ValueError(_refusal(f"{folder} was trained on other data", changes))


def compare_base(fingerprint: str | None, state: dict[str, Any], folder: Path) -> None:
    """Refuse other weights beside an adapter than those it was trained beside, wherever they lie.

    A checkpoint of a version that did not look tells of none, nor does a model with random weights.
    """
    before = state.get("base_fingerprint")
    if before is not None and fingerprint is not None and before != fingerprint:
        change = _change("fingerprint of the weights of model.path", before, fingerprint)
        raise ValueError(_refusal(f"{folder} holds an adapter of another model", [change]))


def _change(key: str, old: Any, new: Any) -> str:
    return f"{key}: {json.dumps(old)} then, {json.dumps(new)} now"


def _lines(changes: list[str]) -> str:
    return "".join(f"\n  {change}" for change in changes)


def _refusal(what: str, changes: list[str]) -> str:
    return (
        f"{what}, and going on with these would be neither run:{_lines(changes)}\n"
        f"Set them back to go on, or set a new output_dir to start a run of its own with them."
    )
