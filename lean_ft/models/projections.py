"""Layers that read the same input."""

from torch import Tensor, nn


def project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The output of each layer for x.

    A class of layers that computes several of them together has a static method `joint_forward(layers, x)`, which
    returns None where they have no joint form.
    """
    joint: dict[nn.Module, Tensor] = {}
    for kind in dict.fromkeys(type(layer) for layer in layers):
        together = getattr(kind, "joint_forward", None)
        members = [layer for layer in layers if type(layer) is kind]
        if together is not None and (outputs := together(members, x)) is not None:
            joint |= dict(zip(members, outputs, strict=True))
    return tuple(joint[layer] if layer in joint else layer(x) for layer in layers)
