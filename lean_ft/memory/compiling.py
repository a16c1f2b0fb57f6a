"""Per-layer torch.compile: every layer is compiled by itself, and layers of one shape share one compilation.

Compiling the whole model would be slower to start and would hand all gradients over at once at the end of backward;
compiled layer by layer, gradients arrive a layer at a time, so an optimizer that steps in backward can free them.

Source: torchtitan's per-block compilation.
"""

from torch import nn


def compile_layers(model: nn.Module) -> int:
    """Compiles each layer of a decoder in place, and returns how many those are.

    Raises:
        ValueError: when the model has no `layers`.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ValueError(f"compile_layers expects a model with a ModuleList `layers`, but got {type(model).__name__}")
    for layer in layers:
        layer.compile(fullgraph=True)
    return len(layers)
