"""Per-layer torch.compile: every layer is compiled by itself, and layers of one shape share one compilation.

Compiling the whole model would be slower to start and would hand all gradients over at once at the end of backward;
compiled layer by layer, gradients arrive a layer at a time, so an optimizer that steps in backward can free them.

A compiler that sees forward and backward together can choose what to keep between them. `activation_budget` gives it a
share of what it would keep if nothing were computed twice, and it drops what is cheapest to have again: from 1, where
only what costs next to nothing is recomputed, to 0, where a layer keeps its inputs alone, as full checkpointing does.

Source: torchtitan's per-block compilation; PyTorch's activation memory budget, which solves
a knapsack of bytes against arithmetic.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from lean_ft.system.shapes_only import stage
from lean_ft.torch_private import functorch_config, lookup_backend


def compile_layers(model: nn.Module, activation_budget: float | None = None) -> int:
    """Compiles each layer of a decoder in place, and returns how many those are.

    activation_budget: the share, from 0 to 1, of a layer's activations that backward finds kept; None leaves the
    compiler its own choice, which is 1.

    Raises:
        ValueError: when the model has no `layers`.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ValueError(f"compile_layers expects a model with a ModuleList `layers`, but got {type(model).__name__}")
    backend = {} if activation_budget is None else {"backend": _within(activation_budget)}
    for layer in layers:
        layer.compile(fullgraph=True, **backend)
    return len(layers)


def _within(budget: float) -> Callable[..., Any]:
    """The default compiler, under a budget that holds for its own work alone: the setting is the whole process's."""
    if stage() is not None:  # a planner's compiler takes the place of any, and goes by the process's setting
        functorch_config.activation_memory_budget = budget
    return _inductor_within(budget)


@cache
def _inductor_within(budget: float) -> Callable[..., Any]:
    inductor = lookup_backend("inductor")

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return inductor(graph, inputs)

    return compile_graph
