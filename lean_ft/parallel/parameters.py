"""Leaves of a parameter the part that is here."""

from torch import nn

from lean_ft.models import Decoder
from lean_ft.system.shards import Cut, remember_cuts


def cut_parameter(model: Decoder, owner: nn.Module, place: str, name: str, cut: Cut) -> None:
    """Replaces the parameter `name` of `owner`, which is the model's module `place`, by its part, a tensor of its own."""
    whole = owner.get_parameter(name)
    assert whole.shape[cut.dim] % cut.num_parts == 0, "it was refused before"
    part = whole.detach().chunk(cut.num_parts, cut.dim)[cut.part].clone()
    setattr(owner, name, nn.Parameter(part.contiguous(), requires_grad=whole.requires_grad))
    model.sharding.cuts[f"{place}.{name}"] = cut
    remember_cuts([(name, owner.get_parameter(name))], {name: cut})
