"""Linear layers with torchao's quantized weights on a CPU, with products that do not dequantize the weight for each
token.

`int8_dynamic_int8_weight`: oneDNN multiplies 8-bit integers. Inputs are rounded with one scale per token, as torchao
does. The sums are exact, so a token does not depend on its batch. `int8` and `int4`: for few rows, PyTorch's kernels
for quantized weights.

One core of an AMD EPYC with AVX512-VNNI, weight 4864 x 896, in ms; oneDNN's product in bfloat16 takes 0.28 and 0.37:

    kind                        1 row   8 rows      torchao, 8 rows
    int8_dynamic_int8_weight    0.23    0.25        1.8
    int8                        0.27    0.55        1.0
    int4, groups of 32          0.14    0.42        2.9

Shapes: N rows, I inputs, O outputs of a layer.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft import torch_private
from lean_ft.models.few_rows import MOST_ROWS

_ZERO = 128  # oneDNN has fast kernels for unsigned inputs only


def fast_linear(linear: nn.Linear, kind: str | None, group_size: int) -> nn.Module:
    """The layer with a fast product, or `linear` where there is none."""
    weight: Any = linear.weight
    if kind == "int8_dynamic_int8_weight" and has_int8_products():
        return Int8Linear(weight.qdata, weight.scale, linear.bias)
    try:
        if kind == "int8":
            scales = weight.scale.flatten().to(weight.dtype)
            return FewRowsLinear(linear, lambda x: torch_private.int8_weight_linear(x, weight.qdata, scales))
        if kind == "int4":
            packed = torch_private.pack_int4_weight(weight.qdata.int() + 8, 1)
            scales = nn.functional.pad(weight.scale.T[..., None].to(weight.dtype), (0, 1))  # and offsets of 0
            return FewRowsLinear(linear, lambda x: torch_private.int4_weight_linear(x, packed, group_size, scales))
    except (AttributeError, RuntimeError):  # of PyTorch's version, of this CPU or for this shape
        pass
    return linear


class FewRowsLinear(nn.Module):
    """A linear layer with another product, without its bias, for at most `MOST_ROWS` rows."""

    def __init__(self, linear: nn.Linear, product: Callable[[Tensor], Tensor]) -> None:
        """Raises RuntimeError if the product does not support the layer."""
        super().__init__()
        self.linear, self._product = linear, product
        product(torch.zeros(1, linear.in_features, dtype=linear.weight.dtype))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > MOST_ROWS:
            return self.linear(x)
        out, bias = self._product(rows), self.linear.bias
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)


class Int8Linear(nn.Module):
    """A frozen linear layer with 8-bit weights in oneDNN's layout."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """numbers: (O, I) int8; scales: (O, 1) float32; bias: (O,)."""
        super().__init__()
        self.register_buffer("packed", torch_private.pack_int8_linear(numbers, None), persistent=False)
        self.register_buffer("scales", scales.float().flatten(), persistent=False)
        self.register_buffer("zeros", torch.zeros(len(numbers), dtype=torch.int32), persistent=False)
        self.bias = bias

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        numbers, scales = _rounded(x.reshape(-1, x.shape[-1]))
        out = _product(numbers, self.packed, self.scales, self.zeros).mul_(scales).to(x.dtype)
        return (out if self.bias is None else out.add_(self.bias)).view(*x.shape[:-1], -1)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit numbers (N, I) of x (N, I), and the scales (N, 1) in float32."""
    scales = x.abs().amax(1, keepdim=True).div_(127.5).float().clamp_(min=torch.finfo(torch.float32).eps)
    return (x * scales.reciprocal()).round_().add_(_ZERO).clamp_(0, 255).to(torch.uint8), scales


def _product(numbers: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The product (N, O) in float32, without the scales of the inputs."""
    others: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias and no quantization of the result
    return torch_private.int8_linear(numbers, 1.0, _ZERO, packed, scales, zeros, *others)


@cache
def has_int8_products() -> bool:
    """Whether the CPU has such products. Those of a CPU without VNNI overflow in 16 bits."""
    weight, numbers = torch.full((16, 64), -127, dtype=torch.int8), torch.full((2, 64), 255, dtype=torch.uint8)
    try:
        packed = torch_private.pack_int8_linear(weight, None)
        found = _product(numbers, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return bool((found == -127 * 127 * 64).all())
