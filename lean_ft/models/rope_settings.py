"""Read rotary settings from a config.json, in the spellings of transformers 4 and 5."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lean_ft.models.rope import SCALINGS, RopeConfig
from lean_ft.system.config_fields import MAX_NUMBER, ConfigFields, listed
from lean_ft.system.spelling import did_you_mean


def rope_config(
    fields: ConfigFields,
    settings: object = None,
    key: str | None = None,
    may_be_partial: bool = False,
    ignored: Sequence[str] = (),
    **facts: Any,
) -> RopeConfig:
    """Read the rotary settings of field `key`, by default those of the whole model.

    may_be_partial: the family may rotate a fraction of each head. ignored: settings that may be present and have no
    effect.
    facts: further fields of RopeConfig.
    """
    if key is None:
        key, settings = rope_settings(fields)
    where = f"{fields.where}: {key}"
    if not isinstance(settings, dict):
        raise ValueError(f"{where} is {settings!r}; expected an object with rope_type.")
    longest = fields.count("max_position_embeddings")
    # transformers' order: the top level, then the rope settings, then the longest context.
    original = fields.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    settings = {**settings, "original_max_position_embeddings": original or longest}
    share = fields.get("partial_rotary_factor") if may_be_partial else None
    defaults = {"rope_theta": fields.get("rope_theta"), "partial_rotary_factor": 1.0 if share is None else share}
    rope_fields = ConfigFields(settings, defaults, where)
    old_name, scaling = rope_fields.get("type"), rope_fields.get("rope_type")
    scaling = scaling or old_name or "default"
    scaling = "longrope" if scaling == "su" else scaling  # its name in early models
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        suggestion = did_you_mean(str(scaling), SCALINGS)
        raise ValueError(f"{where} has the rope type {scaling!r}; expected one of {listed(SCALINGS)}.{suggestion}")
    share = rope_fields.positive("partial_rotary_factor")
    if share > 1.0 or (share < 1.0 and not may_be_partial and scaling != "proportional"):
        expected = "at most 1.0" if may_be_partial else "1.0 or absent, as this family rotates whole heads"
        raise rope_fields.wrong("partial_rotary_factor", expected)
    rotary_fraction = 1.0 if scaling == "proportional" else share
    num_frequencies = -(-int(head_dim_of(fields) * rotary_fraction) // 2)
    values = _ROPE_READERS[scaling](rope_fields, longest, num_frequencies)
    if rope_fields.get("mrope_section") is not None:
        values["axes"] = _axes(rope_fields, num_frequencies)
    original = rope_fields.positive("original_max_position_embeddings")
    if (theta := rope_fields.positive("rope_theta")) <= 1.0:
        raise rope_fields.wrong("rope_theta", "more than 1, as frequencies fall with the feature")
    valid = {*rope_fields.read, *ignored}
    unknown = [name for name, value in settings.items() if name not in valid and value is not None]
    if unknown:
        raise ValueError(
            f"{where} has {', '.join(unknown)}, which the rope type {scaling!r} does not use; expected only "
            f"{listed(rope_fields.read)}. Remove unused settings."
        )
    if scaling not in ("default", "linear", "proportional"):
        values.setdefault("original_max_positions", original)
    return RopeConfig(theta=theta, scaling=scaling, rotary_fraction=rotary_fraction, **values, **facts)


def _axes(settings: ConfigFields, num_frequencies: int) -> tuple[int, ...]:
    """The axis of each frequency: time, height and width, section by section or in turn. In turn, time takes what the
    others
    leave. Source: Wang et al. 2024, https://arxiv.org/abs/2409.12191."""
    sections = settings.get("mrope_section")
    is_valid = isinstance(sections, list) and len(sections) == 3 and all(type(n) is int for n in sections)
    if not is_valid or sum(sections) != num_frequencies:
        expected = f"the numbers of frequencies of time, height and width, {num_frequencies} in all"
        raise settings.wrong("mrope_section", expected)
    if settings.get("mrope_interleaved"):
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_frequencies))
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def rope_settings(fields: ConfigFields) -> tuple[str, Any]:
    """The name of the field with the model's rotary settings, and the settings."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    return key, fields.get(key) or {}


# Readers of each scaling's settings, given the longest context and the number of frequencies.


def _read_llama3(settings: ConfigFields, *_: int) -> dict[str, Any]:
    values = {name: settings.positive(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    if values["high_freq_factor"] < values["low_freq_factor"]:
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        raise ValueError(f"{settings.where}: high_freq_factor ({high}) must not be below low_freq_factor ({low}).")
    return values


def _read_yarn(settings: ConfigFields, *_: int) -> dict[str, Any]:
    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    factor = settings.positive("factor")
    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    attention_factor = grown(1.0)
    if above and below:
        attention_factor = grown(settings.positive("mscale")) / grown(settings.positive("mscale_all_dim"))
    if settings.get("attention_factor") is not None:
        attention_factor = settings.positive("attention_factor")
    values = {"factor": factor, "attention_factor": attention_factor}
    values |= {name: settings.positive(name) for name in ("beta_fast", "beta_slow") if settings.get(name)}
    if settings.get("truncate") is not None:
        values["truncate"] = settings.flag("truncate")
    return values


def _read_longrope(settings: ConfigFields, longest: int, num_frequencies: int) -> dict[str, Any]:
    original = settings.positive("original_max_position_embeddings")
    if original <= 1:
        raise settings.wrong("original_max_position_embeddings", "more than 1 with longrope")
    factor = longest / original if settings.get("factor") is None else settings.positive("factor")
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if settings.get("attention_factor") is not None:
        attention_factor = settings.positive("attention_factor")
    values: dict[str, Any] = {"attention_factor": attention_factor}
    for spelled, name in (("short_factor", "short_factors"), ("long_factor", "long_factors")):
        divisors = settings.get(spelled)
        valid = isinstance(divisors, list) and all(isinstance(x, int | float) and 0 < x < MAX_NUMBER for x in divisors)
        if not valid or len(divisors) != num_frequencies:
            raise settings.wrong(spelled, f"a list of {num_frequencies} positive numbers")
        values[name] = tuple(map(float, divisors))
    return values


_ROPE_READERS: dict[str, Callable[[ConfigFields, int, int], dict[str, Any]]] = {
    "default": lambda *_: {},
    "linear": lambda settings, *_: {"factor": settings.positive("factor")},
    "dynamic": lambda settings, longest, _: {
        "factor": settings.positive("factor"),
        "original_max_positions": float(longest),
    },
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "proportional": lambda settings, *_: {
        "factor": 1.0 if settings.get("factor") is None else settings.positive("factor"),
        "nonzero_fraction": settings.positive("partial_rotary_factor"),
    },
}


def head_dim_of(fields: ConfigFields) -> int:
    """Features of an attention head: the field head_dim, or the hidden size divided by the number of heads."""
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if fields.get("qk_rope_head_dim") is not None:  # latent attention: the rotated features
        head_dim = fields.count("qk_rope_head_dim")
    elif fields.get("head_dim") is not None:
        head_dim = fields.count("head_dim")
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise ValueError(
            f"{fields.where}: hidden_size is {hidden_size}, which is not a multiple of {num_heads} attention heads. "
            "Set head_dim, or correct one of the two."
        )
    if head_dim % 2:
        raise ValueError(f"{fields.where}: head_dim is {head_dim}; rotary embeddings need an even number.")
    return head_dim


def num_kv_heads_of(fields: ConfigFields) -> int:
    """Key-value heads: the field num_key_value_heads, or as many as query heads."""
    has_field = fields.get("num_key_value_heads") is not None
    return fields.count("num_key_value_heads" if has_field else "num_attention_heads")
