"""Linear layers of a few rows on a CPU in 16 bits, where PyTorch's product is several times slower than reading the weight.

In generation a product has one row per sequence. If memory allows, weights are copied once into the layout of oneDNN's kernels. The
results are the same bits (4864 x 896, 8 rows, one core of an AMD EPYC with AVX512-BF16: 0.63 ms before, 0.38 ms after). Otherwise the
product is computed as the weight times the transposed rows. Only the order of the sums differs (output layer of 16,384 tokens, 8 rows,
one core of a Xeon with AVX512-BF16: 8.5 ms before, 1.6 ms after).

Shapes: N rows, I inputs, O outputs of a layer.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft import torch_private

MOST_ROWS = 32
DTYPES = (torch.bfloat16, torch.float16)
_PACKED_FOR = 8  # rows; oneDNN's layout hardly depends on it

_packed: dict[int, Tensor] = {}  # by the id of the weight


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x (..., I), weight (O, I) and bias (O,)."""
    num_rows = x.numel() // x.shape[-1]
    is_16_bits_on_cpu = weight.device.type == "cpu" and weight.dtype in DTYPES and x.dtype == weight.dtype
    if not is_16_bits_on_cpu or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if _packed and (packed := _packed.get(id(weight))) is not None:
        return torch_private.packed_linear(x, packed, bias, "none", [], "")
    if not 1 < num_rows <= MOST_ROWS:
        return F.linear(x, weight, bias)
    out = (weight @ x.reshape(num_rows, -1).T).T.contiguous()  # (N, O)
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)


class FewRows:
    """Context manager in which a model's plain linear layers use `few_rows_linear`, if they are on a CPU and in 16 bits."""

    def __init__(self, model: nn.Module, most_bytes: float = 0, pack: Callable[[Tensor], Tensor] | None = None) -> None:
        """most_bytes: the memory for copies of all weights, which exist as long as this object; pack: makes a copy."""
        linear = (module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module))
        # torchao multiplies its quantized weights itself.
        self._modules = [m for m in linear if _is_16_bits_on_cpu(m.weight) and not hasattr(m.weight, "qdata")]
        weights = [module.weight for module in self._modules]
        embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
        if embedding is not None and getattr(model, "head", None) is None and _is_16_bits_on_cpu(embedding.weight):
            weights.append(embedding.weight)  # tied to the output layer
        is_plain = all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
        fits = sum(weight.nbytes for weight in weights) <= most_bytes
        self._packed: dict[int, Tensor] = {}
        if is_plain and fits and all(map(_can_pack, {weight.dtype for weight in weights})):
            self._packed = {id(weight): (pack or _pack)(weight) for weight in weights}

    def __enter__(self) -> None:
        _packed.update(self._packed)
        for module in self._modules:
            module.forward = MethodType(_forward, module)  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *_: object) -> None:
        for weight in self._packed:
            _packed.pop(weight, None)
        for module in self._modules:
            del module.forward


def _is_16_bits_on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in DTYPES


@torch.no_grad()
def _pack(weight: Tensor) -> Tensor:
    return torch_private.pack_linear(weight, _PACKED_FOR)


@cache
@torch.no_grad()
def _can_pack(dtype: torch.dtype) -> bool:
    with torch_private.without_modes():
        x = torch.ones(2, 16, dtype=dtype)
        try:
            packed = torch_private.pack_linear(x, _PACKED_FOR)
            return bool((torch_private.packed_linear(x, packed, None, "none", [], "") == 16).all())
        except (AttributeError, RuntimeError):
            return False


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return few_rows_linear(x, module.weight, module.bias)
