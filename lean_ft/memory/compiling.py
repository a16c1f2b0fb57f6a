"""Per-layer torch.compile: layers are compiled separately, and layers of the same shape share one compilation.

Compiling the whole model would start more slowly and deliver all gradients at once at the end of backward. Per layer,
gradients arrive one layer at a time, so an optimizer that steps in backward can free them.

The compiler sees forward and backward together and can choose which activations to keep. `activation_budget` is the
share of activations it may keep; it recomputes the cheapest ones. At 1 it recomputes only what costs almost nothing; at
0 a layer keeps only its inputs, as in full checkpointing.

Source: torchtitan's per-block compilation; PyTorch's activation memory budget (a knapsack of bytes against arithmetic).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from lean_ft.system.environment import without_current_folder
from lean_ft.system.world import world

# Within a checkpoint, the compiler of torch 2.11 keeps the results of an `autograd.Function`'s operations.
_FORGETS_CHECKPOINTS = torch.__version__.startswith("2.11.")


def compile_layers(model: nn.Module, activation_budget: float | None = None) -> int:
    """Compile each layer of a decoder in place, and return their number.

    `activation_budget` is the share of a layer's activations to keep, 0 to 1; None is the compiler's default, 1. Raises
    ValueError if the model has no `layers`.
    """
    from lean_ft.torch_private import dynamo, pick_vec_isa

    layers = decoder_layers(model, "compile_layers")
    if _FORGETS_CHECKPOINTS and all(getattr(layer, "checkpoint_keeps", None) == "nothing" for layer in layers):
        activation_budget = 0.0
    backend = {} if activation_budget is None else {"backend": _inductor_within(activation_budget)}

    def prepare() -> None:
        if next(model.parameters()).device.type == "cpu":
            with without_current_folder():
                pick_vec_isa()  # starts Python, once per process

    world().prepare_compiler(prepare, activation_budget)
    # Each kind of layer is compiled once. Beyond the limit, 8 by default, a layer of a new kind would fail.
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 64)
    for layer in layers:
        layer.compile(fullgraph=True, **backend)
    return len(layers)


def decoder_layers(model: nn.Module, technique: str) -> nn.ModuleList:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ValueError(f"{technique} expects a model with a ModuleList `layers`, but got {type(model).__name__}")
    return layers


@cache
def _inductor_within(budget: float) -> Callable[..., Any]:
    """Inductor with the budget set only while it compiles, because the setting is process-wide."""
    from lean_ft.torch_private import functorch_config, lookup_backend

    inductor = lookup_backend("inductor")

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return inductor(graph, inputs)

    return compile_graph
