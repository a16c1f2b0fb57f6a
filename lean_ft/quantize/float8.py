"""Float8 matrix products in the layers' linear projections, with one scale per tensor.

Weights, gradients, optimizer state and activations keep their dtype. Each product rounds its two factors to float8 (e4m3
forward, e5m2 for gradients), scaled by their largest magnitude, and sums in float32. On GPUs with float8 a product is up to
2x faster; memory hardly changes. Factors keep three mantissa bits. Compile the layers too: without compilation, rounding takes
longer than the products save.

Source: torchao's float8 training (Float8Linear, dynamic scales per tensor); formats: Micikevicius et al. 2022,
arXiv:2209.05433. Left out: routers, whose choices should not be rounded; experts, whose products are grouped; the output layer,
which has its own loss; and scales per row.
"""

from typing import Any

import torch
from torch import nn

from lean_ft.system.world import device_type

DIVISOR = 16  # float8 products need both sides of a matrix to be multiples of this


def float8_products(model: nn.Module, *, emulate: bool = False) -> int:
    """Use float8 products in the linear projections inside the model's layers, and return their number.

    emulate: round to float8, but multiply in the original dtype, for tests on any device. Raises ValueError if the device has
    no float8 products, a projection has an adapter, or no projection has sides that are multiples of 16.
    """
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layers: Any = getattr(model, "layers", None) or []
    owners = [owner for layer in layers for owner in layer.modules()]
    if any(isinstance(getattr(owner, "base_layer", None), nn.Linear) for owner in owners):
        raise ValueError(
            "memory.float8_products=true does not support adapters: their layers multiply the frozen weights themselves, in "
            "the model's dtype. Set memory.float8_products=false, or remove lora."
        )
    device = next(model.parameters()).device
    if device_type(device) == "cuda" != device.type:
        return 0  # the planner treats them as bfloat16 products, which take the same memory
    if not emulate:
        _refuse_without_hardware(device)
    config, changed = Float8LinearConfig(emulate=emulate, pad_inner_dim=True), 0  # pads the tokens if needed
    for owner in owners:
        for name, linear in list(owner.named_children()):
            if type(linear) is nn.Linear and linear.in_features % DIVISOR == linear.out_features % DIVISOR == 0:
                setattr(owner, name, Float8Linear.from_float(linear, config))  # the same parameters
                changed += 1
    if not changed:
        raise ValueError(
            f"memory.float8_products=true needs linear projections inside `layers` whose sides are multiples of {DIVISOR}; "
            f"{type(model).__name__} has none. Set memory.float8_products=false."
        )
    return changed


def _refuse_without_hardware(device: torch.device) -> None:
    if device.type != "cuda":
        found = f"the model is on {device.type}, which has none"
    elif torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9):
        return
    else:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found = f"{torch.cuda.get_device_name(device)} has none (compute capability {capability}; 8.9 or newer has)"
    raise ValueError(f"memory.float8_products=true: {found}. Set memory.float8_products=false.")
