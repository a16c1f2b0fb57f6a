"""Put a trained language model back into the model that it was taken from, which also reads images.

Tensors outside the language model (vision tower, projector, draft layers) are copied bit for bit. The trained tensors are
written under their original names, file by file as in the original, so that one file is in memory in addition to the model.
config.json and the processor's files are the original's.
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
from lean_ft.system.run_directory import TRAINING_STATE_FILE, read_training_state
from lean_ft.system.shards import part_of
from lean_ft.system.whole_files import read_json, write_json

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def find_vision_model(model: Decoder, folder: Path, base: str | Path | None) -> Path:
    """Return the folder that the language model in `folder` was taken from: `base`, or the one that its run started from.

    Raises ValueError if that is unknown, or if the model there does not read images.
    """
    if base is None and model.source.part_of:
        base = model.source.folder
    if base is None and (folder / TRAINING_STATE_FILE).is_file():
        base = read_training_state(folder)["settings"].get("model.path")
    if base is None:
        raise ValueError(f"{folder} does not name the model that it was taken from: give its folder with --base.")
    whole = resolve_model_path(base)
    config = read_json(whole / "config.json", "it says what the model computes.")
    if language_model_config(config, str(whole / "config.json")) is config:
        raise ValueError(
            f"{whole} is not a model that reads images (its model_type is {config.get('model_type')!r}): leave out "
            "--keep-vision, or give the folder that the language model was taken from with --base."
        )
    return whole


def save_vision_model(model: Decoder, whole: Path, destination: Path) -> int:
    """Copy the folder `whole` to `destination` with the weights of `model`, and return the number of unchanged tensors.

    Raises ValueError if `whole` lacks a tensor of the model.
    """
    config = read_json(whole / "config.json", "it says what the model computes.")
    stored = dequantized(stored_tensors(whole), language_model_config(config).get("quantization_config") or {})
    trained = tensors_on_disk(model)
    if model.config.tied_embeddings:  # some folders store both
        trained["lm_head.weight"] = trained["model.embed_tokens.weight"]
    trained_names = {name: found for name in stored if (found := name_in_language_model(name)) in trained}
    missing = trained.keys() - trained_names.values() - ({"lm_head.weight"} if model.config.tied_embeddings else set())
    if missing:
        raise ValueError(
            f"{whole} lacks {min(missing)}, a tensor of the trained model. Give the folder that the model was taken from with "
            "--base."
        )
    destination.mkdir(exist_ok=True)
    weight_map, total_bytes = {}, 0
    for file_name in sorted({tensor.file.name for tensor in stored.values()}):
        names = [name for name, tensor in stored.items() if tensor.file.name == file_name]
        tensors = {n: trained[trained_names[n]] if n in trained_names else _copied(n, stored[n]) for n in names}
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
    if (changed := _updated(config, model)) != config:
        write_json(destination / "config.json", changed)
    return len(stored) - len(trained_names)


def _copied(name: str, stored: Readable) -> torch.Tensor:
    """Read a tensor of the original; a quantized one becomes bfloat16."""
    if stored.dtype is None:
        raise ValueError(f"{stored.file}: {name} has a dtype that cannot be copied.")
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read_part(part_of(tensor))
    return tensor


def _updated(config: dict[str, Any], model: Decoder) -> dict[str, Any]:
    """Return the original's config.json with the dtype and vocabulary size of the model, whose weights are not quantized."""
    changes = {"vocab_size": model.config.vocab_size}
    changes |= dict.fromkeys(("dtype", "torch_dtype"), str(model.dtype).removeprefix("torch."))

    def updated(settings: dict[str, Any]) -> dict[str, Any]:
        return {key: changes.get(key, value) for key, value in settings.items() if key != "quantization_config"}

    return {**updated(config), "text_config": updated(config["text_config"])}
