"""What a GGUF file of a model holds: the metadata of its architecture, and its tensors.

Source: llama.cpp, gguf-py/gguf/constants.py and tensor_mapping.py (the `gguf` package), and src/llama-model.cpp.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lean_ft.gguf.header import gguf_package
from lean_ft.gguf.hybrids import mixer_of
from lean_ft.gguf.layouts import store
from lean_ft.gguf.rows import GGUFFamily, Step, StoredAs
from lean_ft.models.config import ShortConvolutionConfig
from lean_ft.models.rope import SCALINGS, RopeConfig

if TYPE_CHECKING:
    from lean_ft.models import Decoder, DecoderConfig

_STANDSTILL = 1e30  # a divisor that makes a frequency 0


def architecture_metadata(model: "Decoder", family: GGUFFamily) -> dict[str, Any]:
    """Return the metadata of the architecture, by key without its prefix. Floats are stored in 32 bits."""
    config, (rope, windowed) = model.config, ropes(model.config)
    metadata: dict[str, Any] = {
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
    metadata |= {key: float(getattr(config, field)) for key, (field, _) in family.numbers.items()}
    metadata |= _mixture_metadata(config, family) | _mixer_metadata(config)
    if any(windows := [layer.window or 0 for layer in config.layers]):
        metadata |= {
            "attention.sliding_window": max(windows),
            "attention.sliding_window_pattern": [window > 0 for window in windows],
            "rope.freq_base_swa": float(windowed.theta),
        }
    if rope.scaling in ("linear", "yarn", "longrope"):
        metadata |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling in ("yarn", "longrope"):
        metadata["rope.scaling.original_context_length"] = int(rope.original_max_positions)
    if rope.scaling == "yarn":
        # llama.cpp multiplies the factor of the yarn paper by this number.
        metadata["rope.scaling.attn_factor"] = rope.attention_factor / (0.1 * math.log(rope.factor) + 1.0)
    if rope.query_growth:
        metadata["attention.temperature_scale"] = float(rope.query_growth)
    return metadata | family.metadata(model)


def _of_layers(numbers: Iterable[int]) -> Any:
    """One number if that of all layers is equal, otherwise a list."""
    numbers = list(numbers)
    return numbers if len(set(numbers)) > 1 else numbers[0]


def _mixture_metadata(config: "DecoderConfig", family: GGUFFamily) -> dict[str, Any]:
    """Return what files of a family store about experts; nothing if the model has none."""
    mixture, stored = config.mixture, family.fields.keys()
    if mixture is None:
        return {}
    metadata: dict[str, Any] = {
        "expert_count": mixture.num_experts,
        "expert_used_count": mixture.experts_per_token,
        "expert_feed_forward_length": mixture.intermediate_size,
    }
    if "expert_weights_norm" in stored:
        metadata["expert_weights_norm"] = mixture.weights_sum_to_one
        metadata["expert_weights_scale"] = float(mixture.weights_factor)
    if "expert_gating_func" in stored:
        metadata["expert_gating_func"] = {"softmax": 1, "sigmoid": 2}[mixture.score]
    if {"leading_dense_block_count", "interleave_moe_layer_step"} & stored:
        first, *others = (i for i, layer in enumerate(config.layers) if layer.mixture is not None)
        metadata["leading_dense_block_count"] = first
        metadata["interleave_moe_layer_step"] = others[0] - first if others else 1
    if shared := mixture.shared_intermediate_size:
        metadata["expert_shared_feed_forward_length"] = shared
        metadata["expert_shared_count"] = shared // mixture.intermediate_size
    if mixture.groups_per_token < mixture.num_groups:
        metadata["expert_group_count"] = mixture.num_groups
        metadata["expert_group_used_count"] = mixture.groups_per_token
    return metadata


def _mixer_metadata(config: "DecoderConfig") -> dict[str, Any]:
    """Return what files store about recurrent layers; nothing if there are none."""
    mixer = mixer_of(config)
    if mixer is None:
        return {}
    if isinstance(mixer, ShortConvolutionConfig):
        return {"shortconv.l_cache": mixer.num_taps}
    return {
        "ssm.conv_kernel": mixer.num_taps,
        "ssm.state_size": mixer.key_dim,
        "ssm.group_count": mixer.num_key_heads,
        "ssm.inner_size": mixer.num_heads * mixer.value_dim,
        "ssm.time_step_rank": mixer.num_heads,
    }


def layout_of(name: str, model: "Decoder", family: GGUFFamily) -> tuple[tuple[Step, ...], list[str]]:
    """Return the steps from a parameter to its tensors in the file, and their names; no names for metadata."""
    config, (rope, _) = model.config, ropes(model.config)
    part = next((part for part in family.changes if part in name), "")
    change = family.changes[part] if part else StoredAs()
    steps, given = change(config) if callable(change) else change
    places = [name] if given is None else [name.replace(part, other) for other in given]
    num_heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
    turned = next((number for part, number in num_heads.items() if places and part in places[0]), None)
    if turned is not None and family.pairs_neighbors and not rope.interleaved:
        steps = (*steps, ("pair", turned, int(config.head_dim * rope.rotary_fraction)))
    names, found = _names(family.architecture, config.num_layers), []
    for place in places:
        spellings = (model.source.module_name(place, in_whole=False), place)
        spellings = spellings if given is None else spellings[::-1]  # a name that the row gives comes first
        names_in_file = filter(None, (_name_in_file(names, spelling) for spelling in spellings))
        if (found_name := next(names_in_file, None)) is None:
            raise ValueError(f"it has no tensor {place}.")
        found.append(found_name)
    return steps, found


def gguf_tensors(
    parameters: Iterable[tuple[str, Tensor]], model: "Decoder", family: GGUFFamily, device: str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors, or others with the names and rows of parameters, by the names of the file.

    On the device `meta` they have only shapes; otherwise one at a time is in memory.
    """
    for name, parameter in parameters:
        steps, names = layout_of(name, model, family)
        if names:
            yield from zip(names, store(parameter.detach().to(device), steps), strict=True)


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


def all_tensors(model: "Decoder", family: GGUFFamily, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a model's file, with those that no parameter has."""
    yield from gguf_tensors(model.state_dict().items(), model, family, device)
    for name, divisors in divisors_of(model.config).items():
        yield name, divisors.to(device)


def divisors_of(config: "DecoderConfig") -> dict[str, Tensor]:
    """The tensors by which llama.cpp divides rotary frequencies."""
    rope, _ = ropes(config)
    if rope.scaling in ("llama3", "proportional"):
        size = rope.head_dim or config.head_dim
        plain, scaled = (SCALINGS[scaling](rope, size) for scaling in ("default", rope.scaling))
        return {"rope_freqs.weight": (plain / scaled).clamp(max=_STANDSTILL)}
    lengths = {"long": rope.long_factors, "short": rope.short_factors} if rope.scaling == "longrope" else {}
    return {f"rope_factors_{length}.weight": torch.tensor(divisors) for length, divisors in lengths.items()}


def ropes(config: "DecoderConfig") -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary settings of layers without and with a sliding window. If one kind has none, both are the other's."""
    full, windowed = (
        next((layer.rope for layer in config.layers if layer.rope and bool(layer.window) == has_window), None)
        for has_window in (False, True)
    )
    found = full or windowed or RopeConfig(10_000.0)
    return full or found, windowed or found
