"""Export a model as one GGUF file, for llama.cpp and programs based on it.

Tensors are written one at a time, so the peak memory is the model plus twice its largest tensor. For the architecture `llama`,
llama.cpp's rotary embedding pairs neighboring features of a head, where Hugging Face pairs features i and i + head_dim / 2, so
the rows of the query and key projections are reordered.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's tensor names and metadata for these architectures.
"""

import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lean_ft.export.gguf_calibration import calibrate, check_importance, compare, read_imatrix
from lean_ft.export.gguf_families import GGUF_FAMILIES, STORED, GGUFFamily
from lean_ft.export.gguf_mixtures import GGUF_MIXTURES, GGUF_REFUSED, mixer_metadata, mixer_of, mixture_metadata
from lean_ft.export.gguf_quants import FORMATS, Mix, num_bytes, quantize
from lean_ft.export.gguf_vocabulary import APPROXIMATED, GGUFVocabulary, gguf_vocabulary
from lean_ft.export.ollama import modelfile
from lean_ft.export.places import Exported, check_destination, read_source, room_for
from lean_ft.models import Decoder
from lean_ft.models.config import DecoderConfig, MixerConfig, MixtureConfig
from lean_ft.models.names_on_disk import module_on_disk
from lean_ft.models.rope import SCALINGS, RopeConfig
from lean_ft.quantize import mean_loss
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.checkpoint import small_files_bytes
from lean_ft.training.finished_models import find_finished

# How matrices are stored -> llama.cpp's LlamaFileType. Vectors (norms, biases) are always float32.
GGUF_KINDS = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q4_k_m": 15, "q4_0": 2, "iq4_nl": 25, "mxfp4": 38,
}  # fmt: skip
_FLOATS = ("f32", "f16", "bf16")
_WEIGHED = ("q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl")  # kinds that use the importance of input features
# Fields of DecoderConfig that every architecture stores, or that change no number beyond rounding.
_STORED = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "layers", "max_positions", "norm_eps",
    "initializer_range", "embedding_multiplier_in_weight_dtype",
})  # fmt: skip
_STORED_OF_ROPE = {"theta", "head_dim", "rotary_fraction", "interleaved", "in_float32"}  # fields of RopeConfig
# The fields that each rotary scaling stores.
_SCALING = {
    "linear": {"scaling", "factor"},
    "yarn": {"scaling", "factor", "original_max_positions", "attention_factor"},
    "llama3": {"scaling", "factor", "original_max_positions", "low_freq_factor", "high_freq_factor"},
    "longrope": {"scaling", "original_max_positions", "attention_factor", "short_factors", "long_factors", "factor"},
    "proportional": {"scaling", "nonzero_fraction"},
}
# Fields of MixtureConfig that change no number of a file beyond rounding.
_STORED_OF_MIXTURE = {
    "router_name", "input_first", "peft_expects_input_first", "gates_interleaved", "shared_name", "shared_is_fused",
    "correction_is_row", "router_in_float32", "router_weight_in_float32", "router_aux_loss_coef",
}  # fmt: skip
_FAMILIES = ChainMap(GGUF_MIXTURES, GGUF_FAMILIES)
_STANDSTILL = 1e30  # a divisor that makes a frequency 0


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
    if model.config.scores:
        raise ValueError(f"{folder} is a reward model, which llama.cpp cannot run. Export it as a folder.")
    family = gguf_family(model, folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, which a GGUF file needs.")
    vocabulary = gguf_vocabulary(tokenizer.folder, tokenizer, model.config.vocab_size)
    metadata = _metadata(model, family, kind, destination.stem, tokenizer, vocabulary)
    text = modelfile(model, tokenizer, destination.name) if ollama else None
    shapes = {name: tuple(tensor.shape) for name, tensor in _all_tensors(model, family, "meta")}
    mix = _mix(kind, model, family, has_importance=option is not None)
    entries = {name: Entry(shape, mix.kind_of(name, shape)) for name, shape in shapes.items()}
    calibration = None
    if data is not None:
        calibration = calibrate(model, tokenizer, data, lambda parameters: gguf_tensors(parameters, model, family))
        importance = calibration.importance
    if option is not None:
        weighed = {name: e.shape for name, e in entries.items() if name.startswith("blk.") and e.kind in FORMATS}
        importance = check_importance(importance, weighed, f"{option} {imatrix or data}")
    needed_bytes = sum(entry.num_bytes for entry in entries.values()) + small_files_bytes(tokenizer)

    destination.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(destination, on_disk=True) as temporary, room_for(needed_bytes, destination):
        write_gguf(gguf, temporary, family.architecture, metadata, entries, _all_tensors(model, family), importance)
        places = None if calibration is None else calibration.places
        errors = {} if kind in _FLOATS else compare(temporary, _all_tensors(model, family), places)
        after = None if calibration is None else mean_loss(model, calibration.batches)
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
        details += (
            f"\nllama.cpp's splitting rule {vocabulary.pre} differs from this tokenizer's at combining marks and at capital letters "
            "outside ASCII, so words with them get other ids there."
        )
    if not _ropes(model.config)[0].truncate:
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


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("--gguf needs the package gguf. Install it: pip install 'lean-ft[gguf]'") from None
    return gguf


def gguf_family(model: Decoder, folder: Path) -> GGUFFamily:
    """Return the row of `GGUF_FAMILIES`. Raises ValueError if llama.cpp would compute something else."""
    name = model.source.config["model_type"]
    if name in GGUF_REFUSED:
        raise ValueError(f"{folder}: llama.cpp does not compute {name} as it was trained: {GGUF_REFUSED[name]}.")
    if name not in _FAMILIES:
        raise ValueError(
            f"{folder}: --gguf supports the families {', '.join(_FAMILIES)}, but this is {name}. Export a Hugging Face "
            "folder (without --gguf) and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    family = _FAMILIES[name]
    if family.architecture_of is not None:
        family = family._replace(architecture=family.architecture_of(model.config))
    for place, found, expected in _differences(model.config, family):
        raise ValueError(
            f"{folder}: {place} is {found}, but llama.cpp's architecture {family.architecture} always computes with {expected}."
        )
    return family


def _differences(config: DecoderConfig, family: GGUFFamily) -> Iterator[tuple[str, Any, Any]]:
    """Yield each fact of a model that its file cannot store and that llama.cpp computes differently: name, value, llama.cpp's."""
    yield from _unlike(config, _STORED | family.shown | {*family.numbers.values()}, family.fixed, config)
    yield from ((name, None, "a number") for name in family.numbers.values() if getattr(config, name) is None)
    full, windowed = _ropes(config)
    windows = {layer.window for layer in config.layers if layer.window is not None}
    stored = frozenset({"window"} if len(windows) < 2 and family.windows(config) else ())
    for i, layer in enumerate(config.layers):
        rope = (windowed if layer.window else full) if layer.has_attention and family.has_rope(config, i) else None
        fixed = {name: fact(config, i) if callable(fact) else fact for name, fact in family.layers.items()}
        for name, found, expected in _unlike(layer, stored, {"rope": rope, **fixed}, config):
            yield f"{name} of layer {i}", _brief(found), _brief(expected)
    parts = {"experts": (config.mixture, family.mixture), "recurrent layers": (mixer_of(config), family.mixer)}
    for part, (facts, fixed) in parts.items():
        if facts is not None:
            for name, found, expected in _unlike(facts, _STORED_OF_MIXTURE, fixed, config):
                yield f"{name} of the {part}", found, expected
        elif fixed and part not in family.optional:
            yield f"the number of {part}", 0, "at least 1"
    if full.scaling not in family.scalings:
        yield "the rotary scaling", full.scaling, " or ".join(sorted(family.scalings))
    yield from _unlike(full, _STORED_OF_ROPE | _SCALING.get(full.scaling, set()), family.rope, config)
    if family.pairs_neighbors < full.interleaved or (config.latent is not None and not full.interleaved):
        yield "the rotary embedding", full, "other pairs of features"
    same: dict[str, Any] = {name: getattr(full, name) for name in _STORED_OF_ROPE}
    same |= {"theta": windowed.theta, "head_dim": windowed.head_dim}
    if windowed != (replace(full, **same) if family.scaled_windows else RopeConfig(**same)):
        yield (
            "the rotary scaling of layers with a window",
            windowed.scaling,
            full.scaling if family.scaled_windows else "none",
        )


def _unlike(
    facts: Any, stored: Set[str], fixed: Mapping[str, Any], config: DecoderConfig
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of a configuration that are not as in `fixed` or, without a value there, neither stored nor default."""
    for field in fields(facts):
        if field.name in stored and field.name not in fixed:
            continue
        found, expected = getattr(facts, field.name), fixed.get(field.name, field.default)
        expected = expected(config) if callable(expected) else expected
        close = isinstance(found, float) and isinstance(expected, float) and math.isclose(found, expected, rel_tol=1e-6)
        if expected is not MISSING and expected is not STORED and found != expected and not close:
            yield field.name, found, expected


def _brief(value: Any) -> Any:
    """The name of a part of a layer in place of its configuration."""
    if isinstance(value, MixtureConfig):
        return "experts"
    return "a recurrent layer" if isinstance(value, MixerConfig) else value


def _ropes(config: DecoderConfig) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary settings of layers without and with a sliding window. If one kind has none, both are the other's."""
    full, windowed = (
        next((layer.rope for layer in config.layers if layer.rope and bool(layer.window) == has_window), None)
        for has_window in (False, True)
    )
    found = full or windowed or RopeConfig(10_000.0)
    return full or found, windowed or found


def _metadata(
    model: Decoder, family: GGUFFamily, kind: str, name: str, tokenizer: Tokenizer, vocabulary: GGUFVocabulary
) -> dict[str, Any]:
    """Return all metadata by key. Floats are stored in 32 bits."""
    config, architecture, (rope, windowed) = model.config, family.architecture, _ropes(model.config)
    of_architecture: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": _of_layers(
            (layer.intermediate_size or config.intermediate_size) * layer.has_mlp for layer in config.layers
        ),
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": _of_layers(
            config.num_kv_heads_of(i) * layer.has_attention for i, layer in enumerate(config.layers)
        ),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.layer_norm_{'' if config.norm_centered else 'rms_'}epsilon": float(config.norm_eps),
        "rope.dimension_count": int(config.head_dim * rope.rotary_fraction),
        "rope.freq_base": float(rope.theta),
        "vocab_size": config.vocab_size,
    }
    of_architecture |= {key: float(getattr(config, field)) for key, field in family.numbers.items()}
    of_architecture |= mixture_metadata(config, family) | mixer_metadata(config)
    if any(windows := [layer.window or 0 for layer in config.layers]):
        of_architecture |= {
            "attention.sliding_window": max(windows),
            "attention.sliding_window_pattern": [window > 0 for window in windows],
            "rope.freq_base_swa": float(windowed.theta),
        }
    if rope.scaling in ("linear", "yarn", "longrope"):
        of_architecture |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling in ("yarn", "longrope"):
        of_architecture["rope.scaling.original_context_length"] = int(rope.original_max_positions)
    if rope.scaling == "yarn":
        # llama.cpp multiplies the factor of the yarn paper by this number.
        of_architecture["rope.scaling.attn_factor"] = rope.attention_factor / (0.1 * math.log(rope.factor) + 1.0)
    if rope.query_growth:
        of_architecture["attention.temperature_scale"] = float(rope.query_growth)
    of_architecture |= family.metadata(model)
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
    if kind not in _FLOATS:
        metadata["general.quantization_version"] = 2
    for key, value in of_architecture.items():
        metadata[key if key.startswith("xielu.") else f"{architecture}.{key}"] = value  # as llama.cpp names them
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in of_tokenizer.items()}
    for template_name, template in tokenizer.chat_templates.items():
        metadata["tokenizer.chat_template" + ("" if template_name == "default" else f".{template_name}")] = template
    if named := [other for other in tokenizer.chat_templates if other != "default"]:
        metadata["tokenizer.chat_templates"] = named
    return metadata


def _of_layers(numbers: Iterable[int]) -> Any:
    """One number if that of all layers is equal, otherwise a list."""
    numbers = list(numbers)
    return numbers if len(set(numbers)) > 1 else numbers[0]


def gguf_tensors(
    parameters: Iterable[tuple[str, Tensor]], model: Decoder, family: GGUFFamily, device: str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors, or others with the names and rows of parameters, by the names of the file.

    On the device `meta` they have only shapes; otherwise one at a time is in memory.
    """
    config, (rope, _) = model.config, _ropes(model.config)
    names = _names(family.architecture, config.num_layers)
    reordered = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
    for name, parameter in parameters:
        values = parameter.detach().to(device)
        part = next((part for part in family.changes if part in name), "")
        changed = family.changes[part](values, config) if part else values
        for other, tensor in changed.items() if isinstance(changed, Mapping) else [(part, changed)]:
            place = name.replace(part, other)
            num_heads = next((number for part, number in reordered.items() if part in place), None)
            if num_heads is not None and family.pairs_neighbors and not rope.interleaved:
                tensor = _interleave(tensor, num_heads, rope.rotary_fraction)
            places = module_on_disk(model.source.config, place), place
            places = places[::-1] if isinstance(changed, Mapping) else places  # a name that the row gives comes first
            yield next(filter(None, (_name_in_file(names, place) for place in places))), tensor


def _name_in_file(names: Any, name: str) -> str | None:
    """The file's name of a tensor, which llama.cpp's table lists with or without its ending; None if it lists neither."""
    module, _, ending = name.rpartition(".")
    found = names.get_name(name)
    return f"{names[module]}.{ending}" if found is None and module in names else found


@lru_cache(maxsize=1)
def _names(name: str, num_layers: int) -> Any:
    """Return a map from Hugging Face's names of modules to those of an architecture of llama.cpp."""
    gguf = gguf_package()
    (architecture,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    return gguf.get_tensor_name_map(architecture, num_layers)


def _all_tensors(model: Decoder, family: GGUFFamily, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    yield from gguf_tensors(model.state_dict().items(), model, family, device)
    rope, _ = _ropes(model.config)
    if rope.scaling in ("llama3", "proportional"):
        # llama.cpp divides each frequency by this tensor.
        size = rope.head_dim or model.config.head_dim
        plain, scaled = (SCALINGS[scaling](rope, size) for scaling in ("default", rope.scaling))
        yield "rope_freqs.weight", (plain / scaled).clamp(max=_STANDSTILL).to(device)
    if rope.scaling == "longrope":
        for length, divisors in (("long", rope.long_factors), ("short", rope.short_factors)):
            yield f"rope_factors_{length}.weight", torch.tensor(divisors, device=device)


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


def _interleave(tensor: Tensor, num_heads: int, rotary_fraction: float) -> Tensor:
    """Make rows i and i + R / 2 of each head neighbors, where R are the rotated features."""
    heads = tensor.unflatten(0, (num_heads, -1))
    size = int(heads.shape[1] * rotary_fraction)
    turned = heads[:, :size].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, heads[:, size:]), 1).flatten(0, 1)


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
