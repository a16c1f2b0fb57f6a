"""The run directory of a run that sets none: `runs/<model>_<recipe>`, or the same name with _2, _3 and so on.

The run resumes the first directory with an unfinished run of the same settings, and otherwise starts in the first free one.
Here, a change of what the run learns (learning rate, schedule) makes another run, because people try one value after
another. To resume a run with another value, set output_dir.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from lean_ft.settings import RecipeConfig
from lean_ft.system.launch import decided_by_rank_zero
from lean_ft.system.log import say
from lean_ft.training.checkpoint import newest_whole, read_training_state
from lean_ft.training.continuation import BATCH, CONTENT, QUICK_BYTES, changed, differences, hold_models
from lean_ft.training.run_directory import (
    DirectoryLock,
    check_usable,
    foreign_files,
    holds_run,
    locks,
    read_starts,
    settings_of,
)

ConfigT = TypeVar("ConfigT", bound=BaseModel)

HOW_IT_COMPUTES = ("compile", "device", "memory.", "parallel.", *BATCH)


@contextmanager
def output_dir_chosen(cfg: ConfigT) -> Iterator[ConfigT]:
    """Context manager that chooses the run directory if `output_dir` is not set, logs the choice, and locks the directory
    before anything is loaded, so that two starts at once take two directories."""
    is_launched, size = "TORCHELASTIC_RUN_ID" in os.environ, os.environ.get("WORLD_SIZE", "1")
    # Processes that nobody launched together cannot agree on a choice. They take the default name.
    if not isinstance(cfg, RecipeConfig) or "output_dir" in cfg.model_fields_set or not (is_launched or size == "1"):
        yield cfg
        return

    def decide() -> str:
        directory, reason = choose_output_dir(cfg, lock=True)
        say("output_dir", f"{directory}: {reason}")
        return str(directory)

    directory = Path(decided_by_rank_zero("output_dir", decide) if is_launched else decide())
    try:
        yield cfg.model_copy(update={"output_dir": directory})
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
        starts = read_starts(directory)
        if starts and "ended" in starts[-1]:
            return "holds a finished run"
        checkpoint = newest_whole(directory, "", QUICK_BYTES)
        before = starts[-1] if checkpoint is None else read_training_state(checkpoint)
    except (ValueError, IndexError):
        return "holds a run with damaged files"
    cfg = hold_models(cfg, log=False)
    refused, logged = differences(cfg, before, own=True)
    changes = [*changed(before["settings"], settings_of(cfg), sorted(CONTENT)), *refused.values()]
    changes += [change for name, change in logged.items() if not name.startswith(HOW_IT_COMPUTES)]
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"holds a run with other settings ({changes[0]}{more})" if changes else None
