"""Matrix products in float8: the layers' linear projections multiply numbers of 8 bits, with a scale a tensor.

Weights, gradients, optimizer state and everything between the products stay as they are. Each product's two factors are
rounded to float8 where they are used, e4m3 forward and e5m2 for gradients, each scaled by its own largest magnitude, and
sums are float32. On GPUs that have it a product is up to twice as fast; what it saves in memory is nothing to speak of,
and what it costs is three mantissa bits of every factor. Compile the layers with it: uncompiled, the rounding takes longer
than the products save.

Source: torchao's float8 training (Float8Linear, dynamic scales a tensor); the formats are Micikevicius et al. 2022,
arXiv:2209.05433. Left out: a router's scores, which choose and should not be rounded; experts, whose products are grouped;
the output layer, whose loss is our own; and scales a row.
"""

from typing import Any

import torch
from torch import nn

from lean_ft.system.shapes_only import device_type

DIVISOR = 16  # float8 products want both sides of a matrix to be whole multiples of this


def float8_products(model: nn.Module, *, emulate: bool = False) -> int:
    """Has the linear projections inside the model's layers multiply in float8, and returns how many those are.

    emulate: round to float8, but multiply as before, which any device can: for tests.

    Raises:
        ValueError: where the device has no float8 products, or no projection's sides are multiples of 16.
    """
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    device = next(model.parameters()).device
    if device_type(device) == "cuda" != device.type:
        return 0  # a planner takes them for products in bfloat16, which take the same memory
    if not emulate:
        _refuse_without_hardware(device)
    layers: Any = getattr(model, "layers", None) or []
    owners = [owner for layer in layers for owner in layer.modules()]
    config, changed = Float8LinearConfig(emulate=emulate, pad_inner_dim=True), 0  # pads the tokens, where it must
    for owner in owners:
        for name, linear in list(owner.named_children()):
            if type(linear) is nn.Linear and linear.in_features % DIVISOR == linear.out_features % DIVISOR == 0:
                setattr(owner, name, Float8Linear.from_float(linear, config))  # the same parameters
                changed += 1
    if not changed:
        raise ValueError(
            f"memory.float8_products=true is for linear projections inside `layers` whose sides are multiples of {DIVISOR}, "
            f"and {type(model).__name__} has none. Set memory.float8_products=false."
        )
    return changed


def _refuse_without_hardware(device: torch.device) -> None:
    if device.type != "cuda":
        lacks = f"the model is on {device.type}, which has none"
    elif torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        lacks = f"{torch.cuda.get_device_name(device)} has none (compute capability {major}.{minor}; 8.9 or newer has)"
    else:
        return
    raise ValueError(
        f"memory.float8_products=true multiplies in float8, but {lacks}. Set memory.float8_products=false."
    )
