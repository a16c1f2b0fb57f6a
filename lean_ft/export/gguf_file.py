"""Export a model as one GGUF file, for llama.cpp and programs based on it.

Tensors are written one at a time, so the peak memory is the model plus twice its largest tensor. For the architecture `llama`,
llama.cpp's rotary embedding pairs neighboring features of a head, where Hugging Face pairs features i and i + head_dim / 2, so
the rows of the query and key projections are reordered.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's tensor names and metadata for these architectures.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lean_ft.export.gguf_families import GGUF_FAMILIES, OPTIONAL, GGUFFamily
from lean_ft.export.gguf_vocabulary import GGUFVocabulary, gguf_vocabulary
from lean_ft.export.places import Exported, check_destination, read_source, room_for
from lean_ft.models import Decoder
from lean_ft.models.rope import SCALINGS, RopeConfig
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.checkpoint import small_files_bytes
from lean_ft.training.finished_models import find_finished

# How matrices are stored -> llama.cpp's LlamaFileType. Vectors (norms, biases) are always float32.
GGUF_KINDS = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
_ROWS = 4096  # rows of a matrix that are encoded at a time
_Q8_BLOCK = 32  # numbers that share a scale


class Entry(NamedTuple):
    """A tensor to store."""

    tensor: Tensor
    kind: str
    num_heads: int | None = None  # of a tensor whose rows are reordered within each head

    @property
    def num_bytes(self) -> int:
        if self.kind == "q8_0":
            return self.tensor.numel() // _Q8_BLOCK * (_Q8_BLOCK + 2)
        return self.tensor.numel() * (4 if self.kind == "f32" else 2)


def export_gguf(
    source: str | Path,
    destination: str | Path,
    kind: str = "bf16",
    force: bool = False,
    merge: bool = False,
    base: str | Path | None = None,
) -> Exported:
    """Write the model of a checkpoint, run directory or model folder to the GGUF file `destination`.

    `kind` is f32, f16, bf16 or q8_0; `merge` and `base` are as in `export_folder`. Raises ValueError if the source is missing or
    damaged, the destination exists, llama.cpp would compute the model or its tokenizer differently, or the `gguf` package is
    missing; OSError if the disk is full.
    """
    gguf = gguf_package()
    if kind not in GGUF_KINDS:
        raise ValueError(f"--gguf is {kind!r}; expected {', '.join(GGUF_KINDS)}.{did_you_mean(kind, GGUF_KINDS)}")
    folder, destination = find_finished(source), Path(destination).expanduser()
    if destination.suffix != ".gguf" or destination.is_dir():
        raise ValueError(f"{destination} is not the name of a GGUF file; expected a name that ends in .gguf.")
    check_destination(destination, folder, force)
    model, tokenizer, merged = read_source(folder, merge, base)
    if model.config.scores:
        raise ValueError(f"{folder} is a reward model, which llama.cpp cannot run. Export it as a folder.")
    family = gguf_family(model, folder)
    architecture = family.architecture
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, which a GGUF file needs.")
    vocabulary = gguf_vocabulary(tokenizer.folder, tokenizer, model.config.vocab_size)
    metadata = _metadata(model, family, kind, destination.stem, tokenizer, vocabulary)
    entries = {**gguf_entries(model.named_parameters(), model, family, kind), **_rope_divisors(model)}
    endings = {name.split(".", 2)[-1] if name.startswith("blk.") else name for name in entries}
    if unread := sorted(endings & (OPTIONAL - family.optional)):
        raise ValueError(
            f"{folder} needs the tensors {', '.join(unread)}, which llama.cpp's architecture {architecture} does not read."
        )
    needed_bytes = sum(entry.num_bytes for entry in entries.values()) + small_files_bytes(tokenizer)

    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination, on_disk=True) as temporary, room_for(needed_bytes, destination):
        write_gguf(gguf, temporary, architecture, metadata, entries)
    num_wider = sum(kind == "q8_0" and entry.kind == "f16" for entry in entries.values())
    wider = f" ({num_wider} tensors as f16, because their rows are not multiples of {_Q8_BLOCK})" if num_wider else ""
    size = f"{destination.stat().st_size / 1e9:.3g} GB"
    details = f"architecture {architecture}, {kind}{wider}, {len(entries)} tensors, {size}. Try: llama-cli -m FILE"
    return Exported(folder, destination, details, merged)


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("--gguf needs the package gguf. Install it: pip install 'lean-ft[gguf]'") from None
    return gguf


def gguf_family(model: Decoder, folder: Path) -> GGUFFamily:
    """Return the row of `GGUF_FAMILIES`. Raises ValueError if llama.cpp would compute something else."""
    config, name = model.source.config, model.source.config["model_type"]
    if name not in GGUF_FAMILIES:
        raise ValueError(
            f"{folder}: --gguf supports the families {', '.join(GGUF_FAMILIES)}, but this is {name}. Export a Hugging Face "
            "folder (without --gguf) and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    family, layers = GGUF_FAMILIES[name], model.config.layers
    if any(layer.window is not None for layer in layers):
        raise ValueError(
            f"{folder}: sliding_window is {config['sliding_window']}, but llama.cpp's architecture {family.architecture} has "
            "no sliding window. Texts longer than the window would give other results than in training."
        )
    without_rope = [i for i, layer in enumerate(layers) if layer.rope is None]
    every = family.rope_every
    if without_rope != ([] if every is None else list(range(every - 1, len(layers), every))):
        raise ValueError(
            f"{folder}: the layers {without_rope} have no rotary embedding, but llama.cpp's architecture {family.architecture} "
            f"omits it in {'no layer' if every is None else f'every {every}th layer'}."
        )
    facts = model.config
    heads = facts.num_heads * facts.head_dim
    for found, expected, what in (
        (facts.activation, family.activation, "the activation"),
        (facts.tied_embeddings, family.tied, "tie_word_embeddings"),
        (heads, facts.hidden_size if family.heads_fill_hidden else None, "the number of features of all heads"),
    ):
        if expected is not None and found != expected:
            raise ValueError(
                f"{folder}: {what} is {found}, but llama.cpp's architecture {family.architecture} always has {expected}."
            )
    if (scaling := _rope(model).scaling) not in ("default", "linear", "llama3"):
        raise ValueError(f"{folder}: --gguf does not support the rope scaling {scaling!r}.")
    return family


def _rope(model: Decoder) -> RopeConfig:
    """Return the rotary settings, which all layers of these families share."""
    (rope,) = {layer.rope for layer in model.config.layers if layer.rope is not None}
    return rope


def _metadata(
    model: Decoder, family: GGUFFamily, kind: str, name: str, tokenizer: Tokenizer, vocabulary: GGUFVocabulary
) -> dict[str, Any]:
    """Return all metadata by key. Floats are stored in 32 bits."""
    config, rope, architecture = model.config, _rope(model), family.architecture
    of_architecture: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": int(config.head_dim * rope.rotary_fraction),
        "rope.freq_base": float(rope.theta),
        "vocab_size": config.vocab_size,
    }
    of_architecture |= {key: float(getattr(config, field)) for key, field in family.numbers.items()}
    if rope.scaling == "linear":
        of_architecture |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    of_tokenizer: dict[str, Any] = {
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "tokens": vocabulary.tokens,
        "token_type": vocabulary.types,
        "add_bos_token": tokenizer.adds_bos,
        "add_eos_token": tokenizer.adds_eos,
    }
    if vocabulary.model == "llama":
        of_tokenizer |= {"scores": vocabulary.scores, "add_space_prefix": vocabulary.add_space_prefix}
    else:
        of_tokenizer["merges"] = vocabulary.merges
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    # Not tokenizer.pad_id, which may be any token if the tokenizer names none.
    for key, special in (("unknown_token_id", "unk_token"), ("padding_token_id", "pad_token")):
        token = tokenizer.special_tokens.get(special)
        ids[key] = None if token is None else tokenizer.token_id(token)
    of_tokenizer |= {key: token_id for key, token_id in ids.items() if token_id is not None}
    metadata: dict[str, Any] = {"general.name": name, "general.file_type": GGUF_KINDS[kind]}
    if kind == "q8_0":
        metadata["general.quantization_version"] = 2
    metadata |= {f"{architecture}.{key}": value for key, value in of_architecture.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in of_tokenizer.items()}
    for template_name, template in tokenizer.chat_templates.items():
        metadata["tokenizer.chat_template" + ("" if template_name == "default" else f".{template_name}")] = template
    if named := [other for other in tokenizer.chat_templates if other != "default"]:
        metadata["tokenizer.chat_templates"] = named
    return metadata


def gguf_entries(
    tensors: Iterable[tuple[str, Tensor]], model: Decoder, family: GGUFFamily, kind: str
) -> dict[str, Entry]:
    """Return by the names of the file: the model's parameters, or tensors with the names and the rows of parameters."""
    gguf = gguf_package()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture.upper()], model.config.num_layers)
    heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads} if family.interleaved else {}
    entries = {}
    for name, parameter in tensors:
        module, _, ending = name.rpartition(".")
        tensor, num_heads = parameter.detach(), heads.get(module.rpartition(".")[2])
        if family.norm_offset and "norm" in module:
            tensor = tensor.float() + family.norm_offset
        entries[f"{names[module]}.{ending}"] = Entry(tensor, _stored_kind(tensor, kind), num_heads)
    return entries


def _rope_divisors(model: Decoder) -> dict[str, Entry]:
    """Return the tensor by which llama.cpp divides the frequencies of Llama 3's rotary embedding."""
    rope = _rope(model)
    if rope.scaling != "llama3":
        return {}
    plain, scaled = (SCALINGS[scaling](rope, model.config.head_dim) for scaling in ("default", "llama3"))
    return {"rope_freqs.weight": Entry(plain / scaled, "f32")}


def _stored_kind(tensor: Tensor, kind: str) -> str:
    if tensor.ndim == 1:
        return "f32"
    return "f16" if kind == "q8_0" and tensor.shape[-1] % _Q8_BLOCK else kind


def write_gguf(gguf: Any, file: Path, architecture: str, metadata: dict[str, Any], entries: dict[str, Entry]) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, entry in entries.items():
        stored, shape, dtype = gguf.GGMLQuantizationType[entry.kind.upper()], tuple(entry.tensor.shape), np.float32
        if entry.kind == "q8_0":
            shape, dtype = gguf.quant_shape_to_byte_shape(shape, stored), np.uint8
        writer.add_tensor_info(name, shape, np.dtype(dtype), entry.num_bytes, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries.values():
        writer.write_tensor_data(_encode(gguf, _interleave(entry.tensor, entry.num_heads), entry.kind))
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _interleave(tensor: Tensor, num_heads: int | None) -> Tensor:
    """Make rows i and i + head_dim / 2 of each head neighbors."""
    if num_heads is None:
        return tensor
    return tensor.view(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _encode(gguf: Any, tensor: Tensor, kind: str) -> np.ndarray:
    """Return the data of a tensor as stored in the file."""
    if kind == "f32":
        return tensor.float().numpy()
    if kind == "f16":
        if not bool((converted := tensor.half()).isfinite().all()):
            raise ValueError("a weight is above 65,504, which float16 cannot hold. Choose --gguf bf16 or f32.")
        return converted.numpy()
    if kind == "bf16":
        return tensor.to(torch.bfloat16).view(torch.uint16).numpy()
    quantized = gguf.GGMLQuantizationType.Q8_0
    rows = [gguf.quants.quantize(rows.float().numpy(), quantized) for rows in tensor.split(_ROWS)]
    return np.concatenate(rows)
