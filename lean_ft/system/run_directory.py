"""A run's directory on the disk: its files, its checkpoints, and whether they are whole.

    config.yaml      the resolved settings, which `leanft run RECIPE --config` reads; facts about the run as comments
    run.json         the same facts for programs, with one entry per start of the run
    functions/       sources of the functions that were passed from Python
    metrics.jsonl    see lean_ft.training.metrics
    tool_results.jsonl    results of tool calls since the last checkpoint, for this user alone; removed at the run's end
    step_00000100/   a checkpoint
      config.json, *.safetensors, tokenizer files     a Hugging Face folder; with an adapter, a PEFT adapter folder
      ema/                                            the same folder with averaged weights, with `optimizer.ema`
      training_state/optimizer.safetensors            the optimizer's tensors
      training_state/beside.safetensors               weights of a module that trains besides the model, if any
      training_state/training_state.json              step, settings, data position, loss scale
      training_state/random_state.json                state of every random number generator
      manifest.json                                   size and sha256 of every file above, and its own

A folder `step_*` is always whole (see `lean_ft.system.whole_files`), unless a disk failed or someone changed it: the
manifest shows that. `lean_ft.training` writes these files, and reads tensors and the state of generators.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from lean_ft.system.contents import Contents
from lean_ft.system.log import say
from lean_ft.system.whole_files import read_json, sync, write_json

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
TOOL_RESULTS_FILE = "tool_results.jsonl"  # of rank 0; others have RANK_ in front
LOCK_FILE = ".lock"
LOG_SUFFIXES = (".log", ".out", ".err")  # a scheduler or `tee` may open these in the directory before we start
MANIFEST = "manifest.json"
STATE_FOLDER = "training_state"
EMA_FOLDER = "ema"
OPTIMIZER_FILE = f"{STATE_FOLDER}/optimizer.safetensors"
BESIDE_FILE = f"{STATE_FOLDER}/beside.safetensors"
TRAINING_STATE_FILE = f"{STATE_FOLDER}/training_state.json"
RANDOM_STATE_FILE = f"{STATE_FOLDER}/random_state.json"
QUICK_BYTES = 2**20  # a quick check does not compute the checksums of larger files

_ADDED = ("tokens", "step_seconds", "peak_memory_bytes", "loss", "eval_loss")  # fields that tables compute with
_MAX_STEP, _MAX_VALUE = 2**53, 1e300

DAMAGED = "The checkpoint is damaged."
NAME = re.compile(r"step_(\d{8,})")

State = dict[str, Any]
Row = dict[str, Any]  # a line of metrics.jsonl


@dataclass(frozen=True)
class RecordedRun:
    """What a directory or a checkpoint records of a run."""

    checkpoint: Path | None = None
    """The newest whole checkpoint."""
    state: State = field(default_factory=dict)
    """The checkpoint's training state. Without a checkpoint, the last start's entry in run.json; empty if there is no
    run."""
    has_ended: bool = False
    """Whether the last start made all of its steps."""
    rows: list[Row] = field(default_factory=list)
    """The lines of metrics.jsonl up to the checkpoint, unless the run was read quickly."""


def read_run(directory: Path, remark: str = "", *, quick: bool = False) -> RecordedRun:
    """Read the run in `directory`, which may be absent. Raises ValueError as `newest_whole`, and if run.json is
    damaged."""
    starts = read_starts(directory)
    has_ended = bool(starts) and "ended" in starts[-1]
    try:
        checkpoint = newest_whole(directory, remark, quick=quick)
        if checkpoint is None:
            return RecordedRun(None, starts[-1] if starts else {}, has_ended)
        state = read_training_state(checkpoint)
    except ValueError as error:
        raise ValueError(f"{error} Set another output_dir to start a new run, or delete {directory}.") from None
    rows = [] if quick else lines_until(directory / METRICS_FILE, state["step"])[0]
    return RecordedRun(checkpoint, state, has_ended, rows)


def parse_line(line: bytes) -> Row | None:
    """Parse a line of metrics.jsonl; None if it is not a whole line with a step, or has a value that no run writes: a
    number that is not finite or too large to compute with, or another value where tables compute with numbers."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < _MAX_STEP:
        return None
    numbers = {name: value for name, value in row.items() if type(value) in (int, float)}
    is_whole = all(row.get(name) is None or name in numbers for name in _ADDED)
    return row if is_whole and all(-_MAX_VALUE < value < _MAX_VALUE for value in numbers.values()) else None


def read_rows(path: Path) -> list[Row]:
    """The readable lines of metrics.jsonl, whose run may be under way."""
    return [row for row in map(parse_line, path.read_bytes().splitlines(keepends=True)) if row is not None]


def lines_until(path: Path, step: int) -> tuple[list[Row], int]:
    """The lines of metrics.jsonl of the first `step` steps, up to the first unreadable line, and their size in
    bytes."""
    rows, size_bytes = list[Row](), 0
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        row = parse_line(line)
        if row is None or row["step"] > step:
            break
        rows.append(row)
        size_bytes += len(line)
    return rows, size_bytes


def read_named(resume: str, directory: Path, *, quick: bool = False) -> RecordedRun:
    """Read the checkpoint that `resume=PATH` names, for a run in `directory`.

    Raises ValueError if it is no whole checkpoint, or the run would overwrite later checkpoints.
    """
    folder = Path(resume).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"resume={resume}: no such folder. Expected auto, never, or a checkpoint (runs/a/step_00000100)."
        )
    if not (folder / TRAINING_STATE_FILE).is_file():
        inside = list_checkpoints(folder)
        hint = "To start from a model's weights, set model.path to its folder."
        if inside:
            hint = f"It is a run directory. Its newest checkpoint is {inside[-1]}."
        raise ValueError(f"resume={resume} is not a checkpoint: it has no {TRAINING_STATE_FILE}. {hint}")
    is_own = folder.resolve().parent == directory.resolve()
    later = [p.name for p in list_checkpoints(directory) if not is_own or checkpoint_step(p) > checkpoint_step(folder)]
    if later:
        remedy = "delete them" if is_own else f"delete {directory}"
        raise ValueError(
            f"resume={resume} would overwrite {', '.join(later)} in output_dir={directory}. Set resume=auto to "
            f"resume from {later[-1]}, set another output_dir for the branch, or {remedy}."
        )
    check_whole(folder, quick=quick)
    state = read_training_state(folder)
    rows = lines_until(directory / METRICS_FILE, state["step"])[0] if is_own and not quick else []
    return RecordedRun(folder, state, rows=rows)


def holds_run(directory: Path) -> bool:
    return (directory / RUN_FILE).exists() or (directory / CONFIG_FILE).exists() or bool(list_checkpoints(directory))


def check_usable(directory: Path) -> None:
    """Raise ValueError if `directory` is a file, is read-only, or holds files that do not belong to a run."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output_dir={directory} is a file. Set a directory; it need not exist.")
    nearest = directory
    while not nearest.exists():
        nearest = nearest.parent
    try:
        # Permission bits are not enough: they allow root everything, also on a read-only disk.
        tempfile.TemporaryDirectory(prefix=".lean_ft-", dir=nearest).cleanup()
    except OSError as error:
        raise ValueError(
            f"output_dir={directory} cannot be written: {nearest}: {error.strerror}. Set another output_dir."
        ) from None
    if foreign := foreign_files(directory):
        shown = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
        raise ValueError(
            f"output_dir={directory} holds files that do not belong to a run ({shown}). Set a new or empty "
            f"directory, or the directory of a run to resume."
        )


def foreign_files(directory: Path) -> list[str]:
    """Names of the files in a directory that holds no run, except for hidden files and a scheduler's logs."""
    if not directory.is_dir() or holds_run(directory):
        return []
    names = sorted(path.name for path in directory.iterdir())
    return [name for name in names if not name.startswith(".") and not name.endswith(LOG_SUFFIXES)]


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; empty if the file is missing."""
    path = directory / RUN_FILE
    delete = "Delete it to continue without the record of earlier starts."
    starts = _read(path, delete).get("starts", []) if path.exists() else []
    if not isinstance(starts, list) or not all(
        isinstance(start, dict) and isinstance(start.get("settings"), dict) and isinstance(start.get("recipe", ""), str)
        for start in starts
    ):
        raise ValueError(f"{path} is not a list of a run's starts. {delete}")
    return starts


# Checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_step(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def list_checkpoints(directory: Path) -> list[Path]:
    """The folders in `directory` with a checkpoint's name, by step."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if p.is_dir() and NAME.fullmatch(p.name)), key=checkpoint_step)


def newest_whole(directory: Path, remark: str, *, quick: bool = False) -> Path | None:
    """The newest checkpoint in `directory` that passes `check_whole`; None if there are no checkpoints.

    Damaged checkpoints are skipped. With a `remark`, a log line names the damage. Raises ValueError if all are damaged.
    """
    problem = ""
    for folder in reversed(list_checkpoints(directory)):
        try:
            check_whole(folder, quick=quick)
        except ValueError as error:
            problem = str(error)
            if remark:
                say("damaged", f"{problem} {remark}")
            continue
        return folder
    if problem:
        raise ValueError(f"No whole checkpoint is left in {directory}: {problem}")
    return None


def check_whole(folder: Path, *, quick: bool = False) -> None:
    """Raise ValueError, naming the file, unless every file in the folder's manifest is there and unchanged.

    With `quick`, only the sizes of large files are checked, and not their checksums.
    """
    for name, expected in _read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: the checkpoint is damaged.")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes where {MANIFEST} has {expected['bytes']}: "
                f"the checkpoint is damaged."
            )
        summed = not quick or expected["bytes"] <= QUICK_BYTES
        if summed and _sha256(path) != expected["sha256"]:
            raise ValueError(f"{path} does not match its checksum in {MANIFEST}: it was changed or is damaged.")


def write_manifest(folder: Path, step: int) -> None:
    """Sync all files to the disk, and write their sizes and checksums. Two threads, because both wait outside
    Python."""

    def sync_and_sum(path: Path) -> State:
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": _sha256(path)}

    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(max_workers=2) as pool:
        entries = pool.map(sync_and_sum, paths)
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = dict(zip(names, entries, strict=True))
    manifest = {"format": 1, "step": step, "files": files, "sha256": manifest_digest(step, files)}
    write_json(folder / MANIFEST, manifest, indent=1, on_disk=True)


def manifest_digest(step: Any, files: Any) -> str:
    """A checksum of the manifest's own content, to distinguish a damaged manifest from a damaged file."""
    return hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(folder: Path) -> dict[str, State]:
    """The manifest's entries by file name. Raises ValueError unless it is this folder's, with file names inside the
    folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} is missing: {folder} is not a whole checkpoint.")
    try:
        manifest = _read(path)
        files = manifest["files"]
        step = NAME.fullmatch(folder.name)
        right = manifest["format"] == 1 and (step is None or manifest["step"] == int(step[1]))
        right = right and manifest["sha256"] == manifest_digest(manifest["step"], files)
        for name, entry in files.items():
            parts = PurePosixPath(name).parts
            right = right and ".." not in parts and not name.startswith("/") and "\\" not in name
            right = right and type(entry["bytes"]) is int and type(entry["sha256"]) is str
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} cannot be read: the checkpoint is damaged.") from None
    if not right or not {TRAINING_STATE_FILE, RANDOM_STATE_FILE, OPTIMIZER_FILE} <= files.keys():
        raise ValueError(f"{path} does not describe this checkpoint: it was changed or is damaged.")
    return files


def read_training_state(folder: Path) -> State:
    """Step, settings and data position of a checkpoint. Raises ValueError if a field is missing or has another type."""
    path = folder / TRAINING_STATE_FILE
    state = _read(path)
    expected = {"step": int, "total_steps": int, "recipe": str, "settings": dict, "data_fingerprint": str}
    for name, value_type in expected.items():
        if type(state.get(name)) is not value_type:
            raise ValueError(f"{path} cannot be used: expected the field {name}, of type {value_type.__name__}.")
    try:
        Contents.of(state.get("data_contents", []))
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: data_contents: {error}.") from None
    if not {"batches", "scaler"} <= state.keys() or type(state.get("bad_steps", 0)) is not int:
        raise ValueError(
            f"{path} cannot be used: it lacks the position in the data, the loss scale or the number of bad steps."
        )
    return state


def read_random_state(folder: Path) -> State:
    """The state of the random number generators in a checkpoint. Raises ValueError if the file cannot be read."""
    return _read(folder / RANDOM_STATE_FILE)


def _read(path: Path, remedy: str = DAMAGED) -> State:
    """The object in a JSON file. Raises ValueError, with the `remedy`, for anything else."""
    try:
        return read_json(path, "the file is missing.")
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from None


@contextmanager
def from_checkpoint(folder: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Context manager that turns an error from a value of the wrong type or size, or of the further `kinds`, into a
    ValueError that calls the checkpoint damaged."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError, *kinds) as error:
        problem = "a value is missing, or has another type or size than the run writes"
        raise ValueError(f"{folder / STATE_FOLDER} cannot be used: {problem}. The checkpoint is damaged.") from error
