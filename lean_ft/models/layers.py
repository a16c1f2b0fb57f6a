"""Norms and feed-forward layers, with backward passes that keep less than autograd.

The norm keeps its input instead of three float32 tensors of that size. A gated layer keeps gate and up but not
activation(gate), and writes their gradients in place. Compiled and eager numbers are the same.

Shapes: D features, I intermediate features.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models.config import DecoderConfig, LayerConfig
from lean_ft.models.projections import project_pair
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.costs import Cost, register_cost
from lean_ft.system.triton_compiler import HAS_TRITON
from lean_ft.system.world import as_kernel, device_type
from lean_ft.torch_private import constant_for_compiler, graph_is_kept


class RMSNorm(nn.Module):
    """RMSNorm in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    The scale is `weight + weight_offset`. With `num_groups`, each group of consecutive features is normed separately.
    """

    def __init__(self, size: int, eps: float, weight_offset: float = 0.0, num_groups: int = 1) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.initial = {"weight": 1.0 - weight_offset}
        self.weight = nn.Parameter(torch.full((size,), 1.0 - weight_offset))
        self.eps = eps
        self.weight_offset = weight_offset

    def forward(self, x: Tensor) -> Tensor:
        if self.num_groups > 1:
            x, weight = (part.unflatten(-1, (self.num_groups, -1)) for part in (x, self.weight))
            return RMSNormFunction.apply(x, weight, self.eps, self.weight_offset).flatten(-2)
        # With two dtypes PyTorch's kernel would copy to the wider one and return that.
        if self.weight_offset == 0.0 and x.dtype == self.weight.dtype and is_on_cuda(x):
            return _rms_norm_on_gpu(x, self.weight, self.eps)
        return RMSNormFunction.apply(x, self.weight, self.eps, self.weight_offset)


class _NormContext(AutogradContext[Tensor, Tensor, Tensor]):  # x, weight, scale
    weight_offset: float


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm with a hand-written backward pass."""

    @staticmethod
    def forward(ctx: _NormContext, x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
        values = wide(x)
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        ctx.weight_offset = weight_offset
        return in_dtype(values * scale * _with_offset(weight, weight_offset), x.dtype)

    @staticmethod
    def backward(ctx: _NormContext, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        normed = wide(x) * scale
        grad = wide(grad)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -1 - weight.dim()).sum(0).to(weight.dtype)
        grad = grad * _with_offset(weight, ctx.weight_offset)
        # The gradient's component along x changes only the length of x, which the norm removes.
        grad_x = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None, None


class _PlannedRMSNorm(RMSNormFunction):
    """PyTorch's RMSNorm on a GPU, in a plan of uncompiled layers: a kernel, and one or two for backward."""

    @staticmethod
    def forward(ctx: _NormContext, x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
        compute = partial(RMSNormFunction.forward, ctx, x, weight, eps, weight_offset)
        return as_kernel("rms_norm", compute, (x, weight))

    @staticmethod
    def backward(ctx: _NormContext, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        compute = partial(RMSNormFunction.backward, ctx, *grads)
        return as_kernel("rms_norm", compute, grads, launches=1 + ctx.needs_input_grad[1])


class LayerNorm(nn.LayerNorm):
    """LayerNorm with the scale `weight + weight_offset`."""

    def __init__(self, size: int, eps: float, bias: bool, weight_offset: float) -> None:
        super().__init__(size, eps, bias=bias)
        self.initial, self.weight_offset = {"weight": 1.0 - weight_offset}, weight_offset

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + self.weight_offset, self.bias, self.eps)


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head (..., H, D), with a weight for each."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.initial, self.eps = {"weight": 1.0}, eps
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return in_dtype(F.layer_norm(wide(x), x.shape[-1:], eps=self.eps) * self.weight, x.dtype)


class PlainNorm(nn.Module):
    """LayerNorm or RMSNorm without a weight. The empty `weight` only follows the model's dtype and device."""

    def __init__(self, eps: float, centered: bool) -> None:
        super().__init__()
        self.eps, self.centered = eps, centered
        self.weight = nn.Buffer(torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) if self.centered else unit_rms(x, self.eps)


def residual_norm(config: DecoderConfig) -> nn.Module:
    """A norm of the residual stream."""
    eps, offset = config.norm_eps, config.norm_weight_offset
    if config.norm_parameters == "none":
        return PlainNorm(eps, config.norm_centered)
    has_bias = config.norm_parameters == "weight_and_bias"
    if config.norm_centered and not offset:
        return nn.LayerNorm(config.hidden_size, eps, bias=has_bias)
    if config.norm_centered:
        return LayerNorm(config.hidden_size, eps, has_bias, offset)
    return RMSNorm(config.hidden_size, eps, offset)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` for the result of a custom forward pass. If the last operation returns its own argument, as `to`
    does for the same dtype and in-place operations always do, the compiler of torch 2.11 silently loses the
    gradient."""
    return x if x.dtype == dtype else x.to(dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without a weight."""
    if is_on_cuda(x):  # under autocast it comes in float32
        return _rms_norm_on_gpu(x, None, eps).to(x.dtype)
    return RMSNormFunction.apply(x, x.new_ones(()), eps, 0.0)


def _rms_norm_on_gpu(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm by PyTorch's kernel, which keeps as little for backward as `RMSNormFunction`."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # A plan of a GPU has its tensors on the CPU. Compiled layers have kernels of the compiler instead of this one.
    norm = RMSNormFunction if torch.compiler.is_compiling() else _PlannedRMSNorm
    return norm.apply(x, x.new_ones(()) if weight is None else weight, eps, 0.0)


def _with_offset(weight: Tensor, offset: float) -> Tensor:
    return weight if offset == 0.0 else wide(weight) + offset


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype for sums: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def is_on_cuda(x: Tensor) -> bool:
    """Whether a tensor is on a GPU, or would be in a plan."""
    return x.is_cuda or _plans_a_gpu()


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels can read a tensor: it is on a GPU, and this machine compiles them; or would be in a
    plan, whose machine has Triton."""
    return HAS_TRITON if x.is_cuda else is_on_cuda(x)


@constant_for_compiler  # it cannot trace the question
def _plans_a_gpu() -> bool:
    return device_type(torch.device("cpu")) == "cuda"


class _Activation(NamedTuple):
    value: Callable[..., Tensor]  # x, out=
    backward: Callable[..., Tensor]  # gradient, x, grad_input=


ACTIVATIONS: dict[str, _Activation] = {
    "silu": _Activation(torch.ops.aten.silu, torch.ops.aten.silu_backward),
    "gelu": _Activation(torch.ops.aten.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": _Activation(
        partial(torch.ops.aten.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")
    ),
}


class XIELU(nn.Module):
    """xIELU: trained factors of a parabola above 0 and of an exponential below (Huang and Schlag 2024,
    https://arxiv.org/abs/2411.13010)."""

    def __init__(self) -> None:
        super().__init__()
        self.initial = {
            "alpha_p": math.log(math.expm1(0.8)),
            "alpha_n": math.log(math.expm1(0.3)),
            "beta": 0.5,
            "eps": -1e-6,
        }
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.beta, self.eps = nn.Buffer(torch.empty(())), nn.Buffer(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        above, below = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        return _XIELU.apply(x, above, below, self.beta, self.eps)


_XIELUContext = AutogradContext[Tensor, Tensor, Tensor, Tensor, Tensor]  # x, above, below, beta, eps


class _XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _XIELUContext, x: Tensor, above: Tensor, below: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        ctx.save_for_backward(x, above, below, beta, eps)
        low = torch.expm1(torch.minimum(x, eps)).sub_(x)
        return in_dtype(torch.where(x > 0, above * x * x, below * low) + beta * x, x.dtype)

    @staticmethod
    def backward(ctx: _XIELUContext, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad,) = grads
        x, above, below, beta, eps = ctx.saved_tensors
        is_above = x > 0
        low = torch.expm1(torch.minimum(x, eps))
        # Between eps and 0 the exponential is constant.
        slope = torch.where(is_above, 2 * above * x, below * torch.where(x < eps, low, -1)).add_(beta)
        low.sub_(x).masked_fill_(is_above, 0).mul_(grad)
        grad_above = (x.square().mul_(grad) * is_above).sum(dtype=wide_dtype(x))
        grad_below = low.sum(dtype=wide_dtype(x))
        return grad * slope, grad_above.to(above.dtype).view(1), grad_below.to(below.dtype).view(1), None, None


class MLP(nn.Module):
    """The feed-forward layer: down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))).

    fused: gate and up are one matrix. A family with another layer overrides `inner`.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202; squared ReLU: So et al. 2021,
    https://arxiv.org/abs/2109.08668.
    """

    # Whether compiled code writes the gradients of gate and up in place. `checkpoint_layers` sets this; without
    # checkpointing the compiler would copy both first.
    overwrites = False

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: str = "silu",
        has_gate: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.activation, self.is_fused, self.has_gate = activation, fused, has_gate
        if fused:
            self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        else:
            if activation == "xielu":
                self.act_fn = XIELU()
            if has_gate:
                self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    @classmethod
    def of(cls, config: DecoderConfig, layer: LayerConfig) -> Self:
        """The feed-forward layer of one of the decoder's layers."""
        inner = layer.intermediate_size or config.intermediate_size
        formula = config.activation, config.gated, config.fused_gate_up
        return cls(config.hidden_size, inner, config.mlp_bias, *formula)

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_gate:
            up = self.up_proj(x)
            return self.down_proj(self.act_fn(up) if self.activation == "xielu" else _activated(up, self.activation))
        if self.is_fused:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(self.inner(gate, up))
        outputs = project_pair(x, self.gate_proj, self.up_proj)
        return self.down_proj(self.inner(*outputs) if len(outputs) > 1 else self.inner_side_by_side(*outputs))

    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        """The input of the down projection; all are (..., I)."""
        overwrites = self.overwrites or not torch.compiler.is_compiling()
        return gated(gate, up, self.activation, overwrites=overwrites)

    def inner_side_by_side(self, gate_up: Tensor) -> Tensor:
        """`inner` of gate and up that are side by side in one tensor (..., 2 I)."""
        if type(self).inner is not MLP.inner:
            return self.inner(*gate_up.chunk(2, -1))
        overwrites = self.overwrites or not torch.compiler.is_compiling()
        return _GatedHalves.apply(gate_up, self.activation, overwrites)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation in ACTIVATIONS:
        return ACTIVATIONS[activation].value(x)
    return x.relu() if activation == "relu" else x.relu().square()


class _GatedContext(AutogradContext[Tensor, Tensor]):  # gate, up
    activation: str
    overwrites: bool


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatedContext, gate: Tensor, up: Tensor, activation: str, overwrites: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.overwrites = activation, overwrites
        value = ACTIVATIONS[activation].value(gate)
        return value * up if torch.compiler.is_compiling() else value.mul_(up)  # see `in_dtype`

    @staticmethod
    def backward(ctx: _GatedContext, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        if ctx.overwrites and torch.compiler.is_compiling():
            gate, up = gate.data, up.data  # autograd forbids in-place changes of a view from a custom function
            overwrite_factors(grad, gate, up, ctx.activation)
            return up, gate, None, None
        value, backward = ACTIVATIONS[ctx.activation]
        # With retain_graph another backward pass reads them.
        if ctx.overwrites and not graph_is_kept():
            return backward(up.mul_(grad), gate, grad_input=up), value(gate, out=gate).mul_(grad), None, None
        return backward(grad * up, gate), value(gate).mul_(grad), None, None


class _HalvesContext(AutogradContext[Tensor]):  # gate and up
    activation: str
    overwrites: bool


class _GatedHalves(torch.autograd.Function):
    """`_Gated` with gate and up side by side in one tensor, and so their gradients: none is copied to join them."""

    @staticmethod
    def forward(ctx: _HalvesContext, gate_up: Tensor, activation: str, overwrites: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.overwrites = activation, overwrites
        gate, up = gate_up.chunk(2, -1)
        value = ACTIVATIONS[activation].value(gate)
        return value * up if torch.compiler.is_compiling() else value.mul_(up)  # see `in_dtype`

    @staticmethod
    def backward(ctx: _HalvesContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        (gate_up,) = ctx.saved_tensors
        if ctx.overwrites and (torch.compiler.is_compiling() or not graph_is_kept()):
            gate_up = gate_up.data
            overwrite_halves(grad, gate_up, ctx.activation)
            return gate_up, None, None
        gate, up = gate_up.chunk(2, -1)
        value, backward = ACTIVATIONS[ctx.activation]
        return torch.cat((backward(grad * up, gate), value(gate) * grad), -1), None, None


@torch.library.custom_op("lean_ft::overwrite_halves", mutates_args=("gate_up",))
def overwrite_halves(grad: Tensor, gate_up: Tensor, activation: str) -> None:
    """From the gradient of activation(gate) * up, write the gradients of gate and up over both; see
    `overwrite_factors`."""
    gate, up = gate_up.flatten(0, -2).chunk(2, -1)
    _compiled_overwrite(activation, in_order=True)(grad.flatten(0, -2), gate, up)


register_cost(torch.ops.lean_ft.overwrite_halves, Cost(is_compiled=True))


@torch.library.custom_op("lean_ft::overwrite_factors", mutates_args=("gate", "up"))
def overwrite_factors(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """From the gradient of activation(gate) * up, write the gradient of up to `gate` and the gradient of gate to `up`.

    Without this op the compiler fuses more operations on the same tensors into one kernel, which holds six tensors of
    the layer's width at once instead of three.
    """
    _compiled_overwrite(activation)(*(tensor.flatten(0, -2) for tensor in (grad, gate, up)))


register_cost(torch.ops.lean_ft.overwrite_factors, Cost(is_compiled=True))


@cache
def _compiled_overwrite(activation: str, *, in_order: bool = False) -> Callable[[Tensor, Tensor, Tensor], None]:
    value, backward = ACTIVATIONS[activation]

    def overwrite(grad: Tensor, gate: Tensor, up: Tensor) -> None:
        grad_gate, grad_up = backward(grad * up, gate), value(gate) * grad
        gate.copy_(grad_gate if in_order else grad_up)
        up.copy_(grad_up if in_order else grad_gate)

    return torch.compile(overwrite, dynamic=True, fullgraph=True)


def gated(gate: Tensor, up: Tensor, activation: str, *, overwrites: bool = False) -> Tensor:
    """activation(gate) * up, all (..., I); keeps only gate and up for backward. With `overwrites`, backward writes
    their gradients in place, so nothing else may read them later."""
    return _Gated.apply(gate, up, activation, overwrites)
