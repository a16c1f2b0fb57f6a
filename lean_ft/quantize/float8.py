"""Float8 matrix products in the layers' linear projections.

Weights, gradients, optimizer state and activations keep their dtype. Each product rounds its two factors to float8 and
sums in float32. On GPUs with float8 a product is up to 2x faster; memory hardly changes. Compile the layers too:
without compilation, rounding takes longer than the products save.

    trained weights  torchao's Float8Linear: a scale per tensor; e4m3 forward, e5m2 for gradients
    frozen weights   of a model with adapters: a scale per row, e4m3 (`lean_ft.models.float8_product`). The adapter's
                     own products keep the model's dtype

Source: torchao's float8 training; formats: Micikevicius et al. 2022, arXiv:2209.05433. Left out: routers, whose choices
should not be rounded; experts, whose products are grouped; and the output layer, which has its own loss.
"""

from typing import Any

import torch
from torch import nn

from lean_ft.models.frozen_weight import FrozenLinear
from lean_ft.system.world import device_type

DIVISOR = 16  # float8 products need both sides of a matrix to be multiples of this


def float8_products(model: nn.Module, *, emulate: bool = False) -> int:
    """Use float8 products in the linear projections inside the model's layers, and return their number.

    emulate: round to float8, but multiply in the original dtype, for tests on any device. Raises ValueError if the
    device has no float8 products, or no projection has sides that are multiples of 16.
    """
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layers: Any = getattr(model, "layers", None) or []
    owners = [owner for layer in layers for owner in layer.modules()]
    has_adapters = any(isinstance(getattr(owner, "base_layer", None), nn.Linear) for owner in owners)
    device = next(model.parameters()).device
    is_planned = device_type(device) == "cuda" != device.type
    if not emulate and not is_planned:
        _refuse_without_hardware(device, has_adapters)
    config, changed = Float8LinearConfig(emulate=emulate, pad_inner_dim=True), 0  # pads the tokens if needed
    for owner in owners:
        for name, module in list(owner.named_children()):
            linear: Any = getattr(module, "base_layer", module)
            if name == "base_layer" or not isinstance(linear, nn.Linear):
                continue
            if linear.in_features % DIVISOR or linear.out_features % DIVISOR:
                continue
            if hasattr(module, "in_float8"):  # with an adapter, or quantized
                module.in_float8 = True
            elif type(linear) is not nn.Linear:
                continue
            elif has_adapters and not linear.weight.requires_grad:
                frozen = FrozenLinear(linear.weight, linear.bias)
                frozen.in_float8 = True
                setattr(owner, name, frozen)
            elif not is_planned:  # a plan counts bfloat16 products
                setattr(owner, name, Float8Linear.from_float(linear, config))  # the same parameters
            changed += 1
    if not changed:
        raise ValueError(
            "memory.float8_products=true needs linear projections inside `layers` whose sides are multiples of "
            f"{DIVISOR}; {type(model).__name__} has none. Set memory.float8_products=false."
        )
    return changed


def _refuse_without_hardware(device: torch.device, has_adapters: bool) -> None:
    if device.type != "cuda":
        found = f"the model is on {device.type}, which has none"
    elif torch.version.hip is not None and has_adapters:
        found = "with adapters it needs an NVIDIA GPU"
    elif torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9):
        return
    else:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found = f"{torch.cuda.get_device_name(device)} has none (compute capability {capability}; 8.9 or newer has)"
    raise ValueError(f"memory.float8_products=true: {found}. Set memory.float8_products=false.")
