"""Linear layers of a few rows on a CPU in 16 bits, where PyTorch's product is several times slower than reading the
weight.

In generation a product has one row per sequence. Weights in the layout of oneDNN's kernels are multiplied at up to
twice the speed, and not slower for 4,096 rows (4864 x 896, one core of an AMD EPYC with AVX512-BF16, in ms):

    rows                                1       2       8       32
    F.linear                            0.54    0.56    0.71    1.06
    oneDNN's layout                     0.27    0.29    0.48    0.91
    the weight times transposed rows    0.57    1.29    1.36    1.05

The results of the three are the same bits there. `FewRows` makes such copies of weights, and `pack_in_place` replaces
the weights of a model that only generates. Without them, a CPU with AMX multiplies the weight by the transposed rows,
where only the order of the sums differs (output layer of 16,384 tokens, 8 rows, one core of a Xeon: 8.5 ms before, 1.6
ms after). The CPU's kind decides, because a measurement could decide otherwise in a resumed run, which would then have
other bits.

Shapes: N rows, I inputs, O outputs of a layer.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft import torch_private
from lean_ft.system.environment import cpu_features

MOST_ROWS = 32
DTYPES = (torch.bfloat16, torch.float16)
_PACKED_FOR = 8  # rows; oneDNN's layout hardly depends on it
_HAS_AMX = "amx_bf16" in cpu_features()  # read once, since the compiler cannot read files
_KEPT = ("kv_b_proj", "base_layer")  # linear layers whose weights other modules multiply themselves

_packed: dict[int, Tensor] = {}  # by the id of the weight


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x (..., I), weight (O, I), which can be in oneDNN's layout, and bias (O,).

    With gradients it is F.linear, because the other products cannot be differentiated. Models in training mode do not
    call it.
    """
    num_rows = x.numel() // x.shape[-1]
    is_16_bits_on_cpu = weight.device.type == "cpu" and weight.dtype in DTYPES and x.dtype == weight.dtype
    if not is_16_bits_on_cpu or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    packed = weight if weight.is_mkldnn else _packed.get(id(weight)) if _packed else None
    if packed is not None:
        return torch_private.packed_linear(x, packed, bias, "none", [], "")
    if not 1 < num_rows <= MOST_ROWS or not _HAS_AMX:
        return F.linear(x, weight, bias)
    out = (weight @ x.reshape(num_rows, -1).T).T.contiguous()  # (N, O)
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)


class FewRows:
    """Context manager in which a model's plain linear layers use `few_rows_linear`, if they are on a CPU and in 16
    bits."""

    def __init__(self, model: nn.Module, most_bytes: float = 0, pack: Callable[[Tensor], Tensor] | None = None) -> None:
        """most_bytes: the memory for copies of all weights, which exist as long as this object; pack: makes a copy."""
        self._modules: list[Any] = [module for module in model.modules() if _plain_weight(module) is not None]
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
            module.forward = MethodType(_forward, module)

    def __exit__(self, *_: object) -> None:
        for weight in self._packed:
            _packed.pop(weight, None)
        for module in self._modules:
            del module.forward


@torch.no_grad()
def pack_in_place(model: nn.Module, most_bytes: float) -> None:
    """Keep the weights of a model's plain linear layers in the layout of oneDNN's kernels alone, if they are on a CPU
    and in 16 bits.

    The model can then generate, but not be trained or saved. Weights are copied and freed one by one. most_bytes: the
    memory for a second copy of an embedding that is tied to the output layer; its rows are needed too.
    """
    model.eval()  # the products of training read the usual layout
    trunk: Any = model.model
    head, embedding = model.head, trunk.embed_tokens
    # No generated token passes a vision tower.
    for name, module in [*trunk.named_modules(), ("head", head)]:
        if name.rpartition(".")[2] not in _KEPT and (weight := _plain_weight(module)) is not None:
            _keep_packed(module, weight)
    if head is None and type(embedding) is nn.Embedding and embedding.weight.nbytes <= most_bytes:
        num_tokens, width = embedding.weight.shape
        output = nn.Linear(width, num_tokens, bias=False, device="meta")
        if _is_16_bits_on_cpu(embedding.weight) and _keep_packed(output, embedding.weight):
            model.lm_head = output


def _keep_packed(module: nn.Linear, weight: Tensor) -> bool:
    """Give the layer a packed copy of `weight` as its weight, if the CPU can; return whether it can."""
    if can := _can_pack(weight.dtype):
        module.weight = nn.Parameter(_pack(weight), requires_grad=False)
        module.forward = MethodType(_forward, module)
    return can


def _plain_weight(module: nn.Module | None) -> Tensor | None:
    """The weight of a linear layer of 16 bits on a CPU whose product nothing has replaced; None for other modules."""
    if type(module) is not nn.Linear or "forward" in vars(module) or not _is_16_bits_on_cpu(module.weight):
        return None
    return None if hasattr(module.weight, "qdata") else module.weight  # torchao multiplies its quantized weights itself


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
