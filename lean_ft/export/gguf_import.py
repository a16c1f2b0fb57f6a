"""Turn a GGUF file into a model folder of the cache: config.json, tokenizer files, and an index of the weights.

The weights stay in the file. `lean_ft.models.gguf_tensors` dequantizes them while they are read, so every command that takes
a model folder takes a GGUF file too. Only the header is read here, with a check of every size, because a damaged file must
not exhaust memory. Token ids are llama.cpp's: text is not normalized, and the space before the first word of a SentencePiece
vocabulary is also added after a control token.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's src/llama-vocab.cpp and src/llama-model.cpp.
"""

import hashlib
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from lean_ft.export.gguf_families import GGUF_FAMILIES, plus_one
from lean_ft.export.gguf_tokenizer import tokenizer_files
from lean_ft.hub.paths import gguf_cache
from lean_ft.models.gguf_tensors import GGUFTensor, num_rows, write_index
from lean_ft.models.hf_format import empty_model, tensors_on_disk
from lean_ft.models.rope import SCALINGS, RopeConfig
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import MAX_JSON_BYTES, write_json

_FORMAT = 2  # of the folder; part of its name
_MAX_ENTRIES = 2**22  # of an array; the largest vocabularies have 600,000 merges
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# The field of config.json that each key of the architecture sets.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_REQUIRED = [key for key in _FIELDS if key not in ("attention.head_count_kv", "attention.key_length", "rope.freq_base")]
_MIXTURE_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Keys that repeat other facts or describe the file.
_REPEATED = {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.finetuned"}
_OF_WINDOWS = {"attention.sliding_window_pattern", "rope.freq_base_swa"}
_SCALING = {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"}


class _Architecture(NamedTuple):
    """The family of an architecture of llama.cpp."""

    model_type: str
    class_name: str
    has_bias_fields: bool = False  # config.json says whether there are biases
    fields: Mapping[str, str] = _FIELDS
    constants: Mapping[str, Any] = {}
    has_windows: bool = False  # Gemma's sliding windows


def _gemma(model_type: str, name: str, **more: str) -> _Architecture:
    fields = {**_FIELDS, "attention.sliding_window": "sliding_window", **more} if more else _FIELDS
    constants = {"attention_bias": False, "hidden_activation" if more else "hidden_act": "gelu_pytorch_tanh"}
    return _Architecture(model_type, f"{name}ForCausalLM", fields=fields, constants=constants, has_windows=bool(more))


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", has_bias_fields=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", constants={"use_sliding_window": False}),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", constants={"attention_bias": False, "use_sliding_window": False}),
    "olmo2": _Architecture("olmo2", "Olmo2ForCausalLM", constants={"attention_bias": False}),
    "smollm3": _Architecture(
        "smollm3", "SmolLM3ForCausalLM",
        constants={"attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "seed_oss": _Architecture(
        "seed_oss", "SeedOssForCausalLM", constants={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
    ),
    "granite": _Architecture(
        "granite", "GraniteForCausalLM", has_bias_fields=True,
        fields={
            **_FIELDS, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
    ),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", constants={"sliding_window": None}),
    "gemma": _gemma("gemma", "Gemma"),
    "gemma2": _gemma(
        "gemma2", "Gemma2",
        attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping",
    ),
    "gemma3": _gemma("gemma3_text", "Gemma3", final_logit_softcapping="final_logit_softcapping"),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        fields={**_FIELDS, **_MIXTURE_FIELDS},
        constants={
            "attention_bias": False, "use_sliding_window": False, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
    ),
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor of the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int


def gguf_folder(file: Path) -> Path:
    """Return a model folder for a GGUF file: its configuration, its tokenizer, and an index of its weights. Cached.

    Raises ValueError if the file is damaged, or has an architecture, a kind of weights or a tokenizer that lean_ft cannot read, or if
    the cache cannot be written.
    """
    file = file.expanduser().absolute()  # in the Hub's cache a link to a file without the ending .gguf
    about = file.stat()
    key = f"{_FORMAT} {file} {about.st_size} {about.st_mtime_ns}"
    folder = gguf_cache() / f"{file.stem[:100]}-{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"cannot write the cache folder {folder.parent} ({error.strerror}). Set the environment variable LEAN_FT_CACHE to a "
            "writable folder."
        ) from None
    try:
        _write(file, temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process may have made it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(file: Path, folder: Path) -> None:
    metadata, tensors = read_header(file)
    if metadata.get("general.type") == "adapter":
        raise ValueError(f"{file} is an adapter for llama.cpp. Use the run or the folder that it was exported from.")
    name = metadata.get("general.architecture")
    row = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        raise ValueError(
            f"{file} has the architecture {name!r}; expected one of {', '.join(_ARCHITECTURES)}."
            f"{did_you_mean(str(name), _ARCHITECTURES)} Use the model's Hugging Face folder instead."
        )
    if metadata.get("split.count", 1) != 1:
        raise ValueError(
            f"{file} is one part of a split model. Join the parts: llama-gguf-split --merge FIRST ALL.gguf"
        )
    config = _config(file, row, {k.removeprefix(f"{name}."): v for k, v in metadata.items() if k.startswith(f"{name}.")}, tensors)  # fmt: skip
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    ends = [i for i in dict.fromkeys((ids["eos"], ids["eot"], ids["eom"])) if i is not None]
    config |= {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": ids["bos"], "eos_token_id": ends or None})
    for file_name, content in tokenizer_files(file, metadata).items():
        write_json(folder / file_name, content)
    write_index(folder, file, _index(file, folder, str(name), row, config, tensors))


def _config(file: Path, row: _Architecture, facts: dict[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the file's config.json. Raises ValueError for a key that is missing, or that may change the computation."""
    if facts.get("expert_count", 0) == 0:
        facts = {key: value for key, value in facts.items() if key not in ("expert_count", "expert_used_count")}
    required = [key for key in row.fields if key in _REQUIRED or key in _MIXTURE_FIELDS]
    if missing := [key for key in required if key not in facts]:
        raise ValueError(
            f"{file} lacks the metadata {', '.join(missing)} of its architecture. Download the file again."
        )
    of_windows = _OF_WINDOWS if row.has_windows else set[str]()
    if unknown := sorted(facts.keys() - row.fields.keys() - _REPEATED - _SCALING - of_windows):
        raise ValueError(
            f"{file} has the metadata {', '.join(unknown)}, which lean_ft does not read for {row.model_type}. Use the model's "
            "Hugging Face folder instead."
        )
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{file} lacks the tensor token_embd.weight, the embedding. Download the file again.")
    config: dict[str, Any] = {"architectures": [row.class_name], "model_type": row.model_type, "hidden_act": "silu"}
    config |= {row.fields[key]: value for key, value in facts.items() if key in row.fields}
    config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if row.has_bias_fields:
        config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    config |= row.constants
    if "hidden_activation" in config:
        del config["hidden_act"]
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10_000.0)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if "head_dim" not in config and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        config["head_dim"] = hidden // heads
    for other in ("attention.value_length", "rope.dimension_count"):
        if facts.get(other, config.get("head_dim")) != config.get("head_dim"):
            found = f"{other} is {facts[other]}; expected {config.get('head_dim')}, the features of a head"
            raise ValueError(f"{file}: {found}. Use the model's Hugging Face folder instead.")
    config["rope_scaling"] = _rope_scaling(file, facts, config, tensors.get("rope_freqs.weight"))
    if row.has_windows:
        _add_windows(file, facts, config)
    # Only a dtype that holds every tensor exactly; vectors are always in float32.
    kinds = {stored.kind for stored in tensors.values() if len(stored.shape) > 1}
    config["dtype"] = (
        {"F16": "float16", "BF16": "bfloat16"}.get(min(kinds), "float32") if len(kinds) == 1 else "float32"
    )
    return config


def _add_windows(file: Path, facts: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Set Gemma's sliding windows, the rotary settings of layers with and without a window, and the scale of scores.

    llama.cpp's defaults: every 2nd layer of Gemma 2 and every 6th of Gemma 3 has no window; the rotary base of Gemma 3's windows is
    10,000; the largest models divide the hidden size by the number of heads.
    """
    is_gemma2, num_layers = config["model_type"] == "gemma2", config["num_hidden_layers"]
    pattern = facts.get("attention.sliding_window_pattern", 2 if is_gemma2 else 6)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) != num_layers:
        raise ValueError(
            f"{file}: attention.sliding_window_pattern is not one entry per layer. Download the file again."
        )
    if not config.setdefault("sliding_window", 4096 if is_gemma2 else 0):
        pattern = [False] * num_layers
    config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    is_largest = num_layers == (46 if is_gemma2 else 62)
    heads = config["num_attention_heads"]
    config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_largest else config["head_dim"]
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    full = {**scaling, "rope_theta": theta}
    windowed = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base_swa", 10_000.0)}
    if is_gemma2 and facts.get("rope.freq_base_swa", theta) != theta:
        raise ValueError(
            f"{file}: rope.freq_base_swa is not rope.freq_base. Use the model's Hugging Face folder instead."
        )
    config["rope_parameters"] = full if is_gemma2 else {"full_attention": full, "sliding_attention": windowed}


def _rope_scaling(
    file: Path, facts: Mapping[str, Any], config: Mapping[str, Any], divisors: Stored | None
) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json. Llama 3's is stored only as the number that divides each frequency."""
    kind, factor = facts.get("rope.scaling.type", "none"), facts.get("rope.scaling.factor", 1.0)
    original = facts.get("rope.scaling.original_context_length")
    if kind not in ("none", "linear", "yarn") or (kind == "none" and factor not in (0.0, 1.0)):
        raise ValueError(f"{file}: rope.scaling.type is {kind!r}; expected none, linear or yarn.")
    if kind != "none":
        lengths = {} if kind == "linear" or original is None else {"original_max_position_embeddings": original}
        return {"rope_type": kind, "factor": factor, **lengths}
    if divisors is None:
        return None
    size, theta = config["head_dim"], float(config["rope_theta"])
    if divisors.kind != "F32" or divisors.shape != (size // 2,):
        raise ValueError(
            f"{file}: rope_freqs.weight is {list(divisors.shape)} {divisors.kind}; expected [{size // 2}] F32."
        )
    found = torch.from_numpy(np.fromfile(file, np.float32, size // 2, offset=divisors.offset))
    if bool((found == 1.0).all()):
        return None
    plain = SCALINGS["default"](RopeConfig(theta), size)
    factor = found.max().item()
    # All published models have the bounds 1 and 4, so a frequency between them shows the original context.
    kept = (1 / found - 1 / factor) / (1 - 1 / factor)
    between = (kept > 1e-3) & (kept < 1 - 1e-3)
    length = float(((3 * kept + 1) * 2 * math.pi / plain)[between].median().round()) if bool(between.any()) else 8192.0
    facts_of_rope = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = RopeConfig(theta, "llama3", original_max_positions=length, **facts_of_rope)
    if not torch.allclose(plain / SCALINGS["llama3"](rope, size), found, rtol=1e-4):
        raise ValueError(
            f"{file}: rope_freqs.weight is not Llama 3's scaling of frequencies. Use the model's Hugging Face folder instead."
        )
    return {"rope_type": "llama3", **facts_of_rope, "original_max_position_embeddings": int(length)}


def _index(
    file: Path, folder: Path, name: str, row: _Architecture, config: dict[str, Any], tensors: Mapping[str, Stored]
) -> dict[str, GGUFTensor]:
    """Return the tensors by their Hugging Face names. Raises ValueError unless they are those of the config."""
    import gguf

    model = empty_model(folder, torch.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], model.config.num_layers)
    rows = [family for family in GGUF_FAMILIES.values() if family.architecture == name]
    interleaved = any(family.pairs_neighbors for family in rows)
    raised = {part for family in rows for part, change in family.changes.items() if change is plus_one}
    heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads} if interleaved else {}
    found, missing, used = dict[str, GGUFTensor](), [], {"rope_freqs.weight"}
    for place, expected in tensors_on_disk(model).items():
        module, _, ending = place.rpartition(".")
        expert = re.search(r"\.experts\.(\d+)\.", module)
        own_name = f"{names.get_name(module.replace(expert[0], '.experts.') if expert else module)}.{ending}"
        if own_name not in tensors:
            missing.append(own_name)
            continue
        used.add(own_name)
        stored = tensors[own_name]
        shape, offset = stored.shape, stored.offset
        if expert is not None and len(shape) == 3 and int(expert[1]) < shape[0]:
            shape, offset = shape[1:], offset + int(expert[1]) * shape[1] * stored.row_bytes
        if shape != tuple(expected.shape):
            raise ValueError(
                f"{file}: {own_name} has the shape {list(stored.shape)}; expected {list(expected.shape)} from the metadata. "
                "Download the file again."
            )
        num_heads = heads.get(module.rpartition(".")[2])
        added = float(any(part in place for part in raised))
        found[place] = GGUFTensor(file, stored.kind, shape, offset, stored.row_bytes, num_heads, added)
    for problem, those in (("lacks", missing), ("has unexpected", sorted(tensors.keys() - used))):
        if those:
            few = ", ".join(dict.fromkeys(those[:4])) + (f" and {len(those) - 4} more" if len(those) > 4 else "")
            raise ValueError(f"{file} {problem} tensors of {name}: {few}. Download the file again, or use another one.")
    return found


class _Reader:
    """Numbers and strings of a header. Every size is checked before memory is allocated."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.file, self.stream, self.size = file, stream, file.stat().st_size

    def bytes(self, length: int) -> bytes:
        if length > self.size - self.stream.tell():
            raise ValueError(
                f"{self.file} is truncated: its header does not fit {self.size:,} bytes. Download it again."
            )
        if length > MAX_JSON_BYTES:
            raise self.damaged(f"{length:,} bytes of one value")
        return self.stream.read(length)

    def number(self, code: str) -> Any:
        value = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]
        return float(str(np.float32(value))) if code == "f" else value  # the shortest decimal, as in config.json

    def text(self) -> str:
        try:
            return self.bytes(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a text that is not UTF-8") from None

    def count(self, most: int) -> int:
        number = self.number("Q")
        if number > most:
            raise self.damaged(f"a count of {number:,}, above {most:,}")
        return number

    def value(self, kind: int, in_array: bool = False) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and not in_array:
            kind, length = self.number("I"), self.count(_MAX_ENTRIES)
            if kind not in _SCALARS:
                return [self.value(kind, in_array=True) for _ in range(length)]
            code = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack(code, self.bytes(struct.calcsize(code))))
        if kind not in _SCALARS:
            raise self.damaged(f"a value of the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def damaged(self, found: str) -> ValueError:
        return ValueError(f"{self.file} is damaged: its header has {found}. Download it again.")


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return a GGUF file's metadata and tensors by name. Raises ValueError if it is damaged, or a kind of weights is unknown."""
    try:
        import gguf
    except ImportError:
        raise ValueError(f"{file} needs the package gguf. Install it: pip install 'lean-ft[gguf]'") from None

    metadata, tensors, starts = dict[str, Any](), dict[str, Stored](), dict[str, int]()
    with file.open("rb") as stream:
        reader = _Reader(file, stream)
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not begin with GGUF. Expected a file for llama.cpp.")
        if (version := reader.number("I")) not in (2, 3):
            raise ValueError(f"{file} has version {version} of the format; expected 2 or 3, in little-endian order.")
        num_tensors, num_values = reader.count(2**17), reader.count(2**17)
        for _ in range(num_values):
            key = reader.text()
            metadata[key] = reader.value(reader.number("I"))
        for _ in range(num_tensors):
            name, num_dims = reader.text(), reader.number("I")
            if name in tensors or not 1 <= num_dims <= 4:
                raise reader.damaged(f"two tensors {name}" if name in tensors else f"{num_dims} dimensions of {name}")
            shape = tuple(reader.number("Q") for _ in range(num_dims))[::-1]
            number, start = reader.number("I"), reader.number("Q")
            kind = next((kind for kind in gguf.GGMLQuantizationType if kind == number), None)
            if kind is None or not _can_dequantize(gguf, kind):
                known = ", ".join(kind.name for kind in gguf.GGMLQuantizationType if _can_dequantize(gguf, kind))
                found = f"stores {name} as {number if kind is None else kind.name}; expected one of {known}"
                raise ValueError(f"{file} {found}. Choose another file of the model.")
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            columns = shape[-1] if num_dims > 1 else 1
            if (num_dims == 1 and block > 1) or columns % block or 0 in shape:
                raise reader.damaged(f"the shape {list(shape)} of {name}, which is stored as {kind.name}")
            tensors[name], starts[name] = Stored(kind.name, shape, 0, columns // block * block_bytes), start
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise reader.damaged(f"the alignment {alignment!r}; expected a power of two")
        data = -(-stream.tell() // alignment) * alignment
    for name, stored in tensors.items():
        end = data + starts[name] + num_rows(stored.shape) * stored.row_bytes
        if end > reader.size:
            raise ValueError(f"{file} is truncated: {name} ends at byte {end:,}, and the file has {reader.size:,}. Download it again.")  # fmt: skip
        tensors[name] = stored._replace(offset=data + starts[name])
    return metadata, tensors


def _can_dequantize(gguf: Any, kind: Any) -> bool:
    if kind.name in ("F32", "F16"):
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
