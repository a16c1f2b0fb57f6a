"""Merge the weights of model folders into a new Hugging Face folder, some MiB of each tensor at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lean_ft.export.places import check_destination, room_for, settings_of_run
from lean_ft.gguf.cache import gguf_file
from lean_ft.merging.alike import (
    MergeInput,
    check_distinct,
    check_same_computation,
    check_same_templates,
    check_same_tensors,
    check_same_tokens,
)
from lean_ft.merging.methods import BLOCK, Formula, Read, merged_values
from lean_ft.merging.report import MergeFacts, MergeResult, write_facts
from lean_ft.merging.settings import MergeSettings
from lean_ft.models import load_model, stored_labels
from lean_ft.models.beside import files_beside, write_beside
from lean_ft.models.load_options import torch_dtype
from lean_ft.models.safetensors_file import StoredTensor, write_file
from lean_ft.models.saving import split_into_files, without_values, write_index
from lean_ft.models.source import name_in_language_model
from lean_ft.models.stored_weights import CONFIG_PURPOSE, float32_names, stored_tensors, weights_fingerprint
from lean_ft.models.vision.loading import PROCESSOR_FILES
from lean_ft.peft import is_adapter
from lean_ft.peft.finished_models import find_finished, tokenizer_folder
from lean_ft.system.shards import Part
from lean_ft.system.units import parse_bytes
from lean_ft.system.whole_files import read_json, read_text, write_json, write_whole
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from lean_ft.tokenizers.template_files import write_templates
from lean_ft.training.view import save_view

_UNREAD = ".rotary_emb.inv_freq"  # ends the names of tensors that early Llama folders have, and that no one reads
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MergedTensor:
    """One tensor of the merged model, computed while it is read."""

    name: str
    stored: Sequence[StoredTensor]  # of each model
    base: StoredTensor | None
    formula: Formula
    keys: Sequence[str]  # of each model, for random masks

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored[0].shape

    @cached_property
    def _values(self) -> Read:
        reads = [_reader(tensor) for tensor in self.stored]
        base = None if self.base is None or not self.formula.method.has_task_vectors else _reader(self.base)
        numel = torch.Size(self.shape).numel()
        return merged_values(self.formula, self.name, reads, base, numel, self.keys)

    def read_part(self, part: Part) -> None:
        """Fill a part, in any floating dtype. Raises ValueError for a number that is not finite."""
        flat, ((start, length),) = part.values.view(-1), part.runs()
        for first in range(start, start + length, BLOCK):
            number = min(BLOCK, start + length - first)
            values = flat[first - start : first - start + number].copy_(self._values(first, number))
            if not values.isfinite().all():
                self._refuse(first, number, part.dtype)

    def _refuse(self, first: int, number: int, dtype: torch.dtype) -> None:
        for tensor in [*self.stored, *([self.base] if self.base else [])]:
            if not _reader(tensor)(first, number).isfinite().all():
                raise ValueError(f"{tensor.file}: {self.name} has a number that is not finite. The model is broken.")
        what = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"the merged {self.name} has a number that {what} cannot hold. Add --dtype bfloat16 or --dtype float32, or "
            "use smaller weights."
        )


def _reader(tensor: StoredTensor) -> Read:
    def read(first: int, number: int) -> Tensor:
        values = torch.empty(number, dtype=torch.float32)
        tensor.read_part(Part(values, tensor.shape, first))
        return values

    return read


@dataclass(frozen=True)
class _CopiedTensor:
    """A tensor of whole numbers, which is the same in all models."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read_part(self, part: Part) -> None:
        self.stored.read_part(part)


def merge_folders(
    models: Sequence[str | Path], output: Path, formula: Formula, settings: MergeSettings, force: bool
) -> MergeResult:
    """Write the merged model of the folders, as `merge_models` describes."""
    if settings.rank is not None:
        raise ValueError("--rank is only used for adapters, and these are whole models. Remove it.")
    if settings.base is not None and not formula.method.has_task_vectors:
        raise ValueError(f"--base is not used with --method {formula.name}. Remove it, or choose ties or dare.")
    max_shard_bytes = parse_bytes(settings.max_shard_size or "5GB", "--max-shard-size")
    dtype = None if settings.dtype is None else torch_dtype(settings.dtype)
    inputs = [open_input(model) for model in models]
    for one in inputs:
        check_destination(output, one.folder, force)
    base = None
    if formula.method.has_task_vectors:
        if settings.base is None:
            raise ValueError(
                f"--method {formula.name} needs --base: the model that the others were trained from. It merges the "
                "differences from this model."
            )
        base = open_input(settings.base)
        check_destination(output, base.folder, force)
    tokenizer = _check_alike(inputs, base, settings)
    if tokenizer is None and settings.chat_template is not None:
        raise ValueError(f"--chat-template {settings.chat_template}: no model has a tokenizer. Remove it.")
    merged = _tensors(inputs, base, formula)
    always_float32 = float32_names(inputs[0].folder)
    parts = {
        name: without_values(tensor.shape, _dtype_of(tensor, None if name.endswith(always_float32) else dtype))
        for name, tensor in merged.items()
    }
    needed_bytes = sum(part.whole_bytes for part in parts.values())
    facts = MergeFacts(formula, [*map(str, inputs)], None if base is None else str(base))
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(output) as temporary, room_for(needed_bytes, output):
        temporary.mkdir()
        split = split_into_files(parts, max_shard_bytes)
        for file, names in split.filename_to_tensors.items():
            write_file(temporary / file, {name: parts[name] for name in names}, {"format": "pt"}, copied=merged)
        write_index(temporary, split)
        _write_other_files(temporary, inputs[0], tokenizer, dtype)
        if settings.chat_template is not None:
            set_template(temporary, settings.chat_template)
        load_model(temporary, "meta", scores=stored_labels(temporary))  # raises unless every tensor fits
        write_facts(temporary, output.name, facts)
    number, files = sum(part.values.numel() for part in parts.values()), len(split.filename_to_tensors)
    contents = f"{number:,} parameters, {files} weight file{'s' if files > 1 else ''}"
    contents += ", NO tokenizer, since no model has one" if tokenizer is None else ""
    return MergeResult(output, facts, contents, _notes(inputs))


def open_input(given: str | Path) -> MergeInput:
    """Find a model and check its files. No values are read. Raises ValueError for a model that cannot be merged."""
    folder = find_finished(given)
    if (file := gguf_file(folder)) is not None:
        raise ValueError(
            f"{file} is a GGUF file: its numbers may be rounded, and have llama.cpp's layout. Merge the folder that it "
            "was made from, or write one first: leanft export FILE.gguf FOLDER."
        )
    if is_adapter(folder):  # given as the base
        raise ValueError(f"{given} is an adapter. Pass a whole model, or write one: leanft export {given} NEW --merge.")
    config = read_json(folder / "config.json", CONFIG_PURPOSE)
    text = config.get("text_config")
    quantization = config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"{given} has quantized weights ({method or 'quantization_config'}), and rounded numbers cannot be merged "
            "without another rounding. Use the model that it was made from. A folder of fp8 or mxfp4 can be written in "
            "bfloat16 first: leanft export FOLDER NEW --dtype bfloat16."
        )
    model = load_model(folder, "meta", scores=stored_labels(folder))
    if model.source.dense:
        raise ValueError(
            f"{given} has layers after pooling ({', '.join(model.source.dense)}), which merge does not support."
        )
    head = model.source.places("lm_head.weight")[0] if model.config.tied_embeddings else None
    tensors = {}
    for name, tensor in stored_tensors(folder).items():
        own = name_in_language_model(name) if model.source.part_of else name
        if own == head or name.endswith(_UNREAD):  # repeats the embedding, as load_model has checked
            continue
        if tensor.dtype is None or (tensor.dtype.is_floating_point and tensor.dtype not in _FLOATS):
            raise ValueError(
                f"{tensor.file}: {name} is stored as {tensor.dtype_name:.20}; expected F32, BF16 or F16. Write another "
                "dtype first: leanft export FOLDER NEW --dtype float32."
            )
        tensors[name] = tensor
    return MergeInput(str(given), folder, model, config, tensors, tokenizer_of_input(str(given), folder))


def tokenizer_of_input(given: str, folder: Path) -> Tokenizer | None:
    """The tokenizer in a model's folder, or None. Raises ValueError, with the model's name, if it cannot be read."""
    if tokenizer_folder(folder) is None:
        return None
    try:
        return load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"the tokenizer of {given}: {error}") from None


def _check_alike(inputs: Sequence[MergeInput], base: MergeInput | None, settings: MergeSettings) -> Tokenizer | None:
    """Raise ValueError for the first difference. Returns the tokenizer of the output."""
    first = inputs[0]
    check_distinct({str(one): one.folder for one in inputs}, len(inputs))
    for other in [*inputs[1:], *([base] if base else [])]:
        check_same_computation(first, other)
        check_same_tensors(first, other)
    with_tokenizer = [one for one in [*inputs, *([base] if base else [])] if one.tokenizer is not None]
    for one in with_tokenizer[1:]:
        ours, theirs = with_tokenizer[0].tokenizer, one.tokenizer
        assert ours is not None and theirs is not None
        check_same_tokens(str(with_tokenizer[0]), ours, str(one), theirs, may_lack_tokens=one is base)
        if settings.chat_template is None and one is not base:
            check_same_templates(str(with_tokenizer[0]), ours, str(one), theirs)
    return with_tokenizer[0].tokenizer if with_tokenizer else None


def _tensors(
    inputs: Sequence[MergeInput], base: MergeInput | None, formula: Formula
) -> dict[str, MergedTensor | _CopiedTensor]:
    keys = [weights_fingerprint(one.folder) or "" for one in inputs] if formula.method.at_random else []
    merged = dict[str, MergedTensor | _CopiedTensor]()
    for name, tensor in inputs[0].tensors.items():
        stored = [one.tensors[name] for one in inputs]
        if all(one.dtype is not None and one.dtype.is_floating_point for one in stored):
            merged[name] = MergedTensor(name, stored, None if base is None else base.tensors[name], formula, keys)
            continue
        for one, other in zip(inputs[1:], stored[1:], strict=True):
            if (other.dtype, *other.pieces(BLOCK)) != (tensor.dtype, *tensor.pieces(BLOCK)):
                raise ValueError(
                    f"{name} has whole numbers ({tensor.dtype_name}), and they differ between {inputs[0]} and {one}. "
                    "They cannot be averaged."
                )
        merged[name] = _CopiedTensor(tensor)
    return merged


def _notes(inputs: Sequence[MergeInput]) -> list[str]:
    """Sentences about what the output has of the first model alone."""
    ends = {str(one): one.model.source.end_ids for one in inputs}
    if len({tuple(sorted(ids)) for ids in ends.values()}) == 1:
        return []
    shown = "; ".join(f"{name}: {', '.join(map(str, ids)) or 'none'}" for name, ids in ends.items())
    return [f"The ids that end a completion differ ({shown}). The output has those of {inputs[0]}."]


def _dtype_of(tensor: MergedTensor | _CopiedTensor, dtype: torch.dtype | None) -> torch.dtype | None:
    if isinstance(tensor, _CopiedTensor):
        return tensor.stored.dtype
    return dtype or tensor.stored[0].dtype


def _write_other_files(folder: Path, first: MergeInput, tokenizer: Tokenizer | None, dtype: torch.dtype | None) -> None:
    """Write the configuration and the tokenizer, which are those of the first model."""
    config = first.config
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        config = _with_dtype(config, name)
    write_json(folder / "config.json", config)
    if first.model.source.generation_config is not None:
        (folder / "generation_config.json").write_bytes(first.model.source.generation_config)
    write_beside(files_beside(first.folder), folder)
    for name in PROCESSOR_FILES:
        if (first.folder / name).is_file():
            (folder / name).write_bytes((first.folder / name).read_bytes())
    if tokenizer is not None:
        save_view(folder, tokenizer, settings_of_run(first.folder))


def set_template(folder: Path, chosen: str) -> None:
    """Give a folder with a tokenizer the chat template of a file, or the templates of another model."""
    file = Path(chosen).expanduser()
    if file.is_file():
        templates = {"default": read_text(file)}
    elif not (templates := load_tokenizer(find_finished(chosen)).chat_templates):
        raise ValueError(f"--chat-template {chosen}: this model has no chat template. Name another model, or a file.")
    write_templates(folder, templates)
    load_tokenizer(folder).save(folder)  # the ids that end a turn


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    changed = {**config, **dict.fromkeys(spelled, dtype)}
    for name, inner in config.items():
        if isinstance(inner, dict) and any(key in inner for key in ("dtype", "torch_dtype")):
            changed[name] = _with_dtype(inner, dtype)
    return changed
