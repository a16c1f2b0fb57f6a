"""Save a model as a Hugging Face folder, under the names that the folder it was read from has.

A language model that was read from a multimodal folder is saved alone, as a folder of its own family. With `whole`, or
if the vision tower was loaded, the whole multimodal folder is written, and tensors that were not loaded are copied.
"""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lean_ft.models.beside import write_beside
from lean_ft.models.config_json import OF_SCORES
from lean_ft.models.decoder import Decoder
from lean_ft.models.dequantized import Readable, dequantized
from lean_ft.models.drafting import drafting_tensors, without_drafting
from lean_ft.models.new_model import empty_decoder
from lean_ft.models.safetensors_file import write_file
from lean_ft.models.source import parts_on_disk
from lean_ft.models.stored_weights import CONFIG_PURPOSE, WEIGHTS_FILE, WEIGHTS_INDEX, first_few, stored_tensors
from lean_ft.models.vision.loading import PROCESSOR_FILES
from lean_ft.system.foreign_values import JSON
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Part, Ranks, part_of
from lean_ft.system.whole_files import read_json, write_json, write_whole

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit


def save_model(
    model: Decoder,
    path: str | Path,
    max_shard_bytes: int = 5_000_000_000,
    *,
    whole: bool = False,
    ranks: Ranks = ALONE,
    weights: Mapping[str, Part] | None = None,
) -> None:
    """Write config.json and safetensors files that `load_model` and transformers' `from_pretrained` read.

    Weights above `max_shard_bytes` are split into several files with an index. config.json is the loaded config with
    the current dtype; generation_config.json is copied. Each file is written atomically, and weight files of an earlier
    save are removed. For a sharded model all `ranks` call this, and each rank writes its rows.

    Args:
        whole: for the language model of a multimodal folder: write that folder's model, as for a model with a vision
            tower. All names are the folder's own, and tensors and settings of other parts are copied from it, one file
            of weights in memory at a time.
        weights: values to write instead of the model's, such as copies of `parts_on_disk(model)`.

    Raises:
        ValueError: if the model has no config.json, or its parameters are not those of its config (such as with an
            adapter), or with `whole` not those of the folder.
    """
    check_parameters(model)
    from huggingface_hub import split_state_dict_into_shards_factory  # a slow import

    folder = Path(path)
    whole = whole or model.vision is not None
    parts = dict(parts_on_disk(model, as_read=whole) if weights is None else weights)
    dense = {name: parts.pop(name) for name in list(parts) if "/" in name}
    if whole:
        parts, copied = _in_whole(model, parts)
    else:
        parts, copied = _with_drafting(model, parts, ranks)
    ranks.on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
    split = split_state_dict_into_shards_factory(
        parts,
        get_storage_size=lambda part: part.whole_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    ranks.on_rank_zero(lambda: _check_apart(model, folder, split, copied))
    for file_name, names in split.filename_to_tensors.items():
        write_file(folder / file_name, {name: parts[name] for name in names}, {"format": "pt"}, ranks, copied)
    ranks.on_rank_zero(lambda: _write_index(folder, split))
    _write_layers_after_pooling(folder, dense, ranks)
    drafts = not copied.keys().isdisjoint(model.source.drafting)
    write = _write_configs_of_whole if whole else partial(write_configs, drafts=drafts)
    ranks.on_rank_zero(lambda: write(model, folder))


def _write_layers_after_pooling(folder: Path, parts: Mapping[str, Part], ranks: Ranks) -> None:
    """Write each layer to a folder of its own. parts: by their place, such as `2_Dense/linear.weight`."""
    by_place = dict[str, dict[str, Part]]()
    for name, part in parts.items():
        place, _, own = name.rpartition("/")
        by_place.setdefault(place, {})[own] = part
    for place, of_layer in by_place.items():
        ranks.on_rank_zero(lambda place=place: (folder / place).mkdir(parents=True, exist_ok=True))
        write_file(folder / place / WEIGHTS_FILE, of_layer, {}, ranks)


def check_parameters(model: Decoder) -> None:
    """Raise ValueError if the model has no config.json, or its parameters are not those of its config."""
    if not model.source.config:
        raise ValueError("the model was not loaded from a folder, so there is no config.json to save with it.")
    expected = dict(empty_decoder(model.config, torch.float32).named_parameters())
    if different := expected.keys() ^ dict(model.named_parameters()).keys():
        raise ValueError(
            f"the model's parameters differ from those of its config.json: {first_few(different)}. Save an adapter by "
            "lean_ft.peft.save_adapter, or merge it first. A module that trains besides the model is an argument of "
            "its own: Run(..., carried=module)."
        )


def write_configs(model: Decoder, folder: Path, drafts: bool = False, **more: JSON) -> None:
    """Write config.json with the model's dtype and the fields `more`, and the loaded generation_config.json. Without
    `drafts`, the folder has no drafting layers."""
    config = model.source.config if drafts else without_drafting(model.source.config)
    spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    dtype = str(model.dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**config, **dict.fromkeys(spelled, dtype), **more})
    _write_other_files(model, folder)


def _write_other_files(model: Decoder, folder: Path) -> None:
    write_beside(model.source.beside, folder)
    if model.source.generation_config is not None:
        with write_whole(folder / "generation_config.json") as temporary:
            temporary.write_bytes(model.source.generation_config)


def _write_index(folder: Path, split: "StateDictSplit") -> None:
    """Write the index, and remove weight files of an earlier save."""
    current = set(split.filename_to_tensors)
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        write_json(folder / WEIGHTS_INDEX, {"metadata": split.metadata, "weight_map": weight_map})
        current.add(WEIGHTS_INDEX)
    for stale in [folder / WEIGHTS_INDEX, *folder.glob("model*.safetensors")]:
        if stale.name not in current:
            stale.unlink(missing_ok=True)


def _in_whole(model: Decoder, parts: Mapping[str, Part]) -> tuple[dict[str, Part], dict[str, Readable]]:
    """All tensors of the multimodal folder by its own names: the model's `parts`, and as parts without values those to
    copy, which are also returned as stored."""
    source = model.source
    assert source.folder is not None and source.part_of, "only the language model of a folder has a whole"
    if lost := parts.keys() - source.names.values():
        raise ValueError(
            f"{source.folder} lacks {min(lost)}, a tensor of the model. Give the folder that it was taken from."
        )
    beside = [name for name, model_name in source.names.items() if model_name is None]
    stored = dequantized(stored_tensors(source.start / source.folder), source.quantization) if beside else {}
    copied = {name: stored[name] for name in beside}
    if unknown := [name for name, tensor in copied.items() if tensor.dtype is None]:
        raise ValueError(f"{copied[unknown[0]].file}: {unknown[0]} has a dtype that cannot be copied.")
    places = {name: _place(tensor.shape, tensor.dtype) for name, tensor in copied.items()}
    written = {
        name: source.turned(model_name, parts[model_name])
        for name, model_name in source.names.items()
        if model_name is not None
    }
    return {name: written.get(name) or places[name] for name in source.names}, copied


def _with_drafting(
    model: Decoder, parts: Mapping[str, Part], ranks: Ranks
) -> tuple[dict[str, Part], dict[str, Readable]]:
    """Add the tensors of the model's drafting layers to its `parts`, as parts without values.

    On rank 0, also return the tensors as they are stored. Only rank 0 reads them: the folder may be on the disk of one
    machine.
    """
    drafting = dict[str, Readable]()

    def find() -> dict[str, Any]:
        try:
            drafting.update(drafting_tensors(model.source))
        except ValueError as error:
            say("WARNING", f"saved without drafting layers: {error}. config.json promises none")
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in drafting.items()}

    shapes = ranks.on_rank_zero(find)
    places = {
        name: _place(shape, getattr(torch, dtype.removeprefix("torch."))) for name, (shape, dtype) in shapes.items()
    }
    return {**parts, **places}, drafting


def _check_apart(model: Decoder, folder: Path, split: "StateDictSplit", copied: Mapping[str, Readable]) -> None:
    """Raise ValueError if saving would replace a file before tensors are copied from it."""
    source = model.source
    if not copied or not split.is_sharded or source.folder is None:
        return
    if (source.start / source.folder).resolve() == folder.resolve():
        raise ValueError(
            f"tensors of {folder} are copied, so the model cannot be saved there. Save it to another folder."
        )


def _place(shape: Sequence[int], dtype: torch.dtype | None) -> Part:
    """A part without values, for a tensor that is copied."""
    return part_of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def _write_configs_of_whole(model: Decoder, folder: Path) -> None:
    """Copy the multimodal model's settings, with the dtype and vocabulary size of the model, whose weights are not
    quantized."""
    assert model.source.folder is not None
    whole = model.source.start / model.source.folder
    changes: dict[str, Any] = {"vocab_size": model.config.vocab_size}
    changes |= dict.fromkeys(("dtype", "torch_dtype"), str(model.dtype).removeprefix("torch."))
    if model.score is not None:
        changes["pad_token_id"] = model.source.config.get("pad_token_id")

    def updated(settings: dict[str, Any]) -> dict[str, Any]:
        return {key: changes.get(key, value) for key, value in settings.items() if key != "quantization_config"}

    config = read_json(whole / "config.json", CONFIG_PURPOSE)
    changed = {**updated(config), **{key: updated(config[key]) for key in ("text_config",) if key in config}}
    changed = changed if model.source.drafting else without_drafting(changed)
    for name in ("config.json", *PROCESSOR_FILES):
        if (whole / name).is_file() and whole.resolve() != folder.resolve():
            shutil.copyfile(whole / name, folder / name)
    if model.score is not None:
        labels = ("id2label", "label2id", "problem_type")
        changed |= {name: model.source.config[name] for name in labels if name in model.source.config}
        changed["architectures"] = [config["architectures"][0].replace("ForConditionalGeneration", OF_SCORES)]
    if changed != config:
        write_json(folder / "config.json", changed)
    _write_other_files(model, folder)
