"""Where an export comes from and where it goes: the source read whole, the destination free and roomy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lean_ft.export.whole import PROCESSOR_FILES
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder, load_model
from lean_ft.models.hf_format import WEIGHTS_INDEX, stored_dtype
from lean_ft.peft import MergeReport, is_adapter, load_merged
from lean_ft.peft.peft_format import CONFIG_FILE as ADAPTER_CONFIG
from lean_ft.peft.peft_format import WEIGHTS_FILE as ADAPTER_WEIGHTS
from lean_ft.system.units import gibibytes
from lean_ft.tokenizers import TEMPLATE_FOLDERS, TOKENIZER_FILES, Tokenizer, load_tokenizer
from lean_ft.training.checkpoint import MANIFEST, STATE_FOLDER, free_bytes
from lean_ft.training.finished_models import find_base, tokenizer_folder

# What an export may hold, and so what --force may replace; anything else in a folder is somebody's work.
_OF_A_MODEL = {"config.json", "generation_config.json", WEIGHTS_INDEX, *TOKENIZER_FILES, *PROCESSOR_FILES}
_OF_A_MODEL |= {ADAPTER_CONFIG, ADAPTER_WEIGHTS}


def read_source(
    folder: Path, merge: bool, base: str | Path | None = None, dtype: torch.dtype | None = None
) -> tuple[Decoder, Tokenizer | None, MergeReport | None]:
    """Reads the model in `folder`, or with `merge` the model `base` (None: the adapter's own) with the folder's adapter.

    Weights are in `dtype` (None: as the files have them). Raises ValueError where an adapter is given for a model, or
    the other way round, and for weights that are not finite.
    """
    if is_adapter(folder) and not merge:
        raise ValueError(
            f"{folder} holds an adapter, which is no model by itself. Export it with the model that it is of: --merge. "
            "Or alone, for what reads PEFT's format: --adapter."
        )
    if merge and not is_adapter(folder):
        raise ValueError(f"{folder} holds a whole model, and no adapter to merge: leave out --merge.")
    model_folder = resolve_model_path(base or find_base(folder)) if merge else folder
    dtype = dtype or stored_dtype(model_folder)
    with_tokenizer = tokenizer_folder(folder, model_folder)
    tokenizer = load_tokenizer(with_tokenizer) if with_tokenizer else None
    if merge:
        model, merged = load_merged(folder, model_folder, dtype=dtype)
        if model.config.scores and tokenizer is not None:  # transformers finds a text's end by it
            model.source.config["pad_token_id"] = tokenizer.pad_id
    else:
        model, merged = load_model(folder, dtype=dtype, scores=None), None
    _check_finite(model, folder)
    return model, tokenizer, merged


def files_of_model(folder: Path) -> Iterator[Path]:
    """What of a checkpoint is the model or the adapter, and not for going on with its run."""
    for file in sorted(folder.rglob("*")):
        place = file.relative_to(folder)
        is_of_the_run = place.parts[0] == STATE_FOLDER or place.name == MANIFEST
        if file.is_file() and not is_of_the_run and not any(part.startswith(".") for part in place.parts):
            yield file


def _check_finite(model: Decoder, folder: Path) -> None:
    """Raises ValueError where a weight is not finite, as after a cast to float16 of one above 65,504."""
    for name, parameter in model.named_parameters():
        lowest, highest = torch.aminmax(parameter.detach())
        if not (lowest.isfinite() and highest.isfinite()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{folder}: {name} has a value that {dtype} cannot hold (its largest is "
                f"{torch.finfo(parameter.dtype).max:g}), or that is not finite in the source. Export it as bfloat16 or "
                "float32; where that fails too, the source is broken."
            )


def check_destination(destination: Path, source: Path, force: bool) -> None:
    """Raises ValueError unless an export may take the place of `destination`.

    What is there gives way to `force` alone, and only where it is itself a model's folder or a .gguf file.
    """
    there, model = destination.resolve(), source.resolve()
    if there == model or there in model.parents or model in there.parents:
        raise ValueError(f"{destination} and the model's folder {source} lie within one another; name another place.")
    if destination.is_dir():
        if not any(destination.iterdir()):
            return
        foreign = [entry.name for entry in destination.iterdir() if not _is_of_a_model(entry)]
        if foreign:
            raise ValueError(
                f"{destination} holds what is no exported model's ({', '.join(sorted(foreign)[:3])}), so nothing is "
                "written there, --force or not. Name a new folder."
            )
    elif destination.exists() and destination.suffix != ".gguf":
        raise ValueError(f"{destination} is a file; expected the name of a new folder.")
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists. Name another place, or overwrite it with --force.")


def _is_of_a_model(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name in TEMPLATE_FOLDERS
    if entry.name == ".metadata" or entry.suffix == ".distcp":  # PyTorch's distributed checkpoints
        return True
    return entry.name in _OF_A_MODEL or (entry.suffix == ".safetensors" and entry.name.startswith("model"))


@contextmanager
def room_for(needed_bytes: int, destination: Path) -> Iterator[None]:
    """Raises OSError in one sentence where the disk has too little room, before or while the block writes."""
    free = free_bytes(destination.parent)
    if free < needed_bytes:
        raise OSError(
            f"the export needs {gibibytes(needed_bytes)}, and {destination.parent} has {gibibytes(free)} free. Nothing "
            "was written. Free some space, or name a place on another disk."
        )
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk of {destination.parent} filled up during the export, which needs {gibibytes(needed_bytes)}. "
            f"What was written is removed. Free some space, or name a place on another disk."
        ) from None
