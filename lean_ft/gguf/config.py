"""Build the config.json of a model from the metadata of its GGUF file.

Source: llama.cpp, gguf-py/gguf/constants.py (keys) and src/llama-model.cpp (defaults).
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_ft.gguf.check import FAMILIES
from lean_ft.gguf.facts import Facts
from lean_ft.gguf.rows import ABSENT, GGUFFamily
from lean_ft.models.families import FAMILIES as MODEL_FAMILIES
from lean_ft.models.rope import SCALINGS, RopeConfig
from lean_ft.system.spelling import did_you_mean

# The field of config.json for a key of the architecture.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_COUNTS = {"context_length", "embedding_length", "attention.head_count"}
# The family of an architecture; the first row of several that have it.
_FAMILY_OF = {family.architecture: name for name, family in reversed(list(FAMILIES.items()))} | {
    "granitehybrid": "granitemoehybrid", "granitemoe": "granitemoehybrid", "nemotron_h_moe": "nemotron_h",
}  # fmt: skip
USE_FOLDER = "Use the model's Hugging Face folder instead."


def check_architecture(file: Path, name: Any) -> str:
    """Return the architecture of a file. Raises ValueError if lean_ft does not read it."""
    if not isinstance(name, str) or name not in _FAMILY_OF:
        expected = f"expected one of {', '.join(sorted(_FAMILY_OF))}.{did_you_mean(str(name), _FAMILY_OF)}"
        raise ValueError(f"{file} has the architecture {name!r}; {expected} {USE_FOLDER}")
    return name


def family_of(facts: Facts) -> str:
    """Return the family of a file. Raises ValueError if lean_ft does not read it."""
    name = facts.architecture
    if name == "llama" and "expert_count" in facts:
        return "mixtral"
    if name == "olmo2" and "attention.sliding_window" in facts:
        return "olmo3"
    if name == "granitehybrid" and "attention.scale" not in facts:
        if facts.count("rope.dimension_count") * facts.count("attention.head_count") != facts.count("embedding_length"):
            raise ValueError(
                f"{facts.file} is a Bamba model that rotates a part of each head. llama.cpp's converter orders the rows of such "
                f"heads wrongly, and no metadata tells its files from others. {USE_FOLDER}"
            )
        return "bamba"
    return _FAMILY_OF[name]


def config_of(facts: Facts, name: str) -> dict[str, Any]:
    """Return the config.json of a family's file. Raises ValueError for metadata that is missing or of another type."""
    family = FAMILIES[name]
    fields = {**_FIELDS, **family.fields}
    if family.fields.get("attention.layer_norm_epsilon"):
        del fields["attention.layer_norm_rms_epsilon"]
    heads, hidden = facts.count("attention.head_count", least=1), facts.count("embedding_length", least=1)
    config: dict[str, Any] = {
        "architectures": [f"{family.class_name}ForCausalLM"],
        "model_type": name,
        "vocab_size": facts.num_rows("token_embd.weight"),
        "num_hidden_layers": facts.num_layers,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": facts.count("attention.key_length", hidden // heads, least=1),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        **{field: facts.count(key) if key in _COUNTS else facts.number(key) for key, field in fields.items()},
    }
    if "feed_forward_length" in facts:
        config["intermediate_size"] = facts.count("feed_forward_length")
    config |= family.config(facts)
    window = facts.count("attention.sliding_window", 4096 if name == "gemma2" else 0)
    # Without a pattern, as in Phi-4's files, a window of the longest context or more changes nothing. In a pattern it may decide
    # which layers have positions.
    has_pattern = family.period or "attention.sliding_window_pattern" in facts
    if window and (has_pattern or window < config["max_position_embeddings"]):
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in facts.pattern(family.period)]
        config |= {"sliding_window": window, "layer_types": kinds}
    elif family.period:
        config |= {"sliding_window": None, "layer_types": ["full_attention"] * facts.num_layers}
    config |= _rope(facts, name, family, config, config.pop("rope_more", {}))
    # Only a dtype that holds every tensor exactly; vectors are always in float32.
    kinds = {stored.kind for stored in facts.tensors.values() if len(stored.shape) > 1}
    dtypes = {"F16": "float16", "BF16": "bfloat16"}
    config["dtype"] = dtypes.get(min(kinds), "float32") if len(kinds) == 1 else "float32"
    return {field: value for field, value in config.items() if value is not ABSENT}


def _rope(facts: Facts, name: str, family: GGUFFamily, config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings. more: settings of the family."""
    theta = facts.number("rope.freq_base", 10_000.0)
    size = config["head_dim"] if config["head_dim"] is not ABSENT else config["qk_rope_head_dim"]
    if config.get("global_head_dim"):
        size = config["global_head_dim"]
    scaling = _scaling(facts, family, size, theta) | more
    turned = facts.count("rope.dimension_count", size, least=2)
    if turned != size or "partial_rotary_factor" in MODEL_FAMILIES[name].defaults:
        scaling["partial_rotary_factor"] = turned / size
    if scaling["rope_type"] == "longrope":
        return {
            "original_max_position_embeddings": scaling.pop("original_max_position_embeddings"),
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
    if config.get("sliding_window") is not None and not family.scaled_windows:
        windowed = {
            "rope_type": "default",
            "rope_theta": facts.number("rope.freq_base_swa", theta if name == "olmo3" else 10_000.0),
        }
        kinds = {"full_attention": {**scaling, "rope_theta": theta}, "sliding_attention": windowed}
        return {"rope_parameters": kinds}
    return {"rope_parameters": {**scaling, "rope_theta": theta}}


def _scaling(facts: Facts, family: GGUFFamily, size: int, theta: float) -> dict[str, Any]:
    """Return `rope_type` and its settings. llama3's and proportional's are stored only as the divisor of each frequency."""
    kind, factor = facts.word("rope.scaling.type", "none", "linear", "yarn", "longrope"), 1.0
    if "rope.scaling.factor" in facts:
        factor = facts.number("rope.scaling.factor")
    if kind == "longrope" or "rope_factors_long.weight" in facts.tensors:
        names = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
        divisors = {field: _numbers(facts, name, size) for field, name in names.items()}
        original = facts.count("rope.scaling.original_context_length", least=1)
        return {"rope_type": "longrope", **divisors, "original_max_position_embeddings": original}
    if kind == "none" and factor not in (0.0, 1.0):
        raise ValueError(f"{facts.file}: rope.scaling.factor is {factor}, but rope.scaling.type is none. {USE_FOLDER}")
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
    if "rope_freqs.weight" not in facts.tensors:
        return {"rope_type": "default"}
    divisors = torch.tensor(_numbers(facts, "rope_freqs.weight", size))
    if bool((divisors == 1.0).all()):
        return {"rope_type": "default"}
    if "proportional" in family.scalings:
        return {"rope_type": "proportional", "partial_rotary_factor": float((divisors == 1.0).double().mean())}
    return _llama3(facts, divisors, theta)


def _numbers(facts: Facts, name: str, size: int) -> list[float]:
    """A vector of the file with one number per frequency, in the shortest decimals."""
    turned = facts.count("rope.dimension_count", size, least=2)
    stored = facts.tensors.get(name)
    if stored is None or stored.kind != "F32" or stored.shape != (turned // 2,):
        found = "is missing" if stored is None else f"is {list(stored.shape)} {stored.kind}"
        raise ValueError(f"{facts.file}: {name} {found}; expected [{turned // 2}] F32.")
    return [float(str(number)) for number in np.fromfile(facts.file, np.float32, turned // 2, offset=stored.offset)]


def _llama3(facts: Facts, divisors: torch.Tensor, theta: float) -> dict[str, Any]:
    size = 2 * len(divisors)
    plain = SCALINGS["default"](RopeConfig(theta), size)
    factor = divisors.max().item()
    # All published models have the bounds 1 and 4, so a frequency between them shows the original context.
    kept = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (kept > 1e-3) & (kept < 1 - 1e-3)
    length = float(((3 * kept + 1) * 2 * math.pi / plain)[between].median().round()) if bool(between.any()) else 8192.0
    found = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = RopeConfig(theta, "llama3", original_max_positions=length, **found)
    if not torch.allclose(plain / SCALINGS["llama3"](rope, size), divisors, rtol=1e-4):
        raise ValueError(f"{facts.file}: rope_freqs.weight is not Llama 3's scaling of frequencies. {USE_FOLDER}")
    return {"rope_type": "llama3", **found, "original_max_position_embeddings": int(length)}
