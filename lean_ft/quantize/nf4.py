"""NF4: frozen weights in 4.13 bits per value, dequantized for each product.

Every 64 values share a scale, and each value is the nearest of 16 levels, quantiles of a normal distribution. The scales minus
their mean are quantized to 8 bits in blocks of 256 ("double quantization"). Format and kernels are those of bitsandbytes on
every device; on CPUs they are faster than torchao's, which are PyTorch operations.

Quantized weights are never saved; each run makes them from the model's folder.

Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.

Shapes: I inputs, O outputs.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.system.environment import bitsandbytes_problem
from lean_ft.system.shards import part_of
from lean_ft.torch_private import without_modes

BLOCK_SIZE = 64
_SCALE_BLOCK_SIZE = 256

# A frozen weight (O, I): the weight itself, or the tensors of `quantize`.
Frozen = Sequence[Tensor]


def quantize(weight: Tensor) -> tuple[Tensor, ...]:
    """The levels of `weight` (O, I), two per byte; their scales; and the scales' own scales, mean and levels."""
    levels, state = _bitsandbytes().quantize_4bit(
        weight.contiguous(), blocksize=BLOCK_SIZE, quant_type="nf4", compress_statistics=True
    )
    return levels, state.absmax, state.state2.absmax, state.offset, state.state2.code


def whole(frozen: Frozen, out_features: int, like: Tensor, *, again: bool = False) -> Tensor:
    """The dequantized weight (O, I) of a layer whose input is `like` (..., I), in the dtype of `like`.

    again: dequantize again in backward. Otherwise a compiler that recomputes a layer would recognize the same values and keep
    every dequantized weight of the layer from forward to backward.
    """
    if len(frozen) == 1:
        return frozen[0].to(like.dtype)
    levels, scales, scale_scales, mean_scale, scale_levels = frozen
    # The compiler supports these operators, but not the library's functions around them.
    ops = torch.ops.bitsandbytes
    if levels.is_cuda and torch.compiler.is_compiling():  # one kernel, which forward's recomputation and backward share
        block = torch.arange(len(scales), device=scales.device) // _SCALE_BLOCK_SIZE
        scales = scale_levels[scales.int()] * scale_scales[block]
    else:
        scales = ops.dequantize_blockwise(scales, scale_scales, scale_levels, _SCALE_BLOCK_SIZE, torch.float32)
    shape = (out_features, like.shape[-1])
    call_shape = (1, *shape) if again else shape  # other arguments make it a distinct call for the compiler
    return ops.dequantize_4bit(levels, scales + mean_scale, BLOCK_SIZE, "nf4", call_shape, like.dtype).view(shape)


class NF4Linear(nn.Module):
    """A frozen linear layer with a quantized weight.

    If it is created on `meta`, tensors that grow with the weight are parameters, so that they can be sharded.
    """

    levels: Tensor
    stays_whole = False
    """Whether a compiler may keep the dequantized weight from forward to backward. Tiles keep it anyway, and one copy is less
    than two."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        for name, tensor in zip(_NAMES, _shapes(weight) if weight.is_meta else quantize(weight), strict=True):
            if weight.is_meta and name in CUT_NAMES:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor, persistent=False)
        self.dtype = linear.weight.dtype
        self.bias = linear.bias

    @property
    def frozen(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in _NAMES)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight (O, I), a new tensor for each access."""
        return whole(self.frozen, self.out_features, self.levels.new_empty(0, self.in_features, dtype=self.dtype))

    @torch.no_grad()
    def take(self, frozen: Frozen) -> None:
        """Copy the tensors of `quantize`; if this layer is sharded, this rank's part."""
        for name, tensor in zip(_NAMES, frozen, strict=True):
            here = part_of(getattr(self, name))
            here.values.view(-1).copy_(tensor.view(-1)[here.first : here.first + here.values.numel()])

    @property
    def num_bytes(self) -> int:
        """Memory of the quantized weight."""
        return sum(tensor.nbytes for tensor in self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _NF4Product.apply(x, self.bias, self.out_features, self.stays_whole, *self.frozen)


_NAMES = ("levels", "scales", "scale_scales", "mean_scale", "scale_levels")
CUT_NAMES = ("levels", "scales", "scale_scales")


def _shapes(weight: Tensor) -> tuple[Tensor, ...]:
    """The tensors that `quantize` would return, on `meta`."""
    num_scales = -(-weight.numel() // BLOCK_SIZE)
    levels = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device="meta")
    scales = torch.empty(num_scales, dtype=torch.uint8, device="meta")
    scale_scales = torch.empty(-(-num_scales // _SCALE_BLOCK_SIZE), device="meta")
    return levels, scales, scale_scales, torch.empty((), device="meta"), torch.empty(256, device="meta")


class _NF4Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, out_features: int, stays_whole: bool, *frozen: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*frozen)
        ctx.num_inputs, ctx.stays_whole = x.shape[-1], stays_whole
        return F.linear(x, whole(frozen, out_features, x), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        frozen = ctx.saved_tensors  # read once, because checkpointing refuses a second access
        input_like = grad.new_empty(0, ctx.num_inputs)
        weight = whole(frozen, grad.shape[-1], input_like, again=not ctx.stays_whole)
        return grad @ weight, None, None, None, *(None for _ in frozen)


def check_available(*, on_gpu: bool) -> None:
    """Raise ValueError if bitsandbytes is missing or has no kernels for the GPU."""
    if (reason := bitsandbytes_problem(on_gpu=on_gpu)) is not None:
        fix = "Run `pip install bitsandbytes`, or set lora.quantize=none."
        raise ValueError(f"lora.quantize=nf4 needs bitsandbytes, and {reason}. {fix}")


@cache
def _bitsandbytes() -> ModuleType:
    import bitsandbytes.functional as functional

    with without_modes():  # the library builds its tables on first use
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    return functional
