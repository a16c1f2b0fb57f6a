"""The lock of a run directory, and the records that a run writes there: config.yaml and run.json."""

import fcntl
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch

import lean_ft
from lean_ft.data.batches import Batches
from lean_ft.settings import OptimizerConfig, RecipeConfig, recipe_name
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.settings.text import dotted
from lean_ft.system.contents import HASH
from lean_ft.system.log import say
from lean_ft.system.redaction import on_one_line, redact, redact_values
from lean_ft.system.run_directory import CONFIG_FILE, LOCK_FILE, RUN_FILE, TOOL_RESULTS_FILE, read_starts
from lean_ft.system.shards import Ranks
from lean_ft.system.user_functions import PASSED, file_digest, is_function_path, without_hashes
from lean_ft.system.whole_files import LEFTOVER, open_in_place, remove, write_json, write_whole

Settings = dict[str, Any]  # dotted key -> JSON value
_MOST_OF_ERROR = 300  # characters of an error in run.json
_begun = set[Path]()  # directories with a run that this process began and did not complete


CONTENT_OF_RULE = "the code of optimizer.name"  # beside the settings, because an edited rule is another run


def settings_of(cfg: RecipeConfig) -> Settings:
    """All settings by dotted key, as redacted JSON values. An edited function from Python is the same setting."""
    values = without_hashes(cfg.model_dump(mode="json"))
    settings: Settings = redact_values({key: value for key, value in dotted(values) if value != {}})
    if (optimizer := cfg.group(OptimizerConfig)) is None:
        return settings
    # One value, also if it is empty, so that a pattern that is added or removed counts as a change.
    settings = {key: value for key, value in settings.items() if not key.startswith("optimizer.lr_ratios.")}
    own = {} if optimizer.content is None else {CONTENT_OF_RULE: HASH + optimizer.content}
    return {**settings, "optimizer.lr_ratios": redact_values(optimizer.lr_ratios), **own}


def set_keys(cfg: RecipeConfig) -> list[str]:
    """Dotted keys of the settings that differ from the recipe's defaults."""
    values = without_hashes(cfg.model_dump(mode="json", exclude_defaults=True))
    usual = [key for key in cfg.meanings_of_null() if not _is_set(cfg, key)]
    return [key for key, _ in dotted(values) if key not in usual]


def _is_set(cfg: RecipeConfig, key: str) -> bool:
    """Whether a setting of a group, by dotted key, has a value that the user gave."""
    group, _, name = key.rpartition(".")
    return name in getattr(cfg, group).model_fields_set


def facts_that_ranks_share(cfg: RecipeConfig, batches: Batches) -> Settings:
    """The settings and data facts that must be equal on all ranks, by name."""
    data = {"the data": HASH + batches.fingerprint, "contents of the data": batches.contents}
    data |= {"batches per epoch": batches.batches_per_epoch}
    return {"recipe": recipe_name(cfg), **settings_of(cfg), **data}


def git_commit(folder: Path) -> str | None:
    """The git commit of `folder`, with `+changes` if tracked files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        # Without fsmonitor, by which a repository's configuration runs a program.
        command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def remove_half_written(directory: Path) -> None:
    """Delete files that a killed process left incomplete, with a log line each. Call it with the directory locked."""
    for leftover in sorted(directory.iterdir()):
        if LEFTOVER.fullmatch(leftover.name):
            remove(leftover)
            what = "checkpoint" if "step_" in leftover.name else "file"
            say("removed", f"{leftover}, an incomplete {what}")


class DirectoryLock:
    """Keeps other processes out of a run directory while this process lives."""

    def __init__(self, directory: Path):
        """Create the directory if needed and lock it. Raises ValueError if another process holds the lock."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file = open_in_place(directory / LOCK_FILE, "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self.release()
            raise ValueError(
                f"output_dir={directory} is in use by {holder}. Wait for it, stop it, or set another output_dir."
            ) from None
        except OSError as error:  # some network file systems have no locks
            say("unlocked", f"{directory} cannot be locked ({error.strerror}). Do not start another run in it")
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}\n")
        self._file.flush()

    def release(self) -> None:
        """Release the lock. The file stays: if it were deleted, two waiting processes could lock two different
        files."""
        self._file.close()


locks: dict[Path, DirectoryLock] = {}  # of directories that this process has locked for its next run


def is_locked(directory: Path) -> bool:
    """Whether a process holds the lock of a run directory. The lock of a process that has ended is not tried, because
    the trial keeps a run from starting while it lasts."""
    file = directory / LOCK_FILE
    try:
        holder = re.fullmatch(r"process (\d+) on (.*)\s*", file.read_text(encoding="utf-8"))
        if holder is not None and holder[2] == platform.node():
            os.kill(int(holder[1]), 0)
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no file, no process, or a file system without locks
        return False
    return False


def lock_directory(directory: Path, ranks: Ranks) -> DirectoryLock | None:
    """Lock the run directory, and delete what a killed process left incomplete. Rank 0 alone holds the lock.

    Raises ValueError if another process holds it, or a rank does not see rank 0's directory.
    """
    lock: DirectoryLock | None = None

    def take() -> str:
        nonlocal lock
        lock = locks.pop(directory, None) or DirectoryLock(directory)
        remove_half_written(directory)
        return (directory / LOCK_FILE).read_text(encoding="utf-8")

    def look(holder: str) -> None:
        file = directory / LOCK_FILE
        if not file.is_file() or file.read_text(encoding="utf-8") != holder:
            raise ValueError(
                f"output_dir={directory}: rank {ranks.rank} on {platform.node()} does not see the folder of "
                "rank 0. All ranks write checkpoints. Set output_dir to a folder on a disk that all machines share."
            )

    try:
        holder = ranks.on_rank_zero(take)
        if ranks.size > 1:
            ranks.on_every_rank(lambda: look(holder))
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def record_start(
    cfg: RecipeConfig,
    device: torch.device,
    data_fingerprint: str,
    start_step: int,
    resumed_from: Path | None,
    num_ranks: int,
    total_steps: int,
) -> None:
    """Write config.yaml and add this start to run.json: its settings, versions, hardware, commit and data."""
    named = settings_of(cfg)
    facts: dict[str, Any] = {
        "recipe": recipe_name(cfg),
        "started": _now(),
        "start_step": start_step,
        "total_steps": total_steps,
        "lean_ft": lean_ft.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_threads": torch.get_num_threads(),
        "git_commit": git_commit(Path.cwd()),
        "data_fingerprint": data_fingerprint,
    }
    for entry in [entry for value in named.values() for entry in (value if isinstance(value, list) else [value])]:
        function = entry.get("function", entry.get("format")) if isinstance(entry, dict) else entry
        if is_function_path(function) and (file := Path(function.rpartition(":")[0]).expanduser()).is_file():
            facts[f"hash of {redact(str(file))}"] = file_digest(function)
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    if num_ranks > 1:
        facts["processes"] = num_ranks
    if resumed_from is not None:
        facts["resumed_from"] = str(resumed_from)
    directory, facts = cfg.output_dir, redact_values(facts)
    settings = to_yaml(redact_values(cfg.model_dump(mode="json")))
    for passed in [passed for passed in PASSED if passed in settings]:
        source = redact(PASSED[passed].source or "# Python does not have the source of this function.\n")
        facts[passed] = "passed from Python; this file of the directory has its source, without values that it captures"
        (directory / passed).parent.mkdir(exist_ok=True)
        with write_whole(directory / passed.rpartition(":")[0]) as temporary:
            temporary.write_text(source, encoding="utf-8")
    comments = "".join(f"#   {on_one_line(f'{name}: {value}')}\n" for name, value in facts.items())
    text = f"# The resolved settings of this run; `leanft run RECIPE --config` reads this file.\n{comments}{settings}"
    with write_whole(directory / CONFIG_FILE) as temporary:
        temporary.write_text(text, encoding="utf-8")
    starts = read_starts(directory)
    write_json(
        directory / RUN_FILE, {"starts": [*starts, {**facts, "set": set_keys(cfg), "settings": named}]}, 1, on_disk=True
    )
    _begun.add(directory.absolute())


def record_end(directory: Path, *, writes: bool) -> None:
    """Mark the last start in run.json as ended, so that the same command begins another run, if this process `writes`.
    Results of
    tools are removed: no later start reads them, and they may hold secrets."""
    starts = read_starts(directory) if writes else []
    for file in [directory / TOOL_RESULTS_FILE, *directory.glob(f"[0-9]*_{TOOL_RESULTS_FILE}")] if writes else ():
        remove(file)
    if starts and "ended" not in starts[-1]:
        _add_to_last_start(directory, starts, ended=_now())


def record_leaving(directory: Path, error: BaseException | None) -> None:
    """Record when this process left a run that it began and that is not complete: `stopped` (by a signal, or a `break`
    in the loop), or `failed` with the error."""
    if directory.absolute() not in _begun:
        return
    is_stop = error is None or isinstance(error, SystemExit | KeyboardInterrupt)
    failure = "" if is_stop else redact(f"{type(error).__name__}: {on_one_line(str(error))[:_MOST_OF_ERROR]}")
    try:
        starts = read_starts(directory)
        _add_to_last_start(
            directory, starts, **({"stopped": _now()} if is_stop else {"failed": _now(), "error": failure})
        )
    except (OSError, ValueError) as problem:  # the error of the run matters more
        say("not recorded", f"how the run in {directory} ended: {problem}")


def _add_to_last_start(directory: Path, starts: list[dict[str, Any]], **facts: str) -> None:
    _begun.discard(directory.absolute())
    starts[-1] |= facts
    write_json(directory / RUN_FILE, {"starts": starts}, 1, on_disk=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
