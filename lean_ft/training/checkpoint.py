"""A checkpoint: a complete Hugging Face folder, plus the state that resumes the run exactly.

    step_00000100/
      config.json, *.safetensors, tokenizer files     a Hugging Face folder; with an adapter, a PEFT adapter folder
      training_state/optimizer.safetensors            the optimizer's tensors
      training_state/beside.safetensors               weights of a module that trains besides the model, if any
      training_state/training_state.json              step, settings, data position, loss scale
      training_state/random_state.json                state of every random number generator
      manifest.json                                   size and sha256 of every file above, and its own

A folder `step_*` is always whole (see `lean_ft.system.whole_files`). Nothing in it is pickled.
"""

import hashlib
import json
import random
import re
import shutil
from collections import UserDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lean_ft.models import parts_on_disk, save_model
from lean_ft.models.safetensors_file import StoredTensor, read_header, read_same, write_file
from lean_ft.optim import Optimizer
from lean_ft.peft import adapter_bytes, adapter_parts, has_adapter, restore_adapter, save_adapter
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Part, Ranks, part_of, whole_numel
from lean_ft.system.units import gibibytes
from lean_ft.system.whole_files import read_json, sync, write_whole
from lean_ft.tokenizers import Tokenizer

MANIFEST = "manifest.json"
STATE_FOLDER = "training_state"
OPTIMIZER_FILE = f"{STATE_FOLDER}/optimizer.safetensors"
BESIDE_FILE = f"{STATE_FOLDER}/beside.safetensors"
TRAINING_STATE_FILE = f"{STATE_FOLDER}/training_state.json"
RANDOM_STATE_FILE = f"{STATE_FOLDER}/random_state.json"

NAME = re.compile(r"step_(\d{8,})")
SMALL_FILES_BYTES = 2 * 2**20  # allowance for JSON, headers and the records of the file system

State = dict[str, Any]
RandomState = dict[str, Any]


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


def small_files_bytes(tokenizer: Tokenizer | None) -> int:
    """Size of a tokenizer's files, plus an allowance for the other small files of a checkpoint."""
    return SMALL_FILES_BYTES + sum(file.stat().st_size for file in (tokenizer.files if tokenizer is not None else ()))


def checkpoint_bytes(model: nn.Module, optimizer_state_bytes: int, tokenizer: Tokenizer | None) -> int:
    """Upper bound of the size of a checkpoint on the disk, in bytes."""
    if has_adapter(model):
        weights = adapter_bytes(model)
    else:
        weights = sum(whole_numel(p) * p.element_size() for p in model.parameters())
    return weights + optimizer_state_bytes + small_files_bytes(tokenizer)


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def write_checkpoint(
    directory: Path,
    step: int,
    *,
    model: nn.Module,
    tokenizer: Tokenizer,
    optimizer_state: Mapping[str, Part],
    training_state: State,
    random_state: RandomState,
    weights: Mapping[str, Part] | None = None,
    beside: Mapping[str, Part] | None = None,
    ranks: Ranks = ALONE,
) -> Path:
    """Write `directory/step_...` whole or not at all, replacing one of the same step, and return it.

    All `ranks` call it. Each writes its part of the tensors, and rank 0 writes the other files. `weights` may be copies of the
    parts from `weight_parts`; `beside` are the weights of a module that trains besides the model. Raises OSError on every rank
    if the disk has too little room (nothing is written then) or a file cannot be written.
    """
    final = directory / f"step_{step:08d}"
    with ExitStack() as whole_or_not:

        def begin() -> Path:
            needed = checkpoint_bytes(model, whole_bytes(optimizer_state) + whole_bytes(beside or {}), tokenizer)
            free = free_bytes(directory)
            if free < needed:
                raise OSError(
                    f"it needs {gibibytes(needed)}, and {directory} has {gibibytes(free)} free. Nothing was written."
                )
            folder = whole_or_not.enter_context(write_whole(final, on_disk=True))
            (folder / STATE_FOLDER).mkdir(parents=True)
            return folder

        def finish() -> None:
            tokenizer.save(folder)
            write_json(folder / TRAINING_STATE_FILE, training_state)
            write_json(folder / RANDOM_STATE_FILE, random_state)
            write_json(folder / MANIFEST, _manifest(folder, step))
            whole_or_not.close()

        folder = ranks.on_rank_zero(begin)
        save = save_adapter if has_adapter(model) else save_model
        save(model, folder, ranks=ranks, weights=weights)  # pyright: ignore[reportArgumentType]
        write_file(folder / OPTIMIZER_FILE, optimizer_state, {}, ranks)
        if beside:
            write_file(folder / BESIDE_FILE, beside, {}, ranks)
        ranks.on_rank_zero(finish)
    return final


def weight_parts(model: nn.Module) -> dict[str, Part]:
    """This rank's part of each weight that a checkpoint holds, by name."""
    return adapter_parts(model) if has_adapter(model) else parts_on_disk(model)


def whole_bytes(parts: Mapping[str, Part]) -> int:
    """The size of these tensors over all ranks, each counted once."""
    return sum(part.whole_bytes for part in parts.values())


def write_json(path: Path, value: Any) -> None:
    """Write `value` whole or not at all, and sync it to the disk."""
    with write_whole(path, on_disk=True) as temporary:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def _manifest(folder: Path, step: int) -> State:
    """Sync all files to the disk, and return their sizes and checksums. Two threads, because both wait outside Python."""

    def sync_and_sum(path: Path) -> State:
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": _sha256(path)}

    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(max_workers=2) as pool:
        entries = pool.map(sync_and_sum, paths)
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = dict(zip(names, entries, strict=True))
    return {"format": 1, "step": step, "files": files, "sha256": _manifest_digest(step, files)}


def _manifest_digest(step: Any, files: Any) -> str:
    """A checksum of the manifest's own content, to distinguish a damaged manifest from a damaged file."""
    return hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_whole(directory: Path, remark: str, checksum_up_to_bytes: int | None = None) -> Path | None:
    """The newest checkpoint in `directory` that passes `check_whole`; None if there are no checkpoints.

    Damaged checkpoints are skipped. With a `remark`, a log line names the damage. Raises ValueError if all are damaged.
    """
    problem = ""
    for folder in reversed(list_checkpoints(directory)):
        try:
            check_whole(folder, checksum_up_to_bytes)
        except ValueError as error:
            problem = str(error)
            if remark:
                say("damaged", f"{problem} {remark}")
            continue
        return folder
    if problem:
        raise ValueError(f"No whole checkpoint is left in {directory}: {problem}")
    return None


def check_whole(folder: Path, checksum_up_to_bytes: int | None = None) -> None:
    """Raise ValueError, naming the file, unless every file in the folder's manifest is there and unchanged.

    Of files larger than `checksum_up_to_bytes` only the size is checked (None: all checksums).
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
        summed = checksum_up_to_bytes is None or expected["bytes"] <= checksum_up_to_bytes
        if summed and _sha256(path) != expected["sha256"]:
            raise ValueError(f"{path} does not match its checksum in {MANIFEST}: it was changed or is damaged.")


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
        right = right and manifest["sha256"] == _manifest_digest(manifest["step"], files)
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
    state = _read_state(path)
    expected = {"step": int, "total_steps": int, "recipe": str, "settings": dict, "data_fingerprint": str}
    for name, kind in expected.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"{path} cannot be used: expected the field {name}, of type {kind.__name__}.")
    if not {"batches", "scaler"} <= state.keys() or type(state.get("bad_steps", 0)) is not int:
        raise ValueError(
            f"{path} cannot be used: it lacks the position in the data, the loss scale or the number of bad steps."
        )
    return state


@contextmanager
def from_checkpoint(folder: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Context manager that turns an error from a value of the wrong type or size, or of the further `kinds`, into a ValueError
    that calls the checkpoint damaged."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError, *kinds) as error:
        raise ValueError(f"{folder / STATE_FOLDER} cannot be used ({error!r}): the checkpoint is damaged.") from None


def read_random_state(folder: Path) -> RandomState:
    """The random state of a checkpoint. Raises ValueError if the file cannot be read."""
    return _read_state(folder / RANDOM_STATE_FILE)


def _read_state(path: Path) -> State:
    return read_json(path, "the checkpoint is damaged.")


def restore_weights(folder: Path, model: nn.Module) -> None:
    """Read the checkpoint's weights into the live parameters of `model`, bit for bit and without a second copy.

    With an adapter, read the adapter alone: the base weights never change. Raises ValueError if the tensors differ from the
    model's in name, shape or dtype.
    """
    if has_adapter(model):
        restore_adapter(folder, model)  # pyright: ignore[reportArgumentType]
        return
    stored: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= read_header(path)
    read_same(stored, parts_on_disk(model), folder, what="model", begun_with="the model and the model.dtype")


def trained_parts(module: nn.Module | None) -> dict[str, Part]:
    """This rank's part of a module's trained parameters, by name; empty for None."""
    named = [] if module is None else module.named_parameters()
    return {name: part_of(parameter) for name, parameter in named if parameter.requires_grad}


def restore_beside(folder: Path, module: nn.Module) -> None:
    """Read the weights of a module that trains besides the model. Raises ValueError as `restore_weights`."""
    stored = read_header(folder / BESIDE_FILE) if (folder / BESIDE_FILE).is_file() else {}
    own, begun_with = trained_parts(module), "the models and the model.dtype"
    read_same(stored, own, folder, what="model beside it", begun_with=begun_with)


def restore_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Load the optimizer's saved tensors, each read from the disk when the optimizer asks for it.

    Raises ValueError, before memory is taken, if a tensor's shape or dtype differs from the optimizer's.
    """
    stored, parts = read_header(folder / OPTIMIZER_FILE), optimizer.state_parts()
    for name, own in parts.items():
        entry = stored.get(name)
        if entry is not None and (entry.shape, entry.dtype) != (tuple(own.shape), own.dtype):
            raise ValueError(
                f"{folder / OPTIMIZER_FILE}: {name} is {entry.dtype_name} of shape {list(entry.shape)}, but the "
                f"optimizer has {own.dtype} of shape {list(own.shape)}. Resume with the model, dtype and optimizer settings "
                f"of the run that saved it."
            )
    optimizer.load_state_dict(_TensorsOnDisk(stored, parts))


class _TensorsOnDisk(UserDict[str, Any]):
    """Tensors of a safetensors file by name. Each access reads the tensor, or this rank's part of it, into new memory."""

    def __init__(self, stored: Mapping[str, StoredTensor], parts: Mapping[str, Part]) -> None:
        super().__init__(stored)
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        own = self._parts.get(name)
        if own is None or tuple(own.values.shape) == own.shape:
            return self.data[name].read()
        part = replace(own, values=torch.empty(own.values.shape, dtype=own.dtype))
        self.data[name].read_part(part)
        return part.values


def capture_random_state(device: torch.device) -> RandomState:
    """The states of Python's, numpy's (global), torch's and the device's random number generators, as JSON values."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    state: RandomState = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(key).tolist(), int(position), int(has_gauss), float(cached_gaussian)],
        "torch": _to_hex(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _to_hex(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        state["mps"] = _to_hex(torch.mps.get_rng_state())
    return state


def restore_random_state(state: RandomState, device: torch.device) -> None:
    """Restore the generators that are in `state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_from_hex(state["cuda"]), device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(_from_hex(state["mps"]))


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
