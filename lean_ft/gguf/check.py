"""Check that llama.cpp computes a model as lean_ft does, before it is exported or after its file was read.

Source: llama.cpp, src/llama-model.cpp and src/models.
"""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Set
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from lean_ft.gguf.mixtures import GGUF_MIXTURES, GGUF_REFUSED, mixer_of
from lean_ft.gguf.rows import GGUF_FAMILIES, STORED, GGUFFamily
from lean_ft.models import Decoder
from lean_ft.models.config import DecoderConfig, MixerConfig, MixtureConfig
from lean_ft.models.rope import RopeConfig

FAMILIES = ChainMap(GGUF_MIXTURES, GGUF_FAMILIES)
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


def gguf_family(model: Decoder, folder: Path) -> GGUFFamily:
    """Return the row of `GGUFFAMILIES`. Raises ValueError if llama.cpp would compute something else."""
    name = model.source.config["model_type"]
    if name in GGUF_REFUSED:
        raise ValueError(f"{folder}: llama.cpp does not compute {name} as it was trained: {GGUF_REFUSED[name]}.")
    if name not in FAMILIES:
        raise ValueError(
            f"{folder}: --gguf supports the families {', '.join(FAMILIES)}, but this is {name}. Export a Hugging Face "
            "folder (without --gguf) and convert it with llama.cpp's convert_hf_to_gguf.py."
        )
    family = FAMILIES[name]
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
    full, windowed = ropes(config)
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


def ropes(config: DecoderConfig) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary settings of layers without and with a sliding window. If one kind has none, both are the other's."""
    full, windowed = (
        next((layer.rope for layer in config.layers if layer.rope and bool(layer.window) == has_window), None)
        for has_window in (False, True)
    )
    found = full or windowed or RopeConfig(10_000.0)
    return full or found, windowed or found
