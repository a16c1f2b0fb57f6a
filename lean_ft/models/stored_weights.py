"""The stored tensors of a model folder: found, checked and sampled without reading them.

Pickled weights (.bin, .pth) can run code when they are opened, so only safetensors and GGUF files are read.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

import torch

from lean_ft.gguf.cache import GGUF_INDEX, gguf_file
from lean_ft.hub.download import home_of_links
from lean_ft.models.config_json import (
    VECTORS,
    Labels,
    as_its_family,
    decoder_config,
    gives_scores,
    gives_vectors,
    labels_tokens,
    language_model_config,
)
from lean_ft.models.dense import makes_vectors
from lean_ft.models.dequantized import dequantized
from lean_ft.models.families import family_of
from lean_ft.models.safetensors_file import StoredTensor, read_header
from lean_ft.system.whole_files import read_json

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STORED_DTYPES = (*DTYPES, torch.float64)

CONFIG_PURPOSE = "it describes the model. Set model.path to a model's folder."
_FINGERPRINT_PAGES = 8192


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the folder's safetensors files, or of its GGUF file, by name; only headers are read."""
    if gguf_file(folder) is not None:
        from lean_ft.gguf.tensors import gguf_tensors  # imported here, because both import the configuration of models
        from lean_ft.models.hf_format import empty_model

        return gguf_tensors(folder, empty_model(folder))
    if (folder / WEIGHTS_FILE).exists():
        return read_header(_inside(folder, WEIGHTS_FILE, folder))
    if not (folder / WEIGHTS_INDEX).exists():
        raise ValueError(_no_weights(folder))
    index = read_json(folder / WEIGHTS_INDEX, "it lists the weight files.")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / WEIGHTS_INDEX}: expected an object weight_map from tensor names to file names.")
    headers = {name: read_header(_inside(folder, name, folder / WEIGHTS_INDEX)) for name in set(weight_map.values())}
    absent = [name for name, file_name in weight_map.items() if name not in headers[file_name]]
    if absent:
        file = folder / weight_map[absent[0]]
        raise ValueError(
            f"{file} lacks {first_few(absent)}, which {WEIGHTS_INDEX} lists. Download or copy the folder again."
        )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def _inside(folder: Path, name: str, source: Path) -> Path:
    """The path of a file in the folder. Raises ValueError if the name or a link leads out of the folder."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or ":" in name:
        raise ValueError(f"{source} names the weight file {name!r}; expected the name of a file in {folder}.")
    file = folder / relative
    if not file.is_file():
        raise ValueError(f"{source} names the weight file {name!r}, which is missing from {folder}.")
    target, home = file.resolve(), folder.resolve()
    if not target.is_relative_to(home) and not target.is_relative_to(home_of_links(home)):
        raise ValueError(
            f"the weight file {name!r} of {folder} is a link to {target}, outside the folder. Copy the file into it."
        )
    return file


def stored_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, under the name of the family that computes it."""
    purpose = CONFIG_PURPOSE
    if (folder / "adapter_config.json").is_file():
        purpose = (
            "it is an adapter. Set model.path to its base model, and adapter= to this folder to generate with both. "
            f"For a model of both, run `leanft export {quote(str(folder))} merged --merge` and use the folder merged."
        )
    return as_its_family(read_json(folder / "config.json", purpose))


def stored_labels(folder: Path) -> Labels | None:
    """The labels of a folder's reward model or classifier, as `load_model(scores=...)` takes them; None for a language
    model, and `VECTORS` for a model that gives vectors."""
    config = language_model_config(stored_config(folder), str(folder / "config.json"))
    if not gives_scores(config):
        return VECTORS if gives_vectors(config) or makes_vectors(folder) else None
    own = "architectures" if labels_tokens(config) else "problem_type"
    return {field: config[field] for field in ("num_labels", "id2label", "label2id", own) if field in config}


def stored_dtype(folder: Path) -> torch.dtype:
    """The narrowest of bfloat16, float16 and float32 that holds every stored tensor exactly. Tensors that a model
    always keeps in float32 do not count."""
    dtype: torch.dtype | None = None
    always_float32, config = float32_names(folder), language_model_config(stored_config(folder))
    for name, tensor in dequantized(stored_tensors(folder), config.get("quantization_config") or {}).items():
        if tensor.dtype in STORED_DTYPES and not name.endswith(always_float32):  # load_model refuses other dtypes
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype if dtype in DTYPES else torch.float32


def float32_names(folder: Path) -> tuple[str, ...]:
    """The ends of the names of tensors that the folder's model always keeps in float32."""
    config = language_model_config(stored_config(folder))
    always = decoder_config(config, where=str(folder / "config.json")).in_float32
    on_disk = getattr(family_of(config["model_type"]), "on_disk", {})
    return (*always, *(places[0] for part, places in on_disk.items() if f".{part}".endswith(always)))


def weights_fingerprint(folder: Path) -> str | None:
    """A SHA-256 digest of names, dtypes, shapes and sampled bytes of all tensors; None for a folder without weights.

    The digest does not depend on the folder's path, file names, sharding or file times. It reads about 8,192 pages,
    which takes seconds. A change that lies entirely between the sampled pages is not detected.
    """
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, WEIGHTS_INDEX, GGUF_INDEX)):
        return None
    tensors, digest = stored_tensors(folder), hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        digest.update(f"{name} {stored.dtype_name} {list(stored.shape)}\n".encode())
        if stored.dtype is not None:  # no model has other dtypes
            for page in stored.pieces(4096, at_most=max(2, _FINGERPRINT_PAGES // len(tensors))):
                digest.update(page)
    return digest.hexdigest()


def _no_weights(folder: Path) -> str:
    pickled = [f.name for f in sorted(folder.iterdir()) if f.suffix in (".bin", ".pth", ".pt", ".ckpt")]
    if pickled:
        return (
            f"{folder} has weights only as {first_few(pickled)}. Pickled files can run code when opened, so they are "
            "not read. If you trust them, load the folder with transformers and save it with save_pretrained()."
        )
    others = [f.name for f in sorted(folder.glob("*.safetensors"))]
    found = f" It has {first_few(others)}, which is not the name of a whole model." if others else ""
    return (
        f"{folder} has no weights: expected {WEIGHTS_FILE}, or {WEIGHTS_INDEX} and its files.{found} Set random_init "
        "to build the model with random weights."
    )


def first_few(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
