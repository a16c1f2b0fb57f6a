"""A checkpoint as one GGUF file, for llama.cpp and what is built on it.

Tensors are written one at a time, so the peak is the model and its largest tensor twice. llama.cpp turns
neighbouring features of a head where Hugging Face turns feature i and i + head_dim / 2, so for the architecture `llama`
the rows of the query and key projections are reordered. The file is read back with the `gguf` package before it gets
its name: every tensor, put back in order, must be the model's, and every number of the metadata what was meant.

Source: the GGUF specification (ggml, docs/gguf.md) and llama.cpp's tensor names and metadata for these
architectures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lean_ft.export.gguf_vocabulary import GGUFVocabulary, gguf_vocabulary
from lean_ft.export.places import check_destination, read_source, room_for
from lean_ft.models import Decoder
from lean_ft.models.rope import SCALINGS, RopeConfig
from lean_ft.peft import MergeReport
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.checkpoint import small_files_bytes
from lean_ft.training.finished_models import find_finished

# How matrices are stored, with the number of llama.cpp's LlamaFileType. Vectors (norms, biases) are always float32.
GGUF_KINDS = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
# model_type to llama.cpp's architecture, and whether that turns neighbouring features of a head.
_ARCHITECTURES = {"llama": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False)}
_ROWS = 4096  # of a matrix that are encoded at a time
_Q8_BLOCK = 32  # numbers that share a scale
# Half a step of the 127 to either side, and the scale's own rounding to float16, as shares of a block's largest number.
_Q8_ERROR = 0.5 / 127 + 2.0**-10


@dataclass(frozen=True)
class ExportedGGUF:
    """What was written."""

    source: Path
    file: Path
    kind: str
    architecture: str
    num_tensors: int
    num_bytes: int
    kept_wider: list[str]
    """Matrices stored as f16, since q8_0 takes rows in blocks of 32."""
    merged: MergeReport | None = None
    """What merging did, where the source is an adapter."""

    def __str__(self) -> str:
        wider = f" ({len(self.kept_wider)} tensors as f16: their rows are no multiple of 32)" if self.kept_wider else ""
        merged = f"{self.merged}.\n" if self.merged else ""
        return (
            f"{merged}exported {self.source} to {self.file}: architecture {self.architecture}, {self.kind}{wider}, "
            f"{self.num_tensors} tensors, {self.num_bytes / 1e9:.3g} GB.\n"
            "Read back: every tensor and the metadata are the model's. Try: llama-cli -m FILE"
        )


def export_gguf(
    source: str | Path,
    destination: str | Path,
    kind: str = "bf16",
    force: bool = False,
    merge: bool = False,
    base: str | Path | None = None,
) -> ExportedGGUF:
    """Writes the model of a checkpoint, run directory or model folder to the GGUF file `destination`.

    `merge` and `base` are as in `export_folder`; `kind` is f32, f16, bf16 or q8_0. Raises ValueError where the source is missing or damaged, the destination taken,
    the family, its settings or its tokenizer one that llama.cpp computes otherwise, or the `gguf` package is not
    installed; OSError where the disk is full; RuntimeError where the file does not read back as what was meant.
    """
    gguf = _package()
    if kind not in GGUF_KINDS:
        raise ValueError(f"--gguf is {kind!r}; expected {', '.join(GGUF_KINDS)}.{did_you_mean(kind, GGUF_KINDS)}")
    folder, destination = find_finished(source), Path(destination).expanduser()
    if destination.suffix != ".gguf" or destination.is_dir():
        raise ValueError(f"{destination} is not the name of a GGUF file; expected one that ends in .gguf.")
    check_destination(destination, folder, force)
    model, tokenizer, merged = read_source(folder, merge, base)
    if model.config.scores:
        raise ValueError(
            f"{folder} is a reward model, and a GGUF file here is of a language model: llama.cpp would find no logits. Export "
            "it as a folder."
        )
    architecture, interleaved = _architecture(model, folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, and a GGUF file holds one.")
    vocabulary = gguf_vocabulary(tokenizer.folder, tokenizer, model.config.vocab_size)
    metadata = _metadata(model, architecture, kind, destination.stem, tokenizer, vocabulary)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], model.config.num_layers)
    tensors = dict(_tensors(model, names, interleaved))
    kinds = {name: _stored_kind(tensor, kind) for name, (tensor, _) in tensors.items()}
    needed_bytes = sum(_num_bytes(tensor, kinds[name]) for name, (tensor, _) in tensors.items()) + small_files_bytes(
        tokenizer
    )

    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination, on_disk=True) as temporary:
        with room_for(needed_bytes, destination):
            writer = gguf.GGUFWriter(temporary, architecture)
            for key, value in metadata.items():
                _add(writer, key, value)
            for name, (tensor, _) in tensors.items():
                stored, shape = gguf.GGMLQuantizationType[kinds[name].upper()], tuple(tensor.shape)
                in_bytes = kinds[name] == "q8_0"
                shape = gguf.quant_shape_to_byte_shape(shape, stored) if in_bytes else shape
                numpy_dtype = np.dtype(np.uint8 if in_bytes else np.float32)
                writer.add_tensor_info(name, shape, numpy_dtype, _num_bytes(tensor, kinds[name]), raw_dtype=stored)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, (tensor, num_heads) in tensors.items():
                writer.write_tensor_data(_encode(gguf, _interleave(tensor, num_heads), kinds[name]))
            writer.close()
        _check(gguf, temporary, metadata, tensors, kinds)
    kept_wider = [name for name, stored in kinds.items() if kind == "q8_0" and stored == "f16"]
    num_bytes = destination.stat().st_size
    return ExportedGGUF(folder, destination, kind, architecture, len(tensors), num_bytes, kept_wider, merged)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("--gguf needs the package gguf. Install it: pip install 'lean-ft[gguf]'") from None
    return gguf


def _architecture(model: Decoder, folder: Path) -> tuple[str, bool]:
    """llama.cpp's name of what the model computes. Raises ValueError where it computes something else."""
    config, family = model.source.config, model.source.config["model_type"]
    if family not in _ARCHITECTURES:
        raise ValueError(
            f"{folder}: GGUF is written for the families {', '.join(_ARCHITECTURES)}, and this is {family}. Export a "
            "Hugging Face folder (without --gguf) and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    if any(layer.window is not None for layer in model.config.layers):
        raise ValueError(
            f"{folder}: sliding_window is {config['sliding_window']}, and llama.cpp lets every position of the "
            f"architecture {_ARCHITECTURES[family][0]} see all before it. Texts beyond the window would come out "
            "otherwise than they were trained."
        )
    if (scaling := _rope(model).scaling) not in ("default", "linear", "llama3"):
        raise ValueError(f"{folder}: GGUF is not written for the rope scaling {scaling!r}.")
    return _ARCHITECTURES[family]


def _rope(model: Decoder) -> RopeConfig:
    """The rotary settings, which all layers of these families share."""
    (rope,) = {layer.rope for layer in model.config.layers}
    assert rope is not None
    return rope


def _metadata(
    model: Decoder, architecture: str, kind: str, name: str, tokenizer: Tokenizer, vocabulary: GGUFVocabulary
) -> dict[str, Any]:
    """Everything that the file says beside its tensors, by key. A float is stored in 32 bits."""
    config, rope = model.config, _rope(model)
    metadata: dict[str, Any] = {
        "general.name": name,
        "general.file_type": GGUF_KINDS[kind],
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.context_length": config.max_positions,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{architecture}.rope.dimension_count": config.head_dim,
        f"{architecture}.rope.freq_base": float(rope.theta),
        f"{architecture}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": vocabulary.pre,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.add_bos_token": tokenizer.adds_bos,
        "tokenizer.ggml.add_eos_token": tokenizer.adds_eos,
    }
    if kind == "q8_0":
        metadata["general.quantization_version"] = 2
    if rope.scaling == "linear":
        metadata[f"{architecture}.rope.scaling.type"] = "linear"
        metadata[f"{architecture}.rope.scaling.factor"] = float(rope.factor)
    if vocabulary.model == "llama":
        metadata["tokenizer.ggml.scores"] = vocabulary.scores
        metadata["tokenizer.ggml.add_space_prefix"] = vocabulary.add_space_prefix
    else:
        metadata["tokenizer.ggml.merges"] = vocabulary.merges
    # `padding_token_id` is a token of its own only where the tokenizer names one; lean_ft pads with any.
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    for gguf_name, ours in (("unknown", "unk_token"), ("padding", "pad_token")):
        token = tokenizer.special_tokens.get(ours)
        ids[gguf_name] = None if token is None else tokenizer.token_id(token)
    metadata |= {f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in ids.items() if token_id is not None}
    for template_name, template in tokenizer.chat_templates.items():
        metadata["tokenizer.chat_template" + ("" if template_name == "default" else f".{template_name}")] = template
    if named := [other for other in tokenizer.chat_templates if other != "default"]:
        metadata["tokenizer.chat_templates"] = named
    return metadata


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _tensors(model: Decoder, names: Any, interleaved: bool) -> Iterator[tuple[str, tuple[Tensor, int | None]]]:
    """Name in the file, tensor, and the number of heads where the rows of each are to be interleaved."""
    heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads} if interleaved else {}
    for name, parameter in model.named_parameters():
        module, _, ending = name.rpartition(".")
        yield f"{names[module]}.{ending}", (parameter.detach(), heads.get(module.rpartition(".")[2]))
    rope = _rope(model)
    if rope.scaling == "llama3":
        # What llama.cpp divides each frequency by.
        plain, scaled = (SCALINGS[kind](rope, model.config.head_dim) for kind in ("default", "llama3"))
        yield "rope_freqs.weight", (plain / scaled, None)


def _interleave(tensor: Tensor, num_heads: int | None) -> Tensor:
    """Rows i and i + head_dim / 2 of each head become neighbours."""
    if num_heads is None:
        return tensor
    return tensor.view(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _undo_interleave(tensor: Tensor, num_heads: int | None) -> Tensor:
    if num_heads is None:
        return tensor
    return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _stored_kind(tensor: Tensor, kind: str) -> str:
    if tensor.ndim == 1:
        return "f32"
    return "f16" if kind == "q8_0" and tensor.shape[-1] % _Q8_BLOCK else kind


def _num_bytes(tensor: Tensor, kind: str) -> int:
    if kind == "q8_0":
        return tensor.numel() // _Q8_BLOCK * (_Q8_BLOCK + 2)
    return tensor.numel() * (4 if kind == "f32" else 2)


def _encode(gguf: Any, tensor: Tensor, kind: str) -> np.ndarray:
    """The bytes of a tensor as the file holds them."""
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


def _check(
    gguf: Any,
    file: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[Tensor, int | None]],
    kinds: dict[str, str],
) -> None:
    """Reads the file as any program would; raises RuntimeError where it does not hold what was meant."""
    reader = gguf.GGUFReader(file)
    for key, value in metadata.items():
        field = reader.get_field(key)
        found = None if field is None else field.contents()
        first = value[0] if isinstance(value, list) and value else value
        meant = np.asarray(value, dtype=np.float32).tolist() if isinstance(first, float) else value
        if found != meant:
            raise RuntimeError(f"{file}: {key} was written as {meant!r:.100} and reads back as {found!r:.100}.")
    found_tensors = {tensor.name: tensor for tensor in reader.tensors}
    if found_tensors.keys() != tensors.keys():
        raise RuntimeError(f"{file} reads back with other tensors than were written.")
    for name, (tensor, num_heads) in tensors.items():
        found = found_tensors[name]
        # A head's rows lie together, so only tensors of whole heads, which are small, are put back in order at once.
        step = len(tensor) if num_heads is not None else _ROWS
        for start in range(0, len(tensor), step):
            raw = np.array(found.data[start : start + step])  # a copy: the reader's pages cannot be written to
            numbers = _undo_interleave(torch.from_numpy(gguf.quants.dequantize(raw, found.tensor_type)), num_heads)
            if not _is_stored(numbers, tensor[start : start + step].float(), kinds[name]):
                raise RuntimeError(f"{file}: {name} reads back otherwise than the model has it; nothing was kept.")


def _is_stored(found: Tensor, original: Tensor, kind: str) -> bool:
    if found.shape != original.shape:
        return False
    if kind == "q8_0":
        blocks = original.view(-1, _Q8_BLOCK)
        allowed = blocks.abs().amax(dim=1, keepdim=True) * _Q8_ERROR
        return bool(((found.view(-1, _Q8_BLOCK) - blocks).abs() <= allowed + 2.0**-24 * 127).all())
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    return torch.equal(found, original.to(dtype).float())
