"""A model that reads images too, with a language model that was trained in the place of its own.

Every tensor that is not the language model's (vision tower, projector, layers that draft) is copied bit by bit, the others are
written under the names that they have there, file by file as the original is cut, so that one file is in memory beside the
model. config.json and the files of its processor are the original's.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder
from lean_ft.models.config_json import language_model_config
from lean_ft.models.dequantized import Readable, dequantized
from lean_ft.models.hf_format import WEIGHTS_INDEX, stored_tensors, tensors_on_disk
from lean_ft.models.names_on_disk import name_in_language_model
from lean_ft.models.safetensors_file import write_file
from lean_ft.system.shards import part_of
from lean_ft.system.whole_files import read_json, write_json
from lean_ft.training.checkpoint import TRAINING_STATE_FILE, read_training_state

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def find_whole(model: Decoder, folder: Path, base: str | Path | None) -> Path:
    """The folder that the language model in `folder` was taken from: `base`, or what its run began with.

    Raises ValueError where that is not known, and where it reads no images.
    """
    if base is None and model.source.part_of:
        base = model.source.folder
    if base is None and (folder / TRAINING_STATE_FILE).is_file():
        base = read_training_state(folder)["settings"].get("model.path")
    if base is None:
        raise ValueError(f"{folder} does not say which model it was taken from: give that model's folder as --base.")
    whole = resolve_model_path(base)
    config = read_json(whole / "config.json", "it says what the model computes.")
    if language_model_config(config, str(whole / "config.json")) is config:
        raise ValueError(
            f"{whole} reads no images (its model_type is {config.get('model_type')!r}), so there is nothing to keep: leave out "
            "--keep-vision, or give as --base the folder that the language model was taken from."
        )
    return whole


def save_whole(model: Decoder, whole: Path, destination: Path) -> int:
    """Writes the folder `whole` anew with the weights of `model`, and returns how many tensors are the original's.

    Raises ValueError where the original has no place for a tensor of the model.
    """
    config = read_json(whole / "config.json", "it says what the model computes.")
    stored = dequantized(stored_tensors(whole), language_model_config(config).get("quantization_config") or {})
    trained = tensors_on_disk(model)
    if model.config.tied_embeddings:  # some folders store it twice
        trained["lm_head.weight"] = trained["model.embed_tokens.weight"]
    own_names = {name: own for name in stored if (own := name_in_language_model(name)) in trained}
    without = trained.keys() - own_names.values() - ({"lm_head.weight"} if model.config.tied_embeddings else set())
    if without:
        raise ValueError(
            f"{whole} has no place for {min(without)}, which the trained model has: it is not the folder that the model was "
            "taken from. Give that as --base."
        )
    destination.mkdir(exist_ok=True)
    weight_map, total_bytes = {}, 0
    for file_name in sorted({tensor.file.name for tensor in stored.values()}):
        names = [name for name, tensor in stored.items() if tensor.file.name == file_name]
        tensors = {n: trained[own_names[n]] if n in own_names else _copied(n, stored[n]) for n in names}
        write_file(destination / file_name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if (whole / WEIGHTS_INDEX).is_file():
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(destination / WEIGHTS_INDEX, index)
    for name in PROCESSOR_FILES:
        if (whole / name).is_file():
            shutil.copyfile(whole / name, destination / name)
    if model.source.generation_config is not None:
        (destination / "generation_config.json").write_bytes(model.source.generation_config)
    shutil.copyfile(whole / "config.json", destination / "config.json")
    if (changed := _brought_up_to_date(config, model)) != config:
        write_json(destination / "config.json", changed)
    return len(stored) - len(own_names)


def _copied(name: str, stored: Readable) -> torch.Tensor:
    """A tensor of the original as it is; what is quantised there in bfloat16."""
    if stored.dtype is None:
        raise ValueError(f"{stored.file}: {name} is stored in a dtype that cannot be copied here.")
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read_part(part_of(tensor))
    return tensor


def _brought_up_to_date(config: dict[str, Any], model: Decoder) -> dict[str, Any]:
    """The original's config.json with the dtype and the vocabulary of the model, whose weights are not quantised."""
    said = {"vocab_size": model.config.vocab_size}
    said |= dict.fromkeys(("dtype", "torch_dtype"), str(model.dtype).removeprefix("torch."))

    def current(settings: dict[str, Any]) -> dict[str, Any]:
        return {key: said.get(key, value) for key, value in settings.items() if key != "quantization_config"}

    return {**current(config), "text_config": current(config["text_config"])}
