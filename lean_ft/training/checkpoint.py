"""Write a checkpoint, and read it back: the weights, and the state that resumes the run exactly.

`lean_ft.system.run_directory` has the folder's layout. Nothing in it is pickled.
"""

import shutil
from collections import UserDict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder, check_parameters, parts_on_disk, save_model
from lean_ft.models.dense import stored_dense
from lean_ft.models.drafting import drafting_bytes, is_drafting
from lean_ft.models.safetensors_file import StoredTensor, read_header, read_same, write_file
from lean_ft.models.source import source_of
from lean_ft.optim import Optimizer
from lean_ft.peft import adapter_bytes, adapter_parts, check_trained, has_adapter, restore_adapter, save_adapter
from lean_ft.system.random_state import RandomState
from lean_ft.system.run_directory import (
    BESIDE_FILE,
    OPTIMIZER_FILE,
    RANDOM_STATE_FILE,
    STATE_FOLDER,
    TRAINING_STATE_FILE,
    State,
    write_manifest,
)
from lean_ft.system.shards import ALONE, Part, Ranks, part_of, whole_numel
from lean_ft.system.units import gibibytes
from lean_ft.system.whole_files import write_json, write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.view import save_view

SMALL_FILES_BYTES = 2 * 2**20  # allowance for JSON, headers and the records of the file system


def small_files_bytes(tokenizer: Tokenizer | None) -> int:
    """Size of a tokenizer's files, plus an allowance for the other small files of a checkpoint."""
    return SMALL_FILES_BYTES + sum(file.stat().st_size for file in (tokenizer.files if tokenizer is not None else ()))


def checkpoint_bytes(model: nn.Module, optimizer_state_bytes: int, tokenizer: Tokenizer | None) -> int:
    """Upper bound of the size of a checkpoint on the disk, in bytes."""
    if has_adapter(model):
        weights = adapter_bytes(model)
    else:
        weights = sum(whole_numel(p) * p.element_size() for p in model.parameters()) + drafting_bytes(source_of(model))
    return weights + optimizer_state_bytes + small_files_bytes(tokenizer)


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


class CheckpointState(NamedTuple):
    """What a checkpoint holds besides the model's files."""

    training: State
    random: RandomState
    optimizer: Mapping[str, Part]
    beside: Mapping[str, Part] | None = None
    """Weights of a module that trains besides the model."""
    weights: Mapping[str, Part] | None = None
    """Copies of the parts from `weight_parts`; None: the model's own."""


def write_checkpoint(
    directory: Path, step: int, model: nn.Module, tokenizer: Tokenizer, state: CheckpointState, ranks: Ranks = ALONE
) -> Path:
    """Write `directory/step_...` whole or not at all, replacing one of the same step, and return it.

    All `ranks` call it. Each writes its part of the tensors, and rank 0 writes the other files. Raises OSError on every
    rank if the disk has too little room (nothing is written then) or a file cannot be written.
    """
    final = directory / f"step_{step:08d}"
    with ExitStack() as whole_or_not:

        def begin() -> Path:
            needed = checkpoint_bytes(model, whole_bytes(state.optimizer) + whole_bytes(state.beside or {}), tokenizer)
            free = free_bytes(directory)
            if free < needed:
                raise OSError(
                    f"it needs {gibibytes(needed)}, and {directory} has {gibibytes(free)} free. Nothing was written."
                )
            folder = whole_or_not.enter_context(write_whole(final, on_disk=True))
            (folder / STATE_FOLDER).mkdir(parents=True)
            return folder

        def finish() -> None:
            save_view(folder, tokenizer, state.training.get("settings", {}))
            write_json(folder / TRAINING_STATE_FILE, state.training, indent=1, on_disk=True)
            write_json(folder / RANDOM_STATE_FILE, state.random, indent=1, on_disk=True)
            write_manifest(folder, step)
            whole_or_not.close()

        folder = ranks.on_rank_zero(begin)
        save = save_adapter if has_adapter(model) else save_model
        save(model, folder, ranks=ranks, weights=state.weights)  # pyright: ignore[reportArgumentType]
        write_file(folder / OPTIMIZER_FILE, state.optimizer, {}, ranks)
        if state.beside:
            write_file(folder / BESIDE_FILE, state.beside, {}, ranks)
        ranks.on_rank_zero(finish)
    return final


def check_can_save(model: nn.Module) -> None:
    """Raise ValueError if checkpoints cannot hold the model's parameters."""
    if has_adapter(model):
        check_trained(model)
    elif isinstance(model, Decoder):
        check_parameters(model)


def weight_parts(model: nn.Module) -> dict[str, Part]:
    """This rank's part of each weight that a checkpoint holds, by name."""
    return adapter_parts(model) if has_adapter(model) else parts_on_disk(model)


def whole_bytes(parts: Mapping[str, Part]) -> int:
    """The size of these tensors over all ranks, each counted once."""
    return sum(part.whole_bytes for part in parts.values())


def restore_weights(folder: Path, model: nn.Module) -> None:
    """Read the checkpoint's weights into the live parameters of `model`, bit for bit and without a second copy.

    With an adapter, read the adapter alone: the base weights never change. Raises ValueError if the tensors differ from
    the model's in name, shape or dtype.
    """
    if has_adapter(model):
        restore_adapter(folder, model)  # pyright: ignore[reportArgumentType]
        return
    stored: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= read_header(path)
    if isinstance(model, Decoder):
        stored = {name: tensor for name, tensor in stored.items() if not is_drafting(name, model.source.config)}
        stored |= stored_dense(folder, model.config.dense)
    if isinstance(model, Decoder) and model.vision is not None:  # the folder has the multimodal model's names
        names = [
            (name, model_name)
            for name, model_name in model.source.names.items()
            if model_name is not None and name in stored
        ]
        stored = {
            model_name: stored[name].transposed if model.source.stacks.get(model_name) else stored[name]
            for name, model_name in names
        }
    read_same(stored, parts_on_disk(model), folder, what="model", begun_with="the model and the model.dtype")


def trained_parts(module: nn.Module | None) -> dict[str, Part]:
    """This rank's part of a module's trained parameters, by name; empty for None."""
    named = [] if module is None else module.named_parameters()
    return {name: part_of(parameter) for name, parameter in named if parameter.requires_grad}


def restore_beside(folder: Path, module: nn.Module) -> None:
    """Read the weights of a module that trains besides the model. Raises ValueError as `restore_weights`."""
    stored = read_header(folder / BESIDE_FILE) if (folder / BESIDE_FILE).is_file() else {}
    parts, begun_with = trained_parts(module), "the models and the model.dtype"
    read_same(stored, parts, folder, what="model beside it", begun_with=begun_with)


def restore_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Load the optimizer's saved tensors, each read from the disk when the optimizer asks for it.

    Raises ValueError, before memory is taken, if a tensor's shape or dtype differs from the optimizer's.
    """
    stored, parts = read_header(folder / OPTIMIZER_FILE), optimizer.state_parts()
    for name, part in parts.items():
        entry = stored.get(name)
        if entry is not None and (entry.shape, entry.dtype) != (tuple(part.shape), part.dtype):
            raise ValueError(
                f"{folder / OPTIMIZER_FILE}: {name} is {entry.dtype_name} of shape {list(entry.shape)}, but the "
                f"optimizer has {part.dtype} of shape {list(part.shape)}. Resume with the model, dtype and optimizer "
                "settings of the run that saved it."
            )
    optimizer.load_state_dict(_TensorsOnDisk(stored, parts))


class _TensorsOnDisk(UserDict[str, Any]):
    """Tensors of a safetensors file by name. Each access reads the tensor, or this rank's part of it, into new
    memory."""

    def __init__(self, stored: Mapping[str, StoredTensor], parts: Mapping[str, Part]) -> None:
        super().__init__(stored)
        self._parts = parts

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None or tuple(part.values.shape) == part.shape:
            return self.data[name].read()
        new = replace(part, values=torch.empty(part.values.shape, dtype=part.dtype))
        self.data[name].read_part(new)
        return new.values
