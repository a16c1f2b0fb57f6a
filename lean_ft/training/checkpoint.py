"""A checkpoint: a complete Hugging Face folder, plus what it takes to go on exactly where it was written.

    step_00000100/
      config.json, *.safetensors, tokenizer files     anything that reads Hugging Face folders reads this; of a model
                                                      with an adapter the adapter alone, which PEFT reads
      training_state/optimizer.safetensors            the optimizer's tensors
      training_state/beside.safetensors               weights that train beside the model, where there are such
      training_state/training_state.json              step, settings, data position, loss scale
      training_state/random_state.json                every random number generator
      manifest.json                                   size and sha256 of every file above, and its own

A name `step_*` never stands for half of one (see `lean_ft.system.whole_files`). Nothing in it is pickled.
"""

import hashlib
import json
import re
import shutil
from collections import UserDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

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
from lean_ft.training.random_state import RandomState

MANIFEST = "manifest.json"
STATE_FOLDER = "training_state"
OPTIMIZER_FILE = f"{STATE_FOLDER}/optimizer.safetensors"
BESIDE_FILE = f"{STATE_FOLDER}/beside.safetensors"
TRAINING_STATE_FILE = f"{STATE_FOLDER}/training_state.json"
RANDOM_STATE_FILE = f"{STATE_FOLDER}/random_state.json"

NAME = re.compile(r"step_(\d{8,})")
SMALL_FILES_BYTES = 2 * 2**20  # allowance for JSON, headers and the records of the file system

State = dict[str, Any]


def checkpoint_step(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def list_checkpoints(directory: Path) -> list[Path]:
    """The folders in `directory` that are named as checkpoints, by step."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if p.is_dir() and NAME.fullmatch(p.name)), key=checkpoint_step)


def small_files_bytes(tokenizer: Tokenizer | None) -> int:
    """Size of a tokenizer's files, with an allowance for the other small files of a checkpoint."""
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
    """Write `directory/step_...` whole or not at all, and return it. One of the same step is replaced.

    All `ranks` call it, and each writes what it has of the tensors; the rest is rank 0's to write. `weights` may be copies
    of what `weight_parts` gives; `beside` are weights that train and are none of the model's. Raises OSError, on every rank, where the disk has too little room, before anything is
    written, and where something cannot be written.
    """
    final = directory / f"step_{step:08d}"
    with ExitStack() as whole_or_not:

        def begin() -> Path:
            needed = checkpoint_bytes(model, whole_bytes(optimizer_state) + whole_bytes(beside or {}), tokenizer)
            free = free_bytes(directory)
            if free < needed:
                raise OSError(
                    f"the checkpoint of step {step} needs {gibibytes(needed)}, and {directory} has {gibibytes(free)} "
                    f"free. Nothing was written."
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
    """What a checkpoint of the model holds of weights, by name, and what of that is here."""
    return adapter_parts(model) if has_adapter(model) else parts_on_disk(model)


def whole_bytes(parts: Mapping[str, Part]) -> int:
    """What all ranks together have of these tensors, each once."""
    return sum(part.whole_bytes for part in parts.values())


def write_json(path: Path, value: Any) -> None:
    """Write `value` whole or not at all, and see it onto the disk."""
    with write_whole(path, on_disk=True) as temporary:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def _manifest(folder: Path, step: int) -> State:
    """Sizes and checksums of all files, each seen onto the disk; two at a time, as both wait outside Python."""

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
    """A checksum of the manifest's own content, so that damage to it is told from damage to a file."""
    return hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_whole(directory: Path, remark: str, checksum_up_to_bytes: int | None = None) -> Path | None:
    """The newest checkpoint in `directory` that is whole, as `check_whole` says; None where there are none.

    Damaged ones are passed over, each with a line on what is wrong with it and the `remark`, if there is one. Raises
    ValueError if that leaves none.
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

    Of files larger than `checksum_up_to_bytes`, if given, only the size is checked.
    """
    for name, expected in _read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: the checkpoint is damaged.")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes where {MANIFEST} tells of {expected['bytes']}: "
                f"the checkpoint is damaged."
            )
        summed = checksum_up_to_bytes is None or expected["bytes"] <= checksum_up_to_bytes
        if summed and _sha256(path) != expected["sha256"]:
            raise ValueError(f"{path} does not match its checksum in {MANIFEST}: it was changed or is damaged.")


def _read_manifest(folder: Path) -> dict[str, State]:
    """The manifest's entries by file name; ValueError unless it is one, of this folder, with names inside of it."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} is missing: {folder} is not a checkpoint, or not a whole one.")
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
    """Step, settings and position of a checkpoint. Raises ValueError where the file is not what is written there."""
    path = folder / TRAINING_STATE_FILE
    state = _read_state(path)
    expected = {"step": int, "total_steps": int, "recipe": str, "settings": dict, "data_fingerprint": str}
    for name, kind in expected.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"{path} cannot be used: expected {name}, of type {kind.__name__}, in it.")
    if not {"batches", "scaler"} <= state.keys() or type(state.get("bad_steps", 0)) is not int:
        raise ValueError(
            f"{path} cannot be used: it lacks the position in the data, the loss scale or the number of bad steps."
        )
    return state


@contextmanager
def from_checkpoint(folder: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Inside, what fails because a value of the checkpoint's state has the wrong type or size is a ValueError that says so;
    so are errors of these further kinds."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError, *kinds) as error:
        raise ValueError(f"{folder / STATE_FOLDER} cannot be used ({error!r}): the checkpoint is damaged.") from None


def read_random_state(folder: Path) -> RandomState:
    """The random number generators of a checkpoint. Raises ValueError where the file cannot be read."""
    return _read_state(folder / RANDOM_STATE_FILE)


def _read_state(path: Path) -> State:
    return read_json(path, "the checkpoint is damaged.")


def restore_weights(folder: Path, model: nn.Module) -> None:
    """Read the checkpoint's weights into the live parameters of `model`, bit for bit and without a second copy.

    Of a model with an adapter that is the adapter: the weights beside it never changed. Raises ValueError where the
    checkpoint's tensors are not the model's, by name, shape or type.
    """
    if has_adapter(model):
        restore_adapter(folder, model)  # pyright: ignore[reportArgumentType]
        return
    stored: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= read_header(path)
    read_same(stored, parts_on_disk(model), folder, what="model", begun_with="the model and the model.dtype")


def trained_parts(module: nn.Module | None) -> dict[str, Part]:
    """The parameters of a module that train, by name; none where there is no module."""
    named = [] if module is None else module.named_parameters()
    return {name: part_of(parameter) for name, parameter in named if parameter.requires_grad}


def restore_beside(folder: Path, module: nn.Module) -> None:
    """Read what trained beside the model into the live parameters of `module`. Raises ValueError as `restore_weights` does."""
    stored = read_header(folder / BESIDE_FILE) if (folder / BESIDE_FILE).is_file() else {}
    own, begun_with = trained_parts(module), "the models and the model.dtype"
    read_same(stored, own, folder, what="model beside it", begun_with=begun_with)


def restore_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Hand the optimizer its saved tensors, as a mapping that reads each from the disk when it is asked for.

    Raises ValueError where a tensor's shape or type is not that of the optimizer's own, before it takes memory.
    """
    stored, parts = read_header(folder / OPTIMIZER_FILE), optimizer.state_parts()
    for name, own in parts.items():
        entry = stored.get(name)
        if entry is not None and (entry.shape, entry.dtype) != (tuple(own.shape), own.dtype):
            raise ValueError(
                f"{folder / OPTIMIZER_FILE}: {name} is {entry.dtype_name} of shape {list(entry.shape)}, and the "
                f"optimizer keeps {own.dtype} of shape {list(own.shape)}. Resume with the model, dtype and optimizer "
                f"settings of the run that saved it."
            )
    optimizer.load_state_dict(_TensorsOnDisk(stored, parts))


class _TensorsOnDisk(UserDict[str, Any]):
    """Tensors of a safetensors file by name, each read into memory of its own whenever it is asked for: all of it, or the
    part that the optimizer has here."""

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
