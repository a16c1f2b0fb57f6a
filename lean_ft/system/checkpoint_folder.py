"""The folder of a checkpoint: its names, its manifest, and whether it is whole.

    step_00000100/
      config.json, *.safetensors, tokenizer files     a Hugging Face folder; with an adapter, a PEFT adapter folder
      training_state/optimizer.safetensors            the optimizer's tensors
      training_state/beside.safetensors               weights of a module that trains besides the model, if any
      training_state/training_state.json              step, settings, data position, loss scale
      training_state/random_state.json                state of every random number generator
      manifest.json                                   size and sha256 of every file above, and its own

A folder `step_*` is always whole (see `lean_ft.system.whole_files`), unless a disk failed or someone changed it: the
manifest shows that. `lean_ft.training.checkpoint` reads and writes what is inside.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from lean_ft.system.log import say
from lean_ft.system.whole_files import read_json, sync, write_json

MANIFEST = "manifest.json"
STATE_FOLDER = "training_state"
OPTIMIZER_FILE = f"{STATE_FOLDER}/optimizer.safetensors"
BESIDE_FILE = f"{STATE_FOLDER}/beside.safetensors"
TRAINING_STATE_FILE = f"{STATE_FOLDER}/training_state.json"
RANDOM_STATE_FILE = f"{STATE_FOLDER}/random_state.json"
QUICK_BYTES = 2**20  # a quick check does not compute the checksums of larger files

DAMAGED = "the checkpoint is damaged."
NAME = re.compile(r"step_(\d{8,})")

State = dict[str, Any]


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
    """Sync all files to the disk, and write their sizes and checksums. Two threads, because both wait outside Python."""

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
    """The manifest's entries by file name. Raises ValueError unless it is this folder's, with file names inside the folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} is missing: {folder} is not a whole checkpoint.")
    try:
        manifest = read_json(path)
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
    state = read_json(path, DAMAGED)
    expected = {"step": int, "total_steps": int, "recipe": str, "settings": dict, "data_fingerprint": str}
    for name, kind in expected.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"{path} cannot be used: expected the field {name}, of type {kind.__name__}.")
    if not {"batches", "scaler"} <= state.keys() or type(state.get("bad_steps", 0)) is not int:
        raise ValueError(
            f"{path} cannot be used: it lacks the position in the data, the loss scale or the number of bad steps."
        )
    return state


def read_random_state(folder: Path) -> State:
    """The state of the random number generators in a checkpoint. Raises ValueError if the file cannot be read."""
    return read_json(folder / RANDOM_STATE_FILE, DAMAGED)


@contextmanager
def from_checkpoint(folder: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Context manager that turns an error from a value of the wrong type or size, or of the further `kinds`, into a ValueError
    that calls the checkpoint damaged."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError, *kinds) as error:
        raise ValueError(f"{folder / STATE_FOLDER} cannot be used ({error!r}): the checkpoint is damaged.") from None
