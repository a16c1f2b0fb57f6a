"""Adapters on the vision tower of a multimodal model."""

from collections.abc import Sequence

from torch import nn

from lean_ft.models import Decoder
from lean_ft.system.parameter_names import matches_name

ALL_LINEAR = "all-linear"
TOWER = "vision."  # begins the names of the vision tower's layers
IN_UNREAD_TOWER = (
    "matches only layers of the model's vision tower, and model.images=none loads the language model alone. Set "
    "model.images=train, or remove the pattern."
)


def matched_in_tower(model: Decoder, modules: dict[str, nn.Module], pattern: str, *, is_alone: bool) -> list[str]:
    """Return the tower's layers with a weight that match a pattern without `vision` at its beginning.

    is_alone: the pattern matches nothing in the language model, so a match in a tower that does not train raises
    ValueError.
    """
    if model.vision is None or pattern == ALL_LINEAR:
        return []
    types = nn.Linear | nn.Conv2d | nn.Conv3d
    layers = [name for name, module in modules.items() if name.startswith(TOWER) and isinstance(module, types)]
    matched = [name for name in layers if matches_name(model.source.module_name(name), pattern)]
    matched = matched or [name for name in layers if matches_name(name, pattern)]
    if any(parameter.requires_grad for parameter in model.vision.parameters()):
        return matched
    if matched and is_alone:
        raise ValueError(
            f"lora.targets: {pattern!r} matches only layers of the vision tower ({matched[0]}), and "
            "model.images=frozen does not train the tower. Set model.images=train, or remove the pattern."
        )
    return []


def matches_unread_tower(model: Decoder, pattern: str) -> bool:
    """Whether a pattern matches layers of the folder's vision tower, which was not loaded."""
    unread = [name.rpartition(".")[0] for name, stored in model.source.names.items() if stored is None]
    return model.vision is None and any(matches_name(name, pattern) for name in unread)


def check_suits_tower(names: Sequence[str], tower: nn.Module) -> None:
    """Raise ValueError unless the vision tower trains exactly if it gets an adapter."""
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())
    if names and not is_trained:
        raise ValueError(
            f"lora.targets has {names[0]}, a layer of the vision tower, and model.images=frozen does not train the "
            "tower. Set model.images=train, or remove the pattern."
        )
    if is_trained and not names:
        raise ValueError(
            "model.images=train needs an adapter on the vision tower, since everything beside adapters is frozen. Set "
            "model.images=frozen, or add layers of the tower to lora.targets, such as [all-linear,vision.blocks.*]."
        )
