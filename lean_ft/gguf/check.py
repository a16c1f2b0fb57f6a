"""Check that llama.cpp computes a model as lean_ft does: its GGUF file, read as llama.cpp reads it, must be the model again."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from lean_ft.gguf.header import Facts, TensorPlace
from lean_ft.gguf.mixtures import REFUSED
from lean_ft.gguf.names import all_tensors, architecture_metadata, divisors_of
from lean_ft.gguf.open import GGUF_FAMILIES, config_of
from lean_ft.gguf.rows import GGUFFamily
from lean_ft.models import Decoder, DecoderConfig, decoder_config

_AGAIN = " Download the file again."
# Fields of the configuration that change no number of the forward pass, or none beyond rounding.
_WITHOUT_EFFECT = {"initializer_range", "router_aux_loss_coef"}
# The file has the divisors of frequencies that these fields of RopeConfig give.
_IN_DIVISORS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_positions", "attention_factor"}


def gguf_family(model: Decoder, folder: Path) -> GGUFFamily:
    """Return the row of `GGUF_FAMILIES`. Raises ValueError if llama.cpp would compute something else."""
    name = model.source.config["model_type"]
    if name in REFUSED:
        raise ValueError(f"{folder}: llama.cpp does not compute {name} as it was trained: {REFUSED[name]}.")
    if name not in GGUF_FAMILIES:
        raise ValueError(
            f"{folder}: --gguf supports the families {', '.join(GGUF_FAMILIES)}, but this is {name}. Export a Hugging Face "
            "folder (without --gguf) and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    family = GGUF_FAMILIES[name]
    name = next(other for other, row in GGUF_FAMILIES.items() if row is family)  # mistral is read as llama
    if family.architecture_of is not None:
        family = family._replace(architecture=family.architecture_of(model.config))
    if without := [key for key, (field, _) in family.numbers.items() if getattr(model.config, field) is None]:
        raise ValueError(f"{folder} has no {without[0]}, which llama.cpp's architecture {family.architecture} needs.")
    is_computed = f"{folder}: llama.cpp's architecture {family.architecture} does not compute the model"
    try:
        read = _read_back(model, family, name)
    except ValueError as error:
        raise ValueError(
            f"{is_computed}: {str(error).removesuffix(_AGAIN)} Export a Hugging Face folder instead."
        ) from None
    for place, found, expected in _differences(model.config, read, family.not_stored):
        raise ValueError(f"{is_computed}: {place} is {found}, and it always computes with {expected}.")
    return family


def _read_back(model: Decoder, family: GGUFFamily, name: str) -> DecoderConfig:
    """The configuration that is read from the header of a model's file. Raises ValueError if the header cannot be read."""
    metadata = {f"{family.architecture}.{key}": value for key, value in architecture_metadata(model, family).items()}
    tensors = {key: TensorPlace("F32", tuple(tensor.shape), 0, 0) for key, tensor in all_tensors(model, family, "meta")}
    metadata["general.architecture"] = family.architecture
    facts = Facts(Path("its file"), metadata, tensors, divisors_of(model.config))
    return decoder_config(config_of(facts, name), where="its file")


def _differences(own: Any, read: Any, not_stored: frozenset[str], where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each fact of a model that its file is read without: name, value, value in the file."""
    ignored = not_stored | _WITHOUT_EFFECT
    if getattr(own, "scaling", None) in ("llama3", "longrope"):
        ignored |= _IN_DIVISORS
    for field in fields(own):
        found, expected, place = getattr(own, field.name), getattr(read, field.name), f"{field.name}{where}"
        if field.name in ignored or found == expected:
            continue
        if field.name == "layers" and len(found) == len(expected):
            for i, (layer, other) in enumerate(zip(found, expected, strict=True)):
                yield from _differences(layer, other, not_stored, f" of layer {i}")
        elif is_dataclass(found) and type(found) is type(expected):
            yield from _differences(found, expected, not_stored, f" of the {place}")
        elif not (
            isinstance(found, float) and isinstance(expected, float) and math.isclose(found, expected, rel_tol=1e-5)
        ):
            yield place, _brief(found), _brief(expected)


def _brief(value: Any) -> Any:
    """The kind of a part of the model in place of its configuration."""
    return f"a {type(value).__name__.removesuffix('Config')}" if is_dataclass(value) else value
