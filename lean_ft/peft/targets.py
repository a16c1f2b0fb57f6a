"""Which layers get an adapter, by patterns of their names."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lean_ft.models import Decoder
from lean_ft.models.families import FAMILIES, Family
from lean_ft.models.moe import Experts, Router
from lean_ft.models.names_on_disk import module_on_disk
from lean_ft.peft.experts import PROJECTIONS, LoRAExperts
from lean_ft.peft.layers import AdaptedLayer
from lean_ft.quantize.nf4 import NF4Linear
from lean_ft.system.spelling import did_you_mean

ALL_LINEAR = "all-linear"
_ADAPTABLE = (nn.Linear, NF4Linear, Router, nn.Embedding, Experts)


def find_targets(model: Decoder, patterns: Sequence[str]) -> list[str]:
    """The names of the layers that `patterns` match, in the model's order.

    A pattern is `all-linear` (every linear layer of attention and feed-forward layers, experts among them, and not routers
    and the projection out of Mamba-2, which PEFT takes no adapter of in most families), the last part or parts of a name (`q_proj`, `self_attn.q_proj`), or a name with wildcards
    (`model.layers.[0-3].*.down_proj`).

    Raises ValueError where a pattern matches nothing, or something that takes no adapter.
    """
    modules = _layers(model)
    found: set[str] = set()
    for pattern in patterns:
        matched = [name for name, module in modules.items() if _matches(name, module, pattern)]
        if not matched:
            raise ValueError(_nothing_matched(model, pattern, modules))
        other = [name for name in matched if not isinstance(modules[name], _ADAPTABLE)]
        has_wildcards = any(char in pattern for char in "*?[")
        if other and (len(other) == len(matched) or not has_wildcards):
            raise ValueError(
                f"lora.targets: {pattern!r} matches {other[0]}, a {type(modules[other[0]]).__name__}; only linear layers, "
                "experts and the embedding take an adapter."
            )
        found.update(set(matched) - set(other))
    if model.config.tied_embeddings and "model.embed_tokens" in found:
        raise ValueError(
            "lora.targets: the embedding of this model is its output layer too (tie_word_embeddings), and an adapter "
            "would change one of the two. Target other layers, or train the model whole."
        )
    return [name for name in modules if name in found]


def is_projection_of_experts(model: nn.Module, name: str) -> bool:
    """Whether `name` is one of the stacked projections of a mixture's experts, adapted or not."""
    place, _, projection = name.rpartition(".")
    return projection in PROJECTIONS and isinstance(model.get_submodule(place), Experts | LoRAExperts)


def is_parameter_to_peft(model: Decoder, name: str) -> bool:
    """Whether PEFT adapts the layer, adapted here or not, as one of its `target_parameters` and not as a module.

    That is so of experts and of routers. In a model with experts PEFT takes any module of an expert's names for one
    that an older version kept by itself, the plain layers between them too, and gives it twice the rank.
    """
    if is_projection_of_experts(model, name):
        return True
    layer = model.get_submodule(name)
    if isinstance(layer.base_layer if isinstance(layer, AdaptedLayer) else layer, Router):
        return True
    family = FAMILIES.get(model.source.config.get("model_type", ""), Family())
    were_single = any("*" in place for places in family.on_disk.values() for place in places)
    if not were_single or family.parts_are_alone:  # of which it knows no older version
        return False
    return module_on_disk(model.source.config, name).rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")


def _layers(model: Decoder) -> dict[str, nn.Module]:
    """The modules by name; experts by the names of their projections, which are layers to an adapter."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            layers |= {f"{name}.{projection}": module for projection in PROJECTIONS}
        elif name:
            layers[name] = module
    return layers


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    if pattern == ALL_LINEAR:
        is_layer = name.startswith("model.layers.") and not name.endswith((".mamba.out_proj", ".router.proj"))
        return is_layer and isinstance(module, nn.Linear | NF4Linear | Experts)
    return matches_name(name, pattern)


def matches_name(name: str, pattern: str) -> bool:
    """Whether a pattern is a name, the last parts of it, or one with wildcards that fits."""
    return name == pattern or name.endswith("." + pattern) or fnmatchcase(name, pattern)


def _nothing_matched(model: Decoder, pattern: str, modules: dict[str, nn.Module]) -> str:
    names = sorted({name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, _ADAPTABLE)})
    if pattern == "lm_head" and model.config.tied_embeddings:
        return (
            "lora.targets: this model has no lm_head: its output layer is the embedding (tie_word_embeddings), and an "
            "adapter would change one of the two. Target other layers, or train the model whole."
        )
    return (
        f"lora.targets: {pattern!r} matches no layer of this model.{did_you_mean(pattern, [ALL_LINEAR, *names])} "
        f"Expected {ALL_LINEAR}, a name with wildcards such as model.layers.0.*, or among {', '.join(names)}."
    )
