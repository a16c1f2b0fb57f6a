"""Linear layers of a few rows on a CPU, computed as the weight times the transposed rows.

In generation a product has one row per sequence. In 16 bits, PyTorch's product of few rows with a transposed weight is several
times slower than the product of the weight with the transposed rows (output layer of 16,384 tokens, 8 rows, one core of a Xeon
with AVX512-BF16: 8.5 ms and 1.6 ms). Only the order of the sums differs.

Shapes: N rows, I inputs, O outputs of a layer.
"""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ROWS = 32
DTYPES = (torch.bfloat16, torch.float16)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x (..., I), weight (O, I) and bias (O,)."""
    num_rows = x.numel() // x.shape[-1]
    is_16_bits_on_cpu = weight.device.type == "cpu" and weight.dtype in DTYPES and x.dtype == weight.dtype
    if not is_16_bits_on_cpu or not 1 < num_rows <= MOST_ROWS or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    out = (weight @ x.reshape(num_rows, -1).T).T.contiguous()  # (N, O)
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)


class FewRows:
    """Context manager in which a model's plain linear layers use `few_rows_linear`, if they are on a CPU and in 16 bits."""

    def __init__(self, model: nn.Module) -> None:
        linear = (module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module))
        self._modules = [m for m in linear if m.weight.device.type == "cpu" and m.weight.dtype in DTYPES]

    def __enter__(self) -> None:
        for module in self._modules:
            module.forward = MethodType(_forward, module)  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            del module.forward


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return few_rows_linear(x, module.weight, module.bias)
