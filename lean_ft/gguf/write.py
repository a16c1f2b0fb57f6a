"""Write a GGUF file, one tensor at a time.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's tensor names and metadata for these architectures.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lean_ft.gguf.header import gguf_package
from lean_ft.gguf.names import architecture_metadata
from lean_ft.gguf.quantize import FORMATS, num_bytes, quantize
from lean_ft.gguf.rows import GGUFFamily
from lean_ft.gguf.vocabulary import tokenizer_metadata
from lean_ft.models import Decoder
from lean_ft.tokenizers import Tokenizer

# How matrices are stored -> llama.cpp's LlamaFileType. Vectors (norms, biases) are always float32.
GGUF_KINDS = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q4_k_m": 15, "q4_0": 2, "iq4_nl": 25, "mxfp4": 38,
}  # fmt: skip


def model_metadata(
    model: Decoder, family: GGUFFamily, kind: str, name: str, tokenizer: Tokenizer, ends: Iterable[int]
) -> dict[str, Any]:
    """Return the metadata of a model's file by key. `ends`: ids that end an answer."""
    metadata: dict[str, Any] = {"general.name": name, "general.file_type": GGUF_KINDS[kind]}
    if kind not in ("f32", "f16", "bf16"):
        metadata["general.quantization_version"] = 2
    for key, value in architecture_metadata(model, family).items():
        metadata[key if key.startswith("xielu.") else f"{family.architecture}.{key}"] = value  # as llama.cpp names them
    return metadata | tokenizer_metadata(tokenizer, model.config.vocab_size, ends)


def write_gguf(
    file: Path,
    architecture: str,
    metadata: dict[str, Any],
    entries: dict[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
    importance: Mapping[str, Tensor] = {},
) -> None:
    """Write a file. entries: kind and shape of each tensor. importance: as `quantize` takes it, by tensor. Floats of the metadata
    are stored in 32 bits. Raises ValueError if a weight is too large for its kind."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(file, architecture)
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
        writer.write_tensor_data(_encode(tensor, entries[name][0], importance.get(name)))
    writer.close()


def _encode(tensor: Tensor, kind: str, importance: Tensor | None) -> np.ndarray:
    """Return the data of a tensor as stored in the file."""
    if kind == "f32":
        return tensor.float().numpy()
    if kind == "f16":
        if not bool((converted := tensor.half()).isfinite().all()):
            raise ValueError("a weight is above 65,504, which float16 cannot hold. Choose --gguf bf16 or f32.")
        return converted.numpy()
    if kind == "bf16":
        return tensor.to(torch.bfloat16).view(torch.uint16).numpy()
    return quantize(tensor, kind, importance).numpy()
