"""Export a checkpoint as a plain Hugging Face folder, for transformers, vLLM and llama.cpp's converter.

    config.json, generation_config.json, model*.safetensors [+ index], tokenizer files, chat template

The folder is written under a temporary name, read back, and its logits are compared with the source's; then it is
renamed.
Only one model is in memory at a time: the source is freed before the copy is read.
"""

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from lean_ft.export.places import (
    Exported,
    check_destination,
    files_of_model,
    read_source,
    room_for,
    settings_of_run,
)
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder, load_model, save_model, stored_labels
from lean_ft.models.drafting import drafting_remark
from lean_ft.models.families.multimodal import not_multimodal
from lean_ft.models.load_options import keywords_of_run, torch_dtype
from lean_ft.models.source import Source
from lean_ft.peft import is_adapter
from lean_ft.peft.finished_models import find_finished
from lean_ft.peft.stored_adapter import read_adapter
from lean_ft.system.passes import evaluating
from lean_ft.system.run_directory import TRAINING_STATE_FILE, read_training_state
from lean_ft.system.units import parse_bytes
from lean_ft.system.whole_files import write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.checkpoint import checkpoint_bytes
from lean_ft.training.view import save_view

_NUM_POSITIONS = 32  # tokens of the input for the comparison
# Weights and arithmetic are equal on both sides; only the order of sums may differ, depending on memory alignment.
_TOLERANCE_ROUNDINGS = 4


def export_folder(
    source: str | Path,
    destination: str | Path,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    force: bool = False,
    merge: bool = False,
    base: str | Path | None = None,
    keep_vision: bool = False,
) -> Exported:
    """Write the model of a checkpoint, run directory or model folder to the new folder `destination`.

    `merge`: the source is an adapter; write the model `base` (default: the one that the adapter names) with the adapter
    merged into its weights. `keep_vision`: the source is the language model of a multimodal model; write the whole
    model, which is `base` or the folder that the run started from, with these weights.

    Weights are in `dtype` (bfloat16, float16 or float32; default: as stored), in files of at most `max_shard_size`.
    Needs memory for one model in `dtype`. Raises ValueError if the source is missing or damaged, the destination
    exists, or a weight is too large for the dtype; OSError if the disk is full; RuntimeError if the copy computes other
    logits. After an error, nothing is left behind.
    """
    max_shard_bytes = parse_bytes(max_shard_size, "--max-shard-size")
    wanted_dtype = None if dtype is None else torch_dtype(dtype)
    folder, destination = find_finished(source), Path(destination).expanduser()
    check_destination(destination, folder, force)
    model, tokenizer, merged = read_source(folder, merge, base, wanted_dtype, with_tower=True)
    keep_vision = keep_vision and model.vision is None  # a run with a tower has the whole model
    if keep_vision and merge and (outside := read_adapter(folder).without_tower().outside):
        raise ValueError(f"{folder}: --keep-vision would lose the adapter's {outside[0]}. Merge the adapter with PEFT.")
    if keep_vision:
        model.source = _source_of_whole(model, folder, base)
    wanted = model.dtype
    expected, what = _logits(model), "logits" if model.config.has_output else "hidden states"
    if not expected.isfinite().all():
        raise ValueError(
            f"the {what} of {folder} are not finite in {wanted}. The model is broken, or its activations are too large "
            "for this dtype: export it as bfloat16 or float32."
        )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    needed_bytes, whole = checkpoint_bytes(model, 0, tokenizer), model.source.folder if keep_vision else None
    if whole is not None:
        needed_bytes += sum(file.stat().st_size for file in whole.glob("model*.safetensors"))
    num_kept = sum(own is None for own in model.source.names.values())
    drafting = "" if keep_vision else drafting_remark(model.source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination) as temporary:
        with room_for(needed_bytes, destination):
            save_model(model, temporary, max_shard_bytes, whole=keep_vision)
            if tokenizer is not None:
                save_view(temporary, tokenizer, settings_of_run(folder))
        del model
        gc.collect()
        saved = load_model(
            temporary, dtype=wanted, scores=stored_labels(temporary), **keywords_of_run(settings_of_run(folder))
        )
        difference = _compare(expected, _logits(saved), wanted)
    kept = f"{num_kept} unchanged tensors of {whole}" if keep_vision else ""
    parts = _contents(destination, num_parameters, wanted, tokenizer), kept, drafting
    read_back = f"Read back: its {what} equal the source's (largest difference {difference:g})."
    return Exported(folder, destination, f"{', '.join(filter(None, parts))}.\n{read_back}", merged)


def _contents(folder: Path, num_parameters: int, dtype: torch.dtype, tokenizer: Tokenizer | None) -> str:
    """What an exported folder holds, in words."""
    num_files = len(list(folder.glob("*.safetensors")))
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    parts = [
        f"{num_parameters:,} parameters in {str(dtype).removeprefix('torch.')}",
        f"{num_files} weight file{'s' if num_files > 1 else ''}",
        "NO tokenizer, since the source has none" if tokenizer is None else "a tokenizer",
        *([] if tokenizer is None or has_template else ["no chat template"]),
    ]
    return ", ".join(parts)


def merge(
    source: str | Path, destination: str | Path, dtype: str | None = None, force: bool = False, base: str | None = None
) -> Exported:
    """Merge an adapter (a run, a checkpoint or a folder) into its base model: `export_folder` with `merge=True`."""
    return export_folder(source, destination, dtype, force=force, merge=True, base=base)


def export_adapter(source: str | Path, destination: str | Path, force: bool = False) -> Path:
    """Copy the adapter of a run, a checkpoint or a folder, with its tokenizer, to the new folder `destination`.

    Returns the source folder. Raises ValueError if the source has no adapter or is damaged, or the destination exists;
    OSError if the disk is full. After an error, nothing is left behind.
    """
    folder, destination = find_finished(source), Path(destination).expanduser()
    if not is_adapter(folder):
        raise ValueError(f"{folder} has a whole model, not an adapter: leave out --adapter.")
    check_destination(destination, folder, force)
    read_adapter(folder)  # raises if it is damaged
    files = list(files_of_model(folder))
    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination) as temporary, room_for(sum(file.stat().st_size for file in files), destination):
        for file in files:
            copy = temporary / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return folder


def _source_of_whole(model: Decoder, folder: Path, base: str | Path | None) -> Source:
    """The source of the multimodal folder that the language model in `folder` was taken from: `base`, or the folder
    that its run started from.

    Raises ValueError if that is unknown, or if the model there is not multimodal.
    """
    if base is None and model.source.part_of:
        return model.source
    if base is None and (folder / TRAINING_STATE_FILE).is_file():
        base = read_training_state(folder)["settings"].get("model.path")
    if base is None:
        raise ValueError(f"{folder} does not name the model that it was taken from: give its folder with --base.")
    whole = resolve_model_path(base)
    source = load_model(whole, "meta", scores=stored_labels(whole)).source
    if not source.part_of:
        raise ValueError(
            f"{source.folder} {not_multimodal(source.config.get('model_type'))}: leave out --keep-vision, or give the "
            "folder that the language model was taken from with --base."
        )
    return replace(source, generation_config=model.source.generation_config, end_ids=model.source.end_ids)


@torch.inference_mode()
def _logits(model: Decoder) -> torch.Tensor:
    """Return logits (1, T, V) in float32, or hidden states without an output layer, for ids spread over the
    vocabulary, of which the first shows something to the vision tower, if the model has one."""
    num_positions = min(_NUM_POSITIONS, model.config.max_positions)
    ids = torch.arange(num_positions) * 7919 % model.config.vocab_size
    inputs = {} if model.vision is None else model.vision.shown_by_first_token(ids.device)
    with evaluating(model):
        return model(ids[None], return_hidden=not model.config.has_output, **inputs).float()


def _compare(expected: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype) -> float:
    difference = (logits - expected).abs().max().item()
    allowed = _TOLERANCE_ROUNDINGS * torch.finfo(dtype).eps * expected.abs().max().item()
    if not difference <= allowed:  # also for NaN
        raise RuntimeError(
            f"the exported model's logits differ from the source's by up to {difference:g}; rounding to {dtype} "
            f"explains at most {allowed:g}. Nothing was kept. Disk or memory may be failing."
        )
    return difference
