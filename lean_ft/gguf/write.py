"""Write a model as a GGUF file, one tensor at a time, if llama.cpp computes it as lean_ft does.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's tensor names and metadata for these architectures.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lean_ft.gguf.header import Facts, TensorPlace, gguf_package
from lean_ft.gguf.names import all_tensors, architecture_metadata, divisors_of
from lean_ft.gguf.open import GGUF_FAMILIES, config_of
from lean_ft.gguf.quantize import FORMATS, Errors, num_bytes, quantize
from lean_ft.gguf.rows import REFUSED, GGUFFamily
from lean_ft.gguf.vocabulary import tokenizer_metadata
from lean_ft.gguf.wholes import row_of
from lean_ft.models import Decoder, DecoderConfig, decoder_config
from lean_ft.tokenizers import Tokenizer

# How matrices are stored -> llama.cpp's LlamaFileType. Vectors (norms, biases) are always float32.
GGUF_KINDS = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q4_k_m": 15, "q4_0": 2, "iq4_nl": 25,
    "mxfp4": 38,
}  # fmt: skip

_AGAIN = " Download the file again."
# Fields of the configuration that change no number of the forward pass, or none beyond rounding; of text, positions on
# three axes.
_WITHOUT_EFFECT = {"initializer_range", "router_aux_loss_coef", "axes"}
# The file has the divisors of frequencies that these fields of RopeConfig give.
_IN_DIVISORS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_positions", "attention_factor"}


def gguf_family(model: Decoder, folder: Path) -> GGUFFamily:
    """Return the row of `GGUF_FAMILIES`. Raises ValueError if llama.cpp would compute something else."""
    name = model.source.config["model_type"]
    if name in REFUSED:
        raise ValueError(f"{folder}: llama.cpp does not compute {name} as it was trained: {REFUSED[name]}.")
    if name not in GGUF_FAMILIES:
        raise ValueError(
            f"{folder}: --gguf supports the families {', '.join(GGUF_FAMILIES)}, but this is {name}. Export a Hugging "
            "Face folder (without --gguf) and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    family = row_of(model)
    name = next(other for other, row in GGUF_FAMILIES.items() if row is GGUF_FAMILIES[name])  # mistral is read as llama
    if without := [key for key, (field, _) in family.numbers.items() if getattr(model.config, field) is None]:
        raise ValueError(f"{folder} has no {without[0]}, which llama.cpp's architecture {family.architecture} needs.")
    is_computed = f"{folder}: llama.cpp's architecture {family.architecture} does not compute the model"
    try:
        read = _read_back(model, family, name)
    except ValueError as error:
        raise ValueError(
            f"{is_computed}: {str(error).removesuffix(_AGAIN)} Export a Hugging Face folder instead."
        ) from None
    config = model.config
    if not config.has_output:  # llama.cpp then takes the embedding
        config = replace(config, has_output=True, tied_embeddings=True)
    own, of_file = (dict(_facts_of(one, "", family.not_stored)) for one in (config, read))
    for place in own | of_file:
        found, expected = own.get(place), of_file.get(place)
        if (place, found, expected) == ("activation", "gelu", "gelu_tanh"):
            continue  # the export reports it
        is_close = (
            isinstance(found, float) and isinstance(expected, float) and math.isclose(found, expected, rel_tol=1e-5)
        )
        if found != expected and not is_close:
            raise ValueError(f"{is_computed}: {place} is {found}, and it always computes with {expected}.")
    return family


def _read_back(model: Decoder, family: GGUFFamily, name: str) -> DecoderConfig:
    """The configuration that is read from the header of a model's file. Raises ValueError if the header cannot be
    read."""
    metadata = {f"{family.architecture}.{key}": value for key, value in architecture_metadata(model, family).items()}
    tensors = {key: TensorPlace("F32", tuple(tensor.shape), 0, 0) for key, tensor in all_tensors(model, family, "meta")}
    metadata["general.architecture"] = family.architecture
    facts = Facts(Path("its file"), metadata, tensors, divisors_of(model.config))
    return decoder_config(config_of(facts, name), where="its file")


def _facts_of(part: Any, place: str, not_stored: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the facts of a configuration that files of a family store, by name and place."""
    in_divisors = _IN_DIVISORS if getattr(part, "scaling", None) in ("llama3", "longrope") else set[str]()
    for field in fields(part):
        value, name = getattr(part, field.name), f"{field.name}{place}"
        if field.name == "parts":
            continue  # follow from the family
        if field.name == "layers":
            for i, layer in enumerate(value):
                yield from _facts_of(layer, f" of layer {i}", not_stored)
        elif is_dataclass(value):
            yield from _facts_of(value, place if field.name == "own" else f" of the {name}", not_stored)
        elif field.name not in not_stored | _WITHOUT_EFFECT | in_divisors:
            yield name, value


def model_metadata(
    model: Decoder, family: GGUFFamily, kind: str, name: str, tokenizer: Tokenizer, ends: Iterable[int]
) -> dict[str, Any]:
    """Return the metadata of a model's file by key. `ends`: ids that end an answer."""
    metadata: dict[str, Any] = {"general.name": name, "general.file_type": GGUF_KINDS[kind]}
    if kind not in ("f32", "f16", "bf16"):
        metadata["general.quantization_version"] = 2
    for key, value in architecture_metadata(model, family).items():
        metadata[key if key.startswith("xielu.") else f"{family.architecture}.{key}"] = value  # as llama.cpp names them
    return metadata | tokenizer_metadata(tokenizer, model.config.vocab_size, ends, model.source.config)


def write_gguf(
    file: Path,
    architecture: str,
    metadata: dict[str, Any],
    entries: dict[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
) -> Errors:
    """Write a file, and return the relative errors of its quantized tensors.

    entries: kind and shape of each tensor. Floats of the metadata are stored in 32 bits. Raises ValueError if a weight
    is too large for its kind.
    """
    gguf = gguf_package()
    writer, errors = gguf.GGUFWriter(file, architecture), Errors()
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in metadata.items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, (kind, shape) in entries.items():
        stored, size, dtype = gguf.GGMLQuantizationType[kind.upper()], num_bytes(kind, shape), np.float32
        if kind in FORMATS:
            shape, dtype = gguf.quant_shape_to_byte_shape(shape, stored), np.uint8
        writer.add_tensor_info(name, shape, np.dtype(dtype), size, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors:
        kind = entries[name][0]
        if kind in FORMATS:
            data = quantize(tensor, kind, errors).numpy()
        elif kind == "bf16":
            data = tensor.to(torch.bfloat16).view(torch.uint16).numpy()
        else:
            data = (tensor.float() if kind == "f32" else tensor.half()).numpy()
            if kind == "f16" and not np.isfinite(data).all():
                raise ValueError("a weight is above 65,504, which float16 cannot hold. Choose --gguf bf16 or f32.")
        writer.write_tensor_data(data)
    writer.close()
    return errors
