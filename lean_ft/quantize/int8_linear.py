"""Linear layers of torchao's kind `int8_dynamic_int8_weight` on a CPU, by oneDNN's product of 8-bit integers.

Weights have one scale per row, and inputs are rounded to 8 bits with one scale per token, as torchao does. The sums are exact, so
a token does not depend on its batch. (4864 x 896, 8 rows, one core of an AMD EPYC with AVX512-VNNI: 0.15 ms; the same weight in
bfloat16 in oneDNN's layout: 0.38 ms.)

Shapes: N rows, I inputs, O outputs of a layer.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft import torch_private

_ZERO = 128  # oneDNN has fast kernels for unsigned inputs only


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
