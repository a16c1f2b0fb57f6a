"""Frozen weights in fewer bits: what is stored, and the dense weight that a product needs.

    plain    the weight itself, in any dtype
    nf4      4-bit levels of a normal distribution, a scale per 64 values; the scales minus their mean are quantized to
             8 bits in blocks of 256 ("double quantization"). The format and kernels are those of bitsandbytes on every
             device; on CPUs they are faster than torchao's, which are PyTorch operations
    float8   e4m3 numbers, and float32 scales of every row: one, or one per block of neighboring columns
    mxfp4    4-bit numbers with a power of two per 32

An autograd function keeps `tensors` for backward and calls `whole` in both passes, so that no dense weight is in memory
between them. A trained weight is plain, and its gradient is that of its only tensor.

Sources: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314 (nf4); DeepSeek-V3, 2024,
https://arxiv.org/abs/2412.19437, section 3.3 (float8); OCP Microscaling Formats 1.0, 2023 (mxfp4).

Shapes: E experts, O outputs, I inputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.float8_product import float8_backward, float8_forward
from lean_ft.models.layers import is_on_cuda, runs_triton
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import Cost, Launched, register_cost
from lean_ft.system.shards import part_of, whole_numel

NF4_BLOCK = 64  # values that share a scale
NF4_SCALE_BLOCK = 256  # scales that share a scale
NF4_AT_ONCE = 3  # weights that a kernel expands together: the projections that read the same input
TENSORS = {
    "plain": ("weight",),
    "nf4": ("levels", "scales", "scale_scales", "mean_scale", "scale_levels"),
    "float8": ("numbers", "scales"),
    "mxfp4": ("blocks", "exponents"),
}
_OF_ALL_RANKS = ("mean_scale", "scale_levels")  # do not grow with the weight
_LARGEST_FLOAT8 = 448.0
_STRIP_NUMBERS = 2**24  # quantized at a time


class Form(NamedTuple):
    """How a weight is stored."""

    kind: Literal["plain", "nf4", "float8", "mxfp4"]
    shape: tuple[int, ...]  # (O, I), or (E, O, I) of a stack of experts
    dtype: torch.dtype  # of the dense weight
    stays_whole: bool = False
    """Whether a compiler may keep the dense weight from forward to backward. Tiles keep it anyway, and one copy is less
    than two."""
    is_transposed: bool = False
    """Whether the transposes of the matrices are stored. The dense weight is then a view of them, which is not
    contiguous."""
    in_float8: bool = False
    """Whether products are computed in float8 (`lean_ft.models.float8_product`)."""


class Frozen(NamedTuple):
    """A weight as it is stored."""

    form: Form
    tensors: tuple[Tensor, ...]

    def whole(
        self, dtype: torch.dtype | None = None, experts: int | slice | Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        """The dense weight (O, I) or (E, O, I), by default in the dtype that it had before it was quantized.

        experts: expand one expert of a stack, (O, I), or a few of them.
        again: expand again in backward. Otherwise a compiler that recomputes a layer would recognize the same values
        and keep every dense weight of the layer from forward to backward.
        """
        (kind, shape, own_dtype, stays_whole, is_transposed, _), tensors = self
        dtype = own_dtype if dtype is None else dtype
        if is_transposed:
            stored = self._replace(form=Form(kind, (*shape[:-2], shape[-1], shape[-2]), own_dtype, stays_whole))
            return stored.whole(dtype, experts, again=again).mT
        if experts is None and expands_together([self]):
            return side_by_side([self], dtype, again=again).view(shape)
        if kind == "nf4":
            tensors = tensors[0], _nf4_scales(*tensors[1:])
        if experts is not None:  # a stack's experts follow one another in every tensor
            tensors = tuple(tensor.unflatten(0, (shape[0], -1))[experts] for tensor in tensors)
            shape = shape[1:] if isinstance(experts, int) else (len(tensors[0]), *shape[1:])
        if kind == "plain":
            return (tensors[0] if experts is None else tensors[0].view(shape)).to(dtype)
        # Other arguments make it a distinct call for the compiler.
        is_distinct, numel, on_cuda = again and not stays_whole, math.prod(shape), is_on_cuda(tensors[0])
        if kind != "nf4" or (runs_triton(tensors[0]) and numel % NF4_BLOCK == 0):
            numbers, scales = (tensor[None] if is_distinct else tensor for tensor in tensors)
            expand = _expand if torch.compiler.is_compiling() or on_cuda else _expand_stepwise
            return expand(numbers, scales, dtype).view(shape)
        # The kernel for CPUs is wrong if a block of scales crosses the end of a row.
        width = NF4_BLOCK if numel % NF4_BLOCK == 0 else numel
        width = shape[-1] if shape[-1] % NF4_BLOCK == 0 else width
        call_shape = (1, numel // width, width) if is_distinct else (numel // width, width)
        return _from_nf4(tensors[0], tensors[1], dtype, call_shape).view(shape)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def expands_together(weights: Sequence[Frozen]) -> bool:
    """Whether `side_by_side` has a kernel for these weights."""
    for form, (numbers, *_) in weights:
        has_kernel = form.kind == "nf4" and not form.is_transposed and runs_triton(numbers)
        if not has_kernel or math.prod(form.shape) % NF4_BLOCK:
            return False
    return True


def side_by_side(weights: Sequence[Frozen], dtype: torch.dtype, *, again: bool = False) -> Tensor:
    """The dense weights of NF4 weights (O, I) with the same inputs, one below the other, (sum of O, I), by one kernel.

    again: as in `Frozen.whole`."""
    stored = [list(tensors) for tensors in zip(*(weight.tensors for weight in weights), strict=True)]
    numbers, scales, scale_scales, means, scale_levels = stored
    if again and not any(weight.form.stays_whole for weight in weights):
        numbers = [tensor[None] for tensor in numbers]  # other arguments make it a distinct call for the compiler
    return _expand_nf4(numbers, scales, scale_scales, means, scale_levels[0], dtype).view(-1, weights[0].form.shape[-1])


def _nf4_scales(scales: Tensor, scale_scales: Tensor, mean_scale: Tensor, levels: Tensor) -> Tensor:
    """The scales in float32."""
    if is_on_cuda(scales) and torch.compiler.is_compiling():  # one kernel, shared by recomputation and backward
        block = torch.arange(len(scales), device=scales.device) // NF4_SCALE_BLOCK
        return levels[scales.int()] * scale_scales[block] + mean_scale
    decode = torch.ops.bitsandbytes.dequantize_blockwise
    return decode(scales, scale_scales, levels, NF4_SCALE_BLOCK, torch.float32) + mean_scale


def _expand_stepwise(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    if numbers.dtype != torch.uint8:
        return _from_float8(numbers, scales, dtype)
    if scales.dtype == torch.uint8:
        return _from_mxfp4(numbers, scales, dtype)
    return _from_nf4(numbers, scales, dtype, (*scales.shape, NF4_BLOCK))


def _from_nf4(levels: Tensor, scales: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Two levels per byte, the upper 4 bits first, times float32 scales."""
    # The compiler supports this operator, but not the library's functions around it.
    expand = torch.ops.bitsandbytes.dequantize_4bit
    return expand(levels.view(-1, 1), scales.flatten(), NF4_BLOCK, "nf4", shape, dtype)


def _from_float8(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """numbers (..., O, I) times scales (..., O, blocks), rounded once from float32."""
    dense = numbers.to(dtype)  # exact in 16 bits too
    dense.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
    return dense


def _from_mxfp4(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Two numbers per byte of blocks (..., groups, 16), the lower 4 bits first, times powers of two (..., groups),
    biased by 127.

    The sign, exponent and mantissa of a 4-bit number become those of a float16, which is 2**14 times smaller. All steps
    work in the memory of these float16 numbers, also the product if it has 16 bits.
    """
    halves = blocks[..., None].expand(*blocks.shape, 2).to(torch.int16)
    # By 12 and 8: each number is in the upper 4 bits.
    halves <<= torch.arange(12, 4, -4, dtype=torch.int16, device=blocks.device)
    halves >>= 3  # extends the sign
    halves &= -0x7200  # the sign, 2 bits of the exponent, and 1 of the mantissa
    values = halves.view(torch.float16).flatten(-2)  # (..., groups, 32)
    scales = ((exponents.clamp(max=241).int() + 14) << 23).view(torch.float32)[..., None]  # the exponent of a float32
    if dtype.itemsize == 2:
        return torch.mul(values, scales, out=values.view(dtype))
    return (values * scales).to(dtype)


# One operation to the compiler, which would compute the steps again for every use of the weight, or keep their results.
@torch.library.custom_op("lean_ft::expand", mutates_args=())
def _expand(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    if not numbers.is_cuda or not runs_triton(numbers):
        return _expand_stepwise(numbers, scales, dtype)
    from lean_ft.models.expand_kernel import expand

    dense = _empty_dense(numbers, scales, dtype)
    expand(numbers, scales, dense)
    return dense


@_expand.register_fake
def _empty_dense(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    width = 32 if scales.dtype == torch.uint8 else NF4_BLOCK
    return numbers.new_empty((*scales.shape, width) if numbers.dtype == torch.uint8 else numbers.shape, dtype=dtype)


register_cost(torch.ops.lean_ft.expand)


@torch.library.custom_op("lean_ft::expand_nf4", mutates_args=())
def _expand_nf4(
    numbers: Sequence[Tensor],
    scales: Sequence[Tensor],
    scale_scales: Sequence[Tensor],
    means: Sequence[Tensor],
    scale_levels: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """NF4 weights one after the other, flat."""
    dense = _empty_dense_nf4(numbers, scales, scale_scales, means, scale_levels, dtype)
    sizes = [2 * pairs.numel() for pairs in numbers]
    if not dense.is_cuda:
        each = zip(numbers, scales, scale_scales, means, dense.split(sizes), strict=True)
        for pairs, codes, scale_scale, mean, part in each:
            decoded = _nf4_scales(codes, scale_scale, mean, scale_levels)
            part.copy_(_expand_stepwise(pairs, decoded, dtype).view(-1))
        return dense
    from lean_ft.models.expand_kernel import expand_nf4

    for first in range(0, len(sizes), NF4_AT_ONCE):
        some, target = slice(first, first + NF4_AT_ONCE), dense[sum(sizes[:first]) :]
        expand_nf4(numbers[some], scales[some], scale_scales[some], means[some], scale_levels, target)
    return dense


@_expand_nf4.register_fake
def _empty_dense_nf4(
    numbers: Sequence[Tensor],
    scales: Sequence[Tensor],
    scale_scales: Sequence[Tensor],
    means: Sequence[Tensor],
    scale_levels: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return numbers[0].new_empty(sum(2 * pairs.numel() for pairs in numbers), dtype=dtype)


def _launches_of_nf4(capability: tuple[int, int], numbers: Sequence[Tensor], *_: object) -> Launched:
    return Launched(-(-len(numbers) // NF4_AT_ONCE))


register_cost(torch.ops.lean_ft.expand_nf4, Cost(_launches_of_nf4))


@torch.no_grad()
def to_float8(weight: Tensor) -> Frozen:
    """Round a weight (O, I), or a stack of them, to e4m3 numbers with a scale per row. On `meta`, only shapes are
    made."""
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.linalg.vector_norm(weight, math.inf, -1, keepdim=True, dtype=torch.float32) / _LARGEST_FLOAT8
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    if not weight.is_meta:
        rows = max(1, _STRIP_NUMBERS // weight.shape[-1])
        parts = (tensor.flatten(0, -2).split(rows) for tensor in (numbers, weight, scales))
        for target, values, scale in zip(*parts, strict=True):
            target.copy_(values / scale)
    return Frozen(Form("float8", tuple(weight.shape), weight.dtype), (numbers, scales))


class FrozenParameter(nn.Module):
    """A quantized weight in a model, with the name of the parameter that it replaces.

    If it is created on `meta`, tensors that grow with the weight are parameters, so that they can be sharded.
    `quantize` makes the weight while the model loads; None reads it as the folder stores it.
    """

    def __init__(self, frozen: Frozen, quantize: Callable[[Tensor], Frozen] | None = None) -> None:
        super().__init__()
        self.form, self.quantize = frozen.form, quantize
        for name, tensor in zip(TENSORS[self.form.kind], frozen.tensors, strict=True):
            if tensor.is_meta and name not in _OF_ALL_RANKS:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor, persistent=False)

    @property
    def frozen(self) -> Frozen:
        return Frozen(self.form, tuple(getattr(self, name) for name in TENSORS[self.form.kind]))

    @torch.no_grad()
    def load(self, name: str, device: str | torch.device, fill: Callable[[str, Tensor], None]) -> Frozen:
        """The whole weight on a device. `fill` sets the values of the dense parameter `name`, or of `name.blocks` and
        the like."""
        if self.quantize is not None:
            weight = torch.empty(self.form.shape, dtype=self.form.dtype, device=device)
            fill(name, weight)
            return self.quantize(weight)
        by_key = {key: getattr(self, key) for key in TENSORS[self.form.kind]}
        tensors = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for key, tensor in by_key.items()}
        for key, tensor in tensors.items():
            fill(f"{name}.{key}", tensor)
        return Frozen(self.form, tuple(tensors.values()))

    @torch.no_grad()
    def take(self, frozen: Frozen) -> None:
        """Copy the tensors of `frozen`; if this weight is sharded, this rank's part."""
        for target, tensor in zip(self.frozen.tensors, frozen.tensors, strict=True):
            here = part_of(target)
            here.values.view(-1).copy_(tensor.view(-1)[here.first : here.first + here.values.numel()])


def as_frozen(weight: Tensor | FrozenParameter, *, in_float8: bool = False) -> Frozen:
    """A layer's weight, quantized or not. in_float8: compute its products in float8."""
    if isinstance(weight, FrozenParameter):
        form, tensors = weight.frozen
    else:
        form, tensors = Form("plain", tuple(weight.shape), weight.dtype), (weight,)
    return Frozen(form._replace(in_float8=in_float8), tensors)


def quantized_weights(model: nn.Module) -> dict[str, FrozenParameter]:
    """The quantized weights of a model, by the names that plain parameters would have."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenParameter)}


def num_parameters(model: nn.Module) -> int:
    """Number of parameters, a quantized one with its dense shape."""
    quantized = quantized_weights(model)
    stored = {id(tensor) for module in quantized.values() for tensor in module.parameters()}
    plain = sum(whole_numel(parameter) for parameter in model.parameters() if id(parameter) not in stored)
    return plain + sum(math.prod(module.form.shape) for module in quantized.values())


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product of x: autocast's if enabled, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FrozenLinear(nn.Linear):
    """A linear layer with a frozen weight, quantized or not."""

    weight: FrozenParameter | Tensor
    in_float8 = False  # `float8_products` sets True

    def __init__(self, weight: Frozen | FrozenParameter | Tensor, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        weight = FrozenParameter(weight) if isinstance(weight, Frozen) else weight
        self.out_features, self.in_features = as_frozen(weight).form.shape
        self.weight = weight  # pyright: ignore[reportIncompatibleVariableOverride]
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        form, tensors = as_frozen(self.weight, in_float8=self.in_float8)
        return _FrozenProduct.apply(x.to(product_dtype(x)), self.bias, form, *tensors)


class _FrozenContext(AutogradContext[*tuple[Tensor, ...]]):  # the weight as it is stored
    form: Form


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _FrozenContext, x: Tensor, bias: Tensor | None, form: Form, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.form = form
        if form.in_float8:
            return float8_forward(x.flatten(0, -2), Frozen(form, tensors), bias).view(*x.shape[:-1], -1)
        return F.linear(x, Frozen(form, tensors).whole(x.dtype), bias)

    @staticmethod
    def backward(ctx: _FrozenContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        tensors = ctx.saved_tensors  # read once, because checkpointing refuses a second access
        frozen, ignored = Frozen(ctx.form, tensors), (None for _ in tensors)
        if ctx.form.in_float8:
            return float8_backward(grad.flatten(0, -2), frozen).view(*grad.shape[:-1], -1), None, None, *ignored
        return grad @ frozen.whole(grad.dtype, again=True), None, None, *ignored
