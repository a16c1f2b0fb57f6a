"""Layers that read the same input."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The output of each layer for x."""
    results: dict[nn.Module, Tensor] = {}
    for kind in dict.fromkeys(type(layer) for layer in layers):
        members: list[Any] = [layer for layer in layers if type(layer) is kind]
        outputs = _joint_outputs(members, x)
        if len(outputs) == 1 and len(members) > 1:
            outputs = outputs[0].split([layer.out_features for layer in members], -1)
        if outputs:
            results |= dict(zip(members, outputs, strict=True))
    return tuple(results[layer] if layer in results else layer(x) for layer in layers)


def project_pair(x: Tensor, first: nn.Module, second: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of two layers for x, or both side by side in one tensor where their class computes them so."""
    outputs = _joint_outputs((first, second), x) if type(first) is type(second) else ()
    return outputs or (first(x), second(x))


def _joint_outputs(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """The outputs that the layers' class computes together by its static method `joint_forward(layers, x)`: of each
    layer, or side by side in one tensor. Empty where it has no joint form for these layers."""
    joint_forward = getattr(type(layers[0]), "joint_forward", None)
    return () if joint_forward is None else joint_forward(layers, x)
