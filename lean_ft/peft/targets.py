"""Select the layers that get an adapter, by patterns of their names."""

from collections.abc import Sequence

from torch import nn

from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import FrozenParameter
from lean_ft.models.moe import Experts, Router, experts_of
from lean_ft.peft.experts import PROJECTIONS, LoRAExperts
from lean_ft.peft.layers import adapted_layers
from lean_ft.peft.tower import ALL_LINEAR, IN_UNREAD_TOWER, TOWER, matched_in_tower, matches_unread_tower
from lean_ft.system.parameter_names import matches_name
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.units import counted

TIED = (
    "takes no adapter, because this model's embedding is also its output layer (tie_word_embeddings) and the adapter "
    "would change only one of them"
)


def find_targets(model: Decoder, patterns: Sequence[str]) -> list[str]:
    """The names of the layers that `patterns` match, in the model's order.

    A pattern is the end of a name (`q_proj`, `self_attn.q_proj`), a name with wildcards
    (`model.layers.[0-3].*.down_proj`), or `all-linear`: every linear layer of attention and feed-forward layers and all
    experts, except routers and Mamba-2's output projection, which PEFT does not adapt in most families.

    In a vision tower that trains, patterns match as in PEFT, also by the names of transformers. If one of them begins
    with `vision`, the others match layers of the tower only if the language model has none of that name.

    Raises ValueError if a pattern matches nothing, a layer that takes no adapter, or only layers of a tower that does
    not train.
    """
    modules = _layers(model)
    targets: set[str] = set()
    names_tower = any(pattern.startswith("vision") for pattern in patterns)
    for pattern in patterns:
        tied = [name for name in ("lm_head", "model.embed_tokens") if matches_name(name, pattern)]
        if tied and model.config.tied_embeddings:
            raise ValueError(f"lora.targets: {tied[0]} {TIED}. Set other targets, or train without an adapter.")
        matched = [name for name, module in modules.items() if _matches(name, module, pattern)]
        if not names_tower or not matched:
            matched += matched_in_tower(model, modules, pattern, is_alone=not matched)
        if not matched:
            raise ValueError(_nothing_matched(model, pattern, modules))
        other = [name for name in matched if not is_adaptable(modules[name])]
        has_wildcards = any(char in pattern for char in "*?[")
        if other and (len(other) == len(matched) or not has_wildcards):
            ends = [".".join(name.split(".")[-2:]) for name in matched if name not in other]
            raise ValueError(
                f"lora.targets: {pattern!r} matches {other[0]}, a {type(modules[other[0]]).__name__}, but only linear "
                "layers, experts and the embedding take an adapter. Set other "
                f"targets{f', such as {ends[0]}' if ends else ''}."
            )
        targets.update(set(matched) - set(other))
    return [name for name in modules if name in targets]


def is_projection_of_experts(model: nn.Module, name: str) -> bool:
    """Whether `name` is a stacked projection of a mixture's experts, adapted or not."""
    place, _, projection = name.rpartition(".")
    return projection in PROJECTIONS and isinstance(model.get_submodule(place), Experts | LoRAExperts)


def is_parameter_to_peft(model: Decoder, name: str) -> bool:
    """Whether PEFT adapts the layer as one of its `target_parameters` instead of as a module.

    It does so for experts and routers. In a model with experts, it also treats any module with an expert's name, even
    in plain layers, as one that an older version stored per expert, and gives it twice the rank.
    """
    if is_projection_of_experts(model, name):
        return True
    layer = model.get_submodule(name)
    if isinstance(getattr(layer, "base_layer", layer), Router):
        return True
    family = model.source.family
    were_single = family.mixture and any("*" in place for places in family.on_disk.values() for place in places)
    if not were_single or family.one_part_per_layer:  # PEFT has no older version of this family
        return False
    return model.source.module_name(name).rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")


def _layers(model: Decoder) -> dict[str, nn.Module]:
    """The modules by name; experts by the names of their projections."""
    layers, stacks = dict[str, nn.Module](), experts_of(model)
    for name, module in model.named_modules():
        if name in stacks:
            layers |= {f"{name}.{projection}": module for projection in PROJECTIONS}
        elif name and not name.startswith("dense.") and not isinstance(module, FrozenParameter):
            layers[name] = module
    return layers


def is_adaptable(module: object) -> bool:
    """Whether a module takes an adapter."""
    return isinstance(module, nn.Linear | Router | nn.Embedding | Experts)


def _matches(name: str, module: nn.Module, pattern: str) -> bool:
    if pattern == ALL_LINEAR:
        is_layer = name.startswith("model.layers.") and not name.endswith((".mamba.out_proj", ".router.proj"))
        return is_layer and is_adaptable(module) and not isinstance(module, Router | nn.Embedding)
    if name.startswith(TOWER) and not pattern.startswith("vision"):  # see `matched_in_tower`
        return False
    return matches_name(name, pattern)


def _nothing_matched(model: Decoder, pattern: str, modules: dict[str, nn.Module]) -> str:
    if matches_unread_tower(model, pattern):
        return f"lora.targets: {pattern!r} {IN_UNREAD_TOWER}"
    adaptable = {name for name, module in modules.items() if is_adaptable(module)}
    names = sorted({name.rpartition(".")[2] for name in adaptable if not name.startswith(TOWER)})
    of_tower = sorted({name.rpartition(".")[2] for name in adaptable if name.startswith(TOWER)}.difference(names))
    in_tower = f" In the vision tower: {', '.join(of_tower)}." if of_tower else ""
    return (
        f"lora.targets: {pattern!r} matches no layer of this model.{did_you_mean(pattern, [ALL_LINEAR, *names])} "
        f"Expected {ALL_LINEAR}, a name with wildcards such as model.layers.0.*, or one of "
        f"{', '.join(names)}.{in_tower}"
    )


def describe_targets(model: Decoder) -> str:
    """`language model: q_proj, v_proj (56 layers); vision tower: qkv (24 layers)`."""
    adapted: dict[bool, list[str]] = {False: [], True: []}
    for name in adapted_layers(model):
        adapted[name.startswith(TOWER)].append(name)
    parts = []
    for what, names in (("language model", adapted[False]), ("vision tower", adapted[True])):
        ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        parts.append(f"{what}: {ends} ({counted(len(names), 'layers')})" if names else f"{what}: no layer")
    return "; ".join(parts)
