"""What a GGUF file of a model holds: the metadata of its architecture, and the names and layouts of its tensors.

The layout of a parameter is a list of steps that work in both directions. A step is a name of `STEPS` and its numbers.
Export runs the steps in order; import runs their inverses in reverse order.

Source: llama.cpp, gguf-py/gguf/constants.py and tensor_mapping.py (the `gguf` package), and src/llama-model.cpp.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lean_ft.gguf.header import gguf_package
from lean_ft.gguf.hybrids import mixer_of
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
    metadata |= {key: float(attrgetter(field)(config)) for key, (field, _) in family.numbers.items()}
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
    if turned is not None and family.pairs_neighbors != rope.interleaved:
        change = "pair" if family.pairs_neighbors else "unpair"
        steps = (*steps, (change, turned, int(config.head_dim * rope.rotary_fraction)))
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
    layouts = ((parameter, *layout_of(name, model, family)) for name, parameter in parameters)
    for names, parts in groupby(layouts, key=lambda layout: layout[2]):  # a parameter, or those of a stack
        if names:
            stored = (store(parameter.detach().to(device), steps) for parameter, steps, _ in parts)
            yield from zip(names, _joined(*stored), strict=True)


def _joined(*parts: list[Tensor]) -> list[Tensor]:
    return parts[0] if len(parts) == 1 else [torch.cat(one) for one in zip(*parts, strict=True)]


def _name_in_file(names: Any, name: str) -> str | None:
    """The file's name of a tensor, which llama.cpp's table lists with or without its ending; None if it lists
    neither."""
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
    for name, shape in family.unused(model.config).items():
        yield name, torch.zeros(shape, device=device)


def divisors_of(config: "DecoderConfig") -> dict[str, Tensor]:
    """The tensors by which llama.cpp divides rotary frequencies."""
    rope, _ = ropes(config)
    if rope.scaling in ("llama3", "proportional"):
        size = next(head_dim for other, head_dim in config.rotations if other == rope)
        plain, scaled = (SCALINGS[scaling](rope, size) for scaling in ("default", rope.scaling))
        return {"rope_freqs.weight": (plain / scaled).clamp(max=_STANDSTILL)}
    lengths = {"long": rope.long_factors, "short": rope.short_factors} if rope.scaling == "longrope" else {}
    return {f"rope_factors_{length}.weight": torch.tensor(divisors) for length, divisors in lengths.items()}


def ropes(config: "DecoderConfig") -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary settings of layers without and with a sliding window. If one kind has none, both are the
    other's."""
    full, windowed = (
        next((layer.rope for layer in config.layers if layer.rope and bool(layer.window) == has_window), None)
        for has_window in (False, True)
    )
    found = full or windowed or RopeConfig(10_000.0)
    return full or found, windowed or found


# Layouts --------------------------------------------------------------------------------------------------------------

Stored = Tensor | Sequence[Tensor]  # several tensors after a step that splits


class _Directions(NamedTuple):
    store: Callable[..., Stored]
    load: Callable[..., Tensor]
    is_exact: bool = True
    """Whether a 16-bit number stays one."""


def _by_rows(change: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    """Change stretches of rows: numbers are the size and the factor of each."""

    def changed(x: Tensor, *numbers: float) -> Tensor:
        sizes, factors = numbers[::2], numbers[1::2]
        parts = x.float().split(list(map(int, sizes)))
        return torch.cat([change(part, factor) for part, factor in zip(parts, factors, strict=True)])

    return changed


def _pair(x: Tensor, num_heads: int, size: int, halves: tuple[int, int] = (2, -1)) -> Tensor:
    """Make rows i and i + size / 2 of each head neighbors; with `halves` (-1, 2) neighbors these rows."""
    heads = x.unflatten(0, (num_heads, -1))
    turned = heads[:, :size].unflatten(1, halves).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, heads[:, size:]), 1).flatten(0, 1)


def _tile(x: Tensor, dim: int, first: int, outer: int, inner: int) -> Tensor:
    """Reorder the features from `first` on: (outer, inner, ...) becomes (inner, outer, ...)."""
    kept, moved = x.split((first, x.shape[dim] - first), dim)
    heads = moved.unflatten(dim, (outer, inner, -1))
    return torch.cat((kept, heads.transpose(dim, dim + 1).flatten(dim, dim + 2)), dim)


def _ungroup(x: Tensor, num_groups: int, *sizes: int) -> Tensor:
    """Turn the parts of each group into all groups' first parts, all second parts, ..."""
    parts = x.unflatten(0, (num_groups, -1)).split(sizes, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _group(x: Tensor, num_groups: int, *sizes: int) -> Tensor:
    parts = x.split([num_groups * size for size in sizes])
    return torch.cat([part.unflatten(0, (num_groups, -1)) for part in parts], 1).flatten(0, 1)


def _keys_and_values(x: Tensor, num_heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    """Split the projection of latents by head. Keys are transposed: llama.cpp multiplies queries with them."""
    keys, values = x.unflatten(0, (num_heads, -1)).split((key_dim, value_dim), 1)
    return [keys.mT, values]


def _with_rows(x: Tensor, number: int) -> Tensor:
    """Cut x to a number of rows, or add copies of its first row."""
    return torch.cat((x[:number], x[:1].expand(max(0, number - len(x)), -1)))


STEPS = {
    "add": _Directions(lambda x, number: x.float() + number, lambda x, number: x - number, is_exact=False),
    "multiply": _Directions(lambda x, factor: x.float() * factor, lambda x, factor: x / factor, is_exact=False),
    "multiply_rows": _Directions(_by_rows(torch.mul), _by_rows(torch.div), is_exact=False),
    "twice": _Directions(  # with two factors
        lambda x, *factors: [x.float() * factor for factor in factors], lambda parts, a, b: parts[0] / a, is_exact=False
    ),
    "decay": _Directions(lambda x: -x.float().exp(), lambda x: (-x).log(), is_exact=False),
    "reshape": _Directions(lambda x, *shape: x.reshape(shape), lambda x, *shape: x),  # the caller knows the shape
    "part": _Directions(lambda x, number: x[None], lambda x, number: x[number]),  # of a stack of parameters
    "rows": _Directions(_with_rows, lambda x, number: x),
    "squeeze": _Directions(lambda x, dim: x.squeeze(dim), lambda x, dim: x.unsqueeze(dim)),
    "transpose": _Directions(lambda x: x.mT, lambda x: x.mT),
    "pair": _Directions(_pair, lambda x, *numbers: _pair(x, *numbers, halves=(-1, 2))),
    "unpair": _Directions(lambda x, *numbers: _pair(x, *numbers, halves=(-1, 2)), _pair),
    "tile": _Directions(_tile, lambda x, dim, first, outer, inner: _tile(x, dim, first, inner, outer)),
    "ungroup": _Directions(_ungroup, _group),
    "split": _Directions(
        lambda x, dim, *sizes: x.split(sizes, dim) if sizes else x.chunk(2, dim),
        lambda parts, dim, *_: torch.cat(list(parts), dim),
    ),
    "unzip": _Directions(
        lambda x, dim: x.unflatten(dim, (-1, 2)).unbind(dim + 1),
        lambda parts, dim: torch.stack(list(parts), dim + 1).flatten(dim, dim + 1),
    ),
    "keys_and_values": _Directions(
        _keys_and_values, lambda parts, *_: torch.cat((parts[0].mT, parts[1]), 1).flatten(0, 1)
    ),
}


def store(x: Tensor, steps: Sequence[Step]) -> list[Tensor]:
    """Return the tensors of a file for a parameter."""
    stored: Stored = x
    for name, *numbers in steps:
        stored = STEPS[name].store(stored, *numbers)
    return [stored] if isinstance(stored, Tensor) else list(stored)


def load(stored: Sequence[Tensor], steps: Sequence[Step], shape: tuple[int, ...]) -> Tensor:
    """Return the parameter, of `shape`, for the tensors of a file. Raises ValueError if their shapes do not fit."""
    parameter: Stored = stored if len(stored) > 1 else stored[0]
    try:
        for name, *numbers in reversed(steps):
            parameter = STEPS[name].load(parameter, *numbers)
        assert isinstance(parameter, Tensor)
        return parameter.reshape(shape)
    except RuntimeError:
        found = ", ".join(str(list(one.shape)) for one in stored)
        raise ValueError(f"tensors of the shapes {found} do not fit a parameter of {list(shape)}") from None


def by_side(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """The steps that change a matrix's rows, and those that reorder its columns."""
    of_columns = [step for step in steps if step[:2] == ("tile", 1)]
    return [step for step in steps if step not in of_columns], of_columns


def is_exact(steps: Sequence[Step]) -> bool:
    """Whether a parameter in 16 bits is one in the file too."""
    return all(STEPS[name].is_exact for name, *_ in steps)
