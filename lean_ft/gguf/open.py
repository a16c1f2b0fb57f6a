"""Turn a GGUF file into a model folder of the cache: config.json, tokenizer files, and an index of the file's tensors.

The weights stay in the file. `lean_ft.gguf.tensors` checks them against the model of the folder and dequantizes them
while they are read, so every command that takes a model folder takes a GGUF file too. Token ids are llama.cpp's: text
is not normalized, and the space before the first word of a SentencePiece vocabulary is also added after a control
token.

Source: llama.cpp, src/llama-vocab.cpp, src/llama-model.cpp (defaults) and gguf-py/gguf/constants.py (keys).
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from lean_ft.gguf.cache import GGUF_INDEX, gguf_cache, with_given_name
from lean_ft.gguf.header import Facts, read_header
from lean_ft.gguf.hybrids import HYBRIDS
from lean_ft.gguf.latent import LATENT
from lean_ft.gguf.rows import DENSE, MIXTURES, GGUFFamily
from lean_ft.gguf.tokenizer import tokenizer_files
from lean_ft.system.cache import limit_size, load_entry
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.whole_files import write_json

GGUF_FAMILIES = {**DENSE, **MIXTURES, **LATENT, **HYBRIDS}
USE_FOLDER = "Use the model's Hugging Face folder instead."
_FORMAT = 5  # of the folder; part of its name
_CACHE_BYTES = 2**32  # of all folders; that of a large vocabulary has 30 MB
# The family of an architecture; the first row of several that have it.
_FAMILY_OF = {family.architecture: name for name, family in reversed(GGUF_FAMILIES.items())}
# The architecture of a language model in a multimodal model -> the family that computes the same for text.
FAMILY_IN_WHOLE = {"paddleocr": "llama", "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}
_FAMILY_OF |= {"nemotron_h_moe": "nemotron_h", **FAMILY_IN_WHOLE}
_FIELDS = {  # of all families
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
_DEFAULTS = {
    "expert_shared_count": 0, "expert_weights_norm": False, "expert_weights_scale": 1.0, "expert_group_count": 1,
    "expert_group_used_count": 1, "leading_dense_block_count": 0, "interleave_moe_layer_step": 1,
    "expert_shared_feed_forward_length": 0,
}  # fmt: skip


def gguf_folder(file: Path, given: str | Path | None = None) -> Path:
    """Return a model folder for a GGUF file: its configuration, its tokenizer, and an index of its tensors. Cached.

    `given` is the file's name in messages, by default its path. Raises ValueError if the file is damaged, or has an
    architecture, a kind of weights or a tokenizer that lean_ft cannot read, or if the cache cannot be written.
    """
    file = file.expanduser().absolute()  # in the Hub's cache a link to a file without the ending .gguf
    about, cache = file.stat(), gguf_cache()
    key = f"{_FORMAT} {file} {about.st_size} {about.st_mtime_ns}"
    key = f"{file.stem[:100]}-{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:16]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        load_entry(cache, key, lambda writer: _write(file, writer.folder))
    except ValueError as error:
        raise ValueError(with_given_name(str(error), given or file, file)) from None
    except OSError as error:
        if error.filename == str(file):
            raise
        reason = error.strerror or error
        raise ValueError(
            f"cannot write the cache folder {cache} ({reason}). Set the environment variable LEAN_FT_CACHE to a "
            "writable folder."
        ) from None
    limit_size(cache, _CACHE_BYTES, keep={key})
    return cache / key


def _write(file: Path, folder: Path) -> None:
    metadata, tensors = read_header(file)
    architecture = metadata.get("general.architecture")
    if metadata.get("general.type") == "adapter":
        raise ValueError(f"{file} is an adapter for llama.cpp. Use the run or the folder that it was exported from.")
    if metadata.get("split.count", 1) != 1:
        raise ValueError(
            f"{file} is one part of a split model. Join the parts: llama-gguf-split --merge FIRST ALL.gguf"
        )
    if not isinstance(architecture, str) or architecture not in _FAMILY_OF:
        expected = f"expected one of {', '.join(sorted(_FAMILY_OF))}.{did_you_mean(str(architecture), _FAMILY_OF)}"
        raise ValueError(f"{file} has the architecture {architecture!r}; {expected} {USE_FOLDER}")
    facts = Facts(file, metadata, tensors)
    config, files = config_of(facts, _family_of(facts)), tokenizer_files(file, metadata)
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    ends = [i for i in dict.fromkeys((ids["eos"], ids["eot"], ids["eom"])) if i is not None]
    config |= {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": ids["bos"], "eos_token_id": ends or None})
    for name, content in files.items():
        write_json(folder / name, content, indent=None)
    of_model = {
        key: metadata[key] for key in metadata if key.startswith(("general.arch", f"{architecture}.", "xielu."))
    }
    index = {"file": str(file), "metadata": of_model, "tensors": tensors, "read": sorted(facts.read)}
    write_json(folder / GGUF_INDEX, index, indent=None)


def _family_of(facts: Facts) -> str:
    """Return the family of a file. Raises ValueError if lean_ft does not read it."""
    name = facts.architecture
    if name == "llama" and "expert_count" in facts:
        return "mixtral"
    if name == "olmo2" and "attention.sliding_window" in facts:
        return "olmo3"
    if name == "granitehybrid" and "attention.scale" not in facts:
        if facts.count("rope.dimension_count") * facts.count("attention.head_count") != facts.count("embedding_length"):
            raise ValueError(
                f"{facts.file} is a Bamba model that rotates a part of each head. llama.cpp's converter orders the "
                f"rows of such heads wrongly, and no metadata tells its files from others. {USE_FOLDER}"
            )
        return "bamba"
    if name == "granitemoe" and not facts.count("rope.scaling.finetuned", 1):
        return "granitemoehybrid"
    if name == "deepseek2" and "expert_count" not in facts:
        return "youtu"
    if name == "deepseek2" and facts.count("expert_gating_func", 1) == 1:
        return "deepseek_v2"
    return _FAMILY_OF[name]


def config_of(facts: Facts, name: str) -> dict[str, Any]:
    """Return the config.json of a family's file. Raises ValueError for metadata that is missing or of another type."""
    family = GGUF_FAMILIES[name]
    heads, hidden = facts.count("attention.head_count", least=1), facts.count("embedding_length", least=1)
    eps_key, eps_field = family.norm_eps
    head_dim = facts.count("attention.key_length", hidden // heads)
    if family.whole_heads and head_dim != hidden // heads:
        raise facts.wrong("attention.key_length", f"{hidden // heads}, so that all heads together have the hidden size")
    config: dict[str, Any] = {
        "architectures": [family.class_name + "ForCausalLM" * (not family.class_name.endswith("Model"))],
        "model_type": name,
        "vocab_size": facts.num_rows("token_embd.weight"),
        "num_hidden_layers": facts.num_layers,
        **{field: facts.count(key) for key, field in _FIELDS.items()},
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in facts.tensors if family.tied is None else family.tied,
        eps_field: facts.number(eps_key),
        **{field: facts.number(key) for key, (_, field) in family.numbers.items()},
    }
    if "feed_forward_length" in facts:
        config["intermediate_size"] = facts.count("feed_forward_length")
    for key, field in family.fields.items():
        of_experts = key.startswith("expert_") or key in _DEFAULTS
        default = facts.count("feed_forward_length", 0) if key == "expert_feed_forward_length" else _DEFAULTS.get(key)
        if field and ("expert_count" in facts or not of_experts) and (key[:4] != "ssm." or "ssm.inner_size" in facts):
            config[field] = facts.number(key, default) if isinstance(default, float) else facts.count(key, default)
    config |= family.config(facts)
    window = facts.count("attention.sliding_window", 4096 if name == "gemma2" else 0)
    # Without a pattern, as in Phi-4's files, a window of the longest context or more changes nothing. In a pattern it
    # may decide which layers have positions.
    has_pattern = family.period or "attention.sliding_window_pattern" in facts
    if window and (has_pattern or window < config["max_position_embeddings"]):
        if not family.windows(facts.num_layers):
            raise facts.wrong("attention.sliding_window", "none with this architecture")
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in facts.pattern(family.period)]
        config |= {"sliding_window": window, "layer_types": kinds}
    elif family.period:
        config |= {"sliding_window": None, "layer_types": ["full_attention"] * facts.num_layers}
    config |= _rope(facts, name, family, config, config.pop("rope_more", {}))
    # Only a dtype that holds every tensor exactly; vectors are always in float32.
    kinds = {stored.kind for stored in facts.tensors.values() if len(stored.shape) > 1}
    dtypes = {"F16": "float16", "BF16": "bfloat16"}
    config["dtype"] = dtypes.get(min(kinds), "float32") if len(kinds) == 1 else "float32"
    return config


def _rope(facts: Facts, name: str, family: GGUFFamily, config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings. more: settings of the family."""
    theta = facts.number("rope.freq_base", 10_000.0)
    size = config.get("global_head_dim") or config["head_dim"]
    if (turned := facts.count("rope.dimension_count", size, least=2)) % 2:
        raise facts.wrong("rope.dimension_count", "an even number")
    scaling = _scaling(facts, turned, theta) | more
    kind = scaling["rope_type"]
    if kind not in family.scalings:
        expected = " or ".join(sorted(family.scalings))
        raise ValueError(
            f"{facts.file}: the rotary scaling is {kind}, but llama.cpp's architecture {facts.architecture} computes "
            f"with {expected}."
        )
    if kind != "proportional":
        scaling["partial_rotary_factor"] = turned / max(size, 1)
    if kind == "longrope":
        original = scaling.pop("original_max_position_embeddings")
        return {"original_max_position_embeddings": original, "rope_theta": theta, "rope_scaling": scaling}
    scaling["rope_theta"] = theta
    if config.get("sliding_window") is not None and not family.scaled_windows:
        in_windows = facts.number("rope.freq_base_swa", theta if name == "olmo3" else 10_000.0)
        windowed = {"rope_type": "default", "rope_theta": in_windows, "partial_rotary_factor": turned / max(size, 1)}
        return {"rope_parameters": {"full_attention": scaling, "sliding_attention": windowed}}
    return {"rope_parameters": scaling}


def _scaling(facts: Facts, turned: int, theta: float) -> dict[str, Any]:
    """Return `rope_type` and its settings. llama3's and proportional's are stored only as the divisor of each
    frequency."""
    kind, factor = facts.values.get("rope.scaling.type", "none"), facts.number("rope.scaling.factor", 1.0)
    facts.read.add("rope.scaling.type")
    if kind == "longrope" or "rope_factors_long.weight" in facts.tensors:
        divisors = {
            f"{one}_factor": facts.vector(f"rope_factors_{one}.weight", turned // 2) for one in ("long", "short")
        }
        original = facts.count("rope.scaling.original_context_length", facts.count("context_length"), least=1)
        return {"rope_type": "longrope", **divisors, "original_max_position_embeddings": original}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if "rope.scaling.original_context_length" in facts:
            found["original_max_position_embeddings"] = facts.count("rope.scaling.original_context_length", least=1)
        own = facts.number("rope.scaling.attn_factor", 1.0)
        if own != 1.0 and "rope.scaling.yarn_log_multiplier" not in facts:
            found["attention_factor"] = own * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        if "attention.temperature_scale" in facts:
            found["llama_4_scaling_beta"] = facts.number("attention.temperature_scale")
        return found
    if kind != "none" or factor not in (0.0, 1.0):
        raise ValueError(
            f"{facts.file}: rope.scaling.type is {kind!r} and rope.scaling.factor {factor}; expected none with 1, "
            f"linear, yarn or longrope. {USE_FOLDER}"
        )
    if "rope_freqs.weight" not in facts.tensors:
        return {"rope_type": "default"}
    divisors = np.array(facts.vector("rope_freqs.weight", turned // 2))
    if (divisors == 1.0).all():
        return {"rope_type": "default"}
    if facts.architecture == "gemma4":
        return {"rope_type": "proportional", "partial_rotary_factor": float((divisors == 1.0).mean())}
    # All published models have the bounds 1 and 4, so a frequency between them shows the original context.
    with np.errstate(all="ignore"):
        plain, factor = theta ** (-np.arange(0, turned, 2) / turned), float(divisors.max())
        kept = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        between = (kept > 1e-3) & (kept < 1 - 1e-3)
        length = float(np.median((2 * math.pi * (3 * kept + 1) / plain)[between])) if between.any() else 8192.0
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "rope_type": "llama3",
        "factor": factor,
        **bounds,
        "original_max_position_embeddings": int(np.nan_to_num(length).round()),
    }
