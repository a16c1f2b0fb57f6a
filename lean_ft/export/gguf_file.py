"""Export a model as one GGUF file, for llama.cpp and programs based on it.

Tensors are written one at a time, so the peak memory is the model plus twice its largest tensor.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's tensor names and metadata for these architectures.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lean_ft.export.gguf_calibration import calibrate, check_importance, compare, read_back, read_imatrix
from lean_ft.export.gguf_check import gguf_family, ropes
from lean_ft.export.gguf_contents import all_tensors, architecture_metadata, gguf_package
from lean_ft.export.gguf_families import GGUFFamily
from lean_ft.export.gguf_quants import FORMATS, Mix, num_bytes, quantize
from lean_ft.export.gguf_vocabulary import APPROXIMATED, GGUFVocabulary, gguf_vocabulary
from lean_ft.export.ollama import modelfile
from lean_ft.export.places import Exported, check_destination, read_source, room_for
from lean_ft.generation import stop_ids
from lean_ft.models import Decoder
from lean_ft.models.config_json import kind_of_scores
from lean_ft.quantize import mean_loss
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.chat_template import without_generation_tags
from lean_ft.training.checkpoint import small_files_bytes
from lean_ft.training.finished_models import find_finished

# How matrices are stored -> llama.cpp's LlamaFileType. Vectors (norms, biases) are always float32.
GGUF_KINDS = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q4_k_m": 15, "q4_0": 2, "iq4_nl": 25, "mxfp4": 38,
}  # fmt: skip
_FLOATS = ("f32", "f16", "bf16")
_WEIGHED = ("q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl")  # kinds that use the importance of input features


class Entry(NamedTuple):
    """A tensor to store."""

    shape: tuple[int, ...]
    kind: str

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.kind, self.shape)


def export_gguf(
    source: str | Path,
    destination: str | Path,
    kind: str = "bf16",
    force: bool = False,
    merge: bool = False,
    base: str | Path | None = None,
    imatrix: str | Path | None = None,
    data: str | None = None,
    ollama: bool = False,
) -> Exported:
    """Write the model of a checkpoint, run directory or model folder to the GGUF file `destination`.

    `kind` is one of `GGUF_KINDS`; `merge` and `base` are as in `export_folder`. The importance of inputs for quantized kinds
    comes from `imatrix`, a file of llama.cpp, or from a forward pass over the rows of `data`, which also gives the perplexity
    before and after. `ollama` also writes a Modelfile.

    Raises ValueError if the source is missing or damaged, the destination exists, llama.cpp would compute the model or its
    tokenizer differently, importance is given for a kind that does not use it or for another model, or the `gguf` package is
    missing; OSError if the disk is full.
    """
    gguf = gguf_package()
    if kind not in GGUF_KINDS:
        raise ValueError(f"--gguf is {kind!r}; expected {', '.join(GGUF_KINDS)}.{did_you_mean(kind, GGUF_KINDS)}")
    option = "--imatrix" if imatrix is not None else "--calibrate" if data is not None else None
    if option is not None and kind not in _WEIGHED:
        raise ValueError(f"{option} has no effect on {kind}. Remove it, or choose --gguf {', '.join(_WEIGHED)}.")
    importance = {} if imatrix is None else read_imatrix(Path(imatrix).expanduser())
    folder, destination = gguf_destination(source, destination, force)
    for_ollama = destination.with_name("Modelfile")
    if ollama and (for_ollama.is_dir() or (for_ollama.exists() and not force)):
        raise ValueError(f"{for_ollama} exists. Choose a destination in another folder, or overwrite it with --force.")
    model, tokenizer, merged = read_source(folder, merge, base)
    if model.config.num_scores:
        kind = kind_of_scores(model.config.num_scores)
        raise ValueError(f"{folder} is {kind}, which llama.cpp cannot run. Export it as a folder.")
    family = gguf_family(model, folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, which a GGUF file needs.")
    vocabulary = gguf_vocabulary(tokenizer.folder, tokenizer, model.config.vocab_size)
    metadata = _metadata(model, family, kind, destination.stem, tokenizer, vocabulary)
    text = modelfile(model, tokenizer, destination.name) if ollama else None
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(model, family, "meta")}
    mix = _mix(kind, model, family, has_importance=option is not None)
    entries = {name: Entry(shape, mix.kind_of(name, shape)) for name, shape in shapes.items()}
    calibration = None
    if data is not None:
        calibration = calibrate(model, family, tokenizer, data)
        importance = calibration.importance
    if option is not None:
        weighed = {name: e.shape for name, e in entries.items() if name.startswith("blk.") and e.kind in FORMATS}
        importance = check_importance(importance, weighed, f"{option} {imatrix or data}")
    needed_bytes = sum(entry.num_bytes for entry in entries.values()) + small_files_bytes(tokenizer)

    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination, on_disk=True) as temporary, room_for(needed_bytes, destination):
        write_gguf(gguf, temporary, family.architecture, metadata, entries, all_tensors(model, family), importance)
        errors = {} if kind in _FLOATS else compare(temporary, all_tensors(model, family))
        after = None
        if calibration is not None:
            read_back(temporary, model, family)
            after = mean_loss(model, calibration.batches)
    kinds = Counter(entry.kind for entry in entries.values() if len(entry.shape) > 1)
    mixed = f" ({', '.join(f'{number} tensors as {one}' for one, number in kinds.items())})" if len(kinds) > 1 else ""
    size = f"{destination.stat().st_size / 1e9:.3g} GB"
    command = "llama-cli -m FILE"
    if text is not None:
        with write_whole(for_ollama, on_disk=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
        command = f"ollama create NAME -f {for_ollama}"
    details = f"architecture {family.architecture}, {kind}{mixed}, {len(entries)} tensors, {size}. Try: {command}"
    if errors:
        details += f"\nrelative error of the weights: {', '.join(f'{one} {e:.2%}' for one, e in errors.items())}"
    if calibration is not None and after is not None:
        details += f"\nperplexity on {data}: {math.exp(calibration.loss):.4g} before, {math.exp(after):.4g} after"
    if vocabulary.pre in APPROXIMATED:
        where = APPROXIMATED[vocabulary.pre]
        details += f"\nllama.cpp's splitting rule {vocabulary.pre} differs from this tokenizer's {where}, so ids may differ there."
    if not ropes(model.config)[0].truncate:
        details += "\nllama.cpp rounds the bounds of yarn's frequencies and this model does not, so its log-probabilities differ slightly."
    return Exported(folder, destination, details, merged)


def _mix(kind: str, model: Decoder, family: GGUFFamily, has_importance: bool) -> Mix:
    config = model.config
    return Mix(
        kind,
        family.architecture,
        num_layers=config.num_layers,
        heads_per_group=config.num_heads // config.num_kv_heads,
        num_experts=0 if config.mixture is None else config.mixture.num_experts,
        is_tied=model.head is None,
        has_importance=has_importance,
    )


def gguf_destination(source: str | Path, destination: str | Path, force: bool) -> tuple[Path, Path]:
    """Return the source's folder and the path of the file. Raises ValueError unless the file may be written."""
    folder, file = find_finished(source), Path(destination).expanduser()
    if file.suffix != ".gguf" or file.is_dir():
        raise ValueError(f"{file} is not the name of a GGUF file; expected a name that ends in .gguf.")
    check_destination(file, folder, force)
    return folder, file


def _metadata(
    model: Decoder, family: GGUFFamily, kind: str, name: str, tokenizer: Tokenizer, vocabulary: GGUFVocabulary
) -> dict[str, Any]:
    """Return all metadata by key. Floats are stored in 32 bits."""
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
    # llama.cpp stops at three tokens. Those that end a turn in the chat template come first.
    ends = sorted(
        stop_ids(model, tokenizer) - {tokenizer.eos_id}, key=lambda end: (end not in tokenizer.turn_ends, end)
    )
    ids |= dict(zip(("eot_token_id", "eom_token_id"), ends, strict=False))
    # Not tokenizer.pad_id, which may be any token if the tokenizer names none.
    for key, special in (("unknown_token_id", "unk_token"), ("padding_token_id", "pad_token")):
        token = tokenizer.special_tokens.get(special)
        ids[key] = None if token is None else tokenizer.token_id(token)
    of_tokenizer |= {key: token_id for key, token_id in ids.items() if token_id is not None}
    metadata: dict[str, Any] = {"general.name": name, "general.file_type": GGUF_KINDS[kind]}
    if kind not in _FLOATS:
        metadata["general.quantization_version"] = 2
    for key, value in architecture_metadata(model, family).items():
        metadata[key if key.startswith("xielu.") else f"{family.architecture}.{key}"] = value  # as llama.cpp names them
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in of_tokenizer.items()}
    for template_name, template in tokenizer.chat_templates.items():
        metadata["tokenizer.chat_template" + ("" if template_name == "default" else f".{template_name}")] = (
            without_generation_tags(template)
        )
    if named := [other for other in tokenizer.chat_templates if other != "default"]:
        metadata["tokenizer.chat_templates"] = named
    return metadata


def write_gguf(
    gguf: Any,
    file: Path,
    architecture: str,
    metadata: dict[str, Any],
    entries: dict[str, Entry],
    tensors: Iterable[tuple[str, Tensor]],
    importance: Mapping[str, Tensor] = {},
) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, entry in entries.items():
        stored, shape, dtype = gguf.GGMLQuantizationType[entry.kind.upper()], entry.shape, np.float32
        if entry.kind in FORMATS:
            shape, dtype = gguf.quant_shape_to_byte_shape(shape, stored), np.uint8
        writer.add_tensor_info(name, shape, np.dtype(dtype), entry.num_bytes, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors:
        writer.write_tensor_data(_encode(tensor, entries[name].kind, importance.get(name)))
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


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
