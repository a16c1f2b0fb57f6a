"""Which checkpoint a run goes on from, and whether its settings let it.

A continuation must be the run that never stopped. Settings that make it another run (the model, the data, the batch,
the update rule) are refused when they changed; how long it runs and how often it writes are free; what moves the
numbers without making the state wrong (the learning rate, the device, the memory techniques) is allowed and said.
"""

import json
from pathlib import Path
from typing import Any

from lean_ft.settings import RecipeConfig
from lean_ft.training.checkpoint import (
    TRAINING_STATE_FILE,
    check_whole,
    checkpoint_step,
    list_checkpoints,
    read_training_state,
)
from lean_ft.training.progress import say
from lean_ft.training.run_directory import (
    Settings,
    check_usable,
    holds_run,
    later_checkpoints,
    read_starts,
    recipe_name,
    settings_of,
)

FREE = {"plan", "max_steps", "epochs", "save_every", "eval_every", "log_every", "output_dir", "resume"}
FREE |= {"data.num_processes", "data.cache_dir", "data.cache_gib"}  # how data is prepared, not what comes of it
FREE |= {"eval_answers", "save_async", "keep_last", "keep_every", "keep_best", "max_bad_steps"}
SAID = {
    "compile",
    "device",
    "clip_grad_norm",
    "optimizer.lr",
    "lora.lr_ratio",
    "data.validation_source",
}  # allowed, with a word
SAID_GROUPS = ("memory.", "schedule.")
CONTENT = {"data.source"}  # files may move: what is in them is compared, by compare_data
IDENTITY = ("model.path", "data.source")  # what makes it another run even when nothing was saved yet
QUICK_BYTES = 2**20  # before a model is loaded, only the checksums of files up to this size are verified
UNKNOWN = object()


def check_output_dir(cfg: RecipeConfig) -> None:
    """Refuse, before anything is loaded or changed, an `output_dir` and `resume` that cannot work together.

    Raises ValueError. Checksums and the data are checked later, when the run goes on.
    """
    directory = cfg.output_dir
    check_usable(directory)
    if cfg.resume == "never":
        if holds_run(directory):
            raise ValueError(
                f"output_dir={directory} holds a run, and resume=never starts only new ones. Set another output_dir, "
                f"delete {directory}, or set resume=auto to go on with that run."
            )
        return
    if cfg.resume != "auto":
        folder = _named_checkpoint(cfg)
        check_whole(folder, checksum_up_to_bytes=QUICK_BYTES)
        compare_settings(cfg, read_training_state(folder), folder, same_recipe=False)
        return
    for folder in reversed(list_checkpoints(directory)):
        try:
            check_whole(folder, checksum_up_to_bytes=QUICK_BYTES)
        except ValueError:
            continue  # find_checkpoint tells of it
        compare_settings(cfg, read_training_state(folder), folder, same_recipe=True)
        return
    if starts := read_starts(directory):
        compare_identity(cfg, starts[-1])


def find_checkpoint(cfg: RecipeConfig) -> Path | None:
    """The whole checkpoint that `cfg.resume` asks for, its files verified; None to begin at step 0.

    `auto` passes over damaged checkpoints, naming what is wrong with each, and raises ValueError if that leaves none:
    beginning anew would bury them.
    """
    if cfg.resume == "never":
        return None
    if cfg.resume != "auto":
        folder = _named_checkpoint(cfg)
        check_whole(folder)
        return folder
    checkpoints = list_checkpoints(cfg.output_dir)
    problem = ""
    for folder in reversed(checkpoints):
        try:
            check_whole(folder)
        except ValueError as error:
            problem = str(error)
            say("damaged", f"{problem} Passed over; it is replaced when the run comes to that step again.")
            continue
        return folder
    if checkpoints:
        raise ValueError(
            f"No whole checkpoint is left in {cfg.output_dir}: {problem} Set another output_dir to begin anew, "
            f"or delete {cfg.output_dir}."
        )
    return None


def _named_checkpoint(cfg: RecipeConfig) -> Path:
    """The checkpoint folder that `resume=PATH` names, if this run may go on from it into its output_dir."""
    folder = Path(cfg.resume).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"resume={cfg.resume} is not a folder. Expected auto, never, or a checkpoint (runs/a/step_00000100)."
        )
    if not (folder / TRAINING_STATE_FILE).is_file():
        inside = list_checkpoints(folder)
        hint = (
            f"It is a run directory; its newest checkpoint is {inside[-1]}."
            if inside
            else ("To start from a model's weights, set model.path to its folder.")
        )
        raise ValueError(f"resume={cfg.resume} is not a checkpoint: it has no {TRAINING_STATE_FILE}. {hint}")
    directory = cfg.output_dir
    if folder.resolve().parent == directory.resolve():
        later = later_checkpoints(directory, checkpoint_step(folder))
        remedy = "delete them to go back"
    else:
        later = [p.name for p in list_checkpoints(directory)]
        remedy = f"delete {directory}"
    if later:
        raise ValueError(
            f"resume={cfg.resume} would overwrite {', '.join(later)} in output_dir={directory}. Set resume=auto to "
            f"go on from {later[-1]}, set another output_dir for the branch, or {remedy}."
        )
    return folder


def compare_settings(cfg: RecipeConfig, state: dict[str, Any], folder: Path, *, same_recipe: bool) -> list[str]:
    """Compare `cfg` with the settings in a checkpoint's state; returns what changed and is allowed but worth saying.

    Raises ValueError naming every setting whose change would make this another run, with both values.
    """
    before, now = dict(state["settings"]), settings_of(cfg)
    if same_recipe:
        before["recipe"], now["recipe"] = state["recipe"], recipe_name(cfg)
    refused, said = [], []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, UNKNOWN), now.get(key, UNKNOWN)
        # A setting known on one side only is another version's, or an edited recipe's: nothing to compare.
        if old == new or UNKNOWN in (old, new) or key in FREE | CONTENT:
            continue
        change = _change(key, old, new)
        (said if key in SAID or key.startswith(SAID_GROUPS) else refused).append(change)
    if refused:
        raise ValueError(_refusal(f"{folder} was written with other settings", refused))
    return said


def compare_identity(cfg: RecipeConfig, start: dict[str, Any]) -> None:
    """Refuse a directory whose run saved nothing yet, but is plainly another one: recipe, model or data."""
    before: Settings = {"recipe": start["recipe"], **start["settings"]}
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


def _change(key: str, old: Any, new: Any) -> str:
    return f"{key}: {json.dumps(old)} then, {json.dumps(new)} now"


def _refusal(what: str, changes: list[str]) -> str:
    lines = "".join(f"\n  {change}" for change in changes)
    return (
        f"{what}, and going on with these would be neither run:{lines}\n"
        f"Set them back to go on, or set a new output_dir to start a run of its own with them."
    )
