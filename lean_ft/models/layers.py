"""RMSNorm and the gated feed-forward layer.

Both write their own backward pass where PyTorch's eager one would keep copies that can be had again for next to
nothing: the norm keeps its input instead of three float32 tensors of that size, the product of the gate and the
up-projection keeps its two factors and not silu(gate) as well. Compiled or not, the numbers are the same.

Shapes: D features, I intermediate features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scales each vector to a root mean square of 1, then by a weight a feature, computed in float32.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # PyTorch has one kernel for it there, which keeps no more
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _rms_norm(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad = grad.float()
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        # The part of the gradient along x only changes its length, which the norm takes out.
        grad_x = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = _RMSNorm.apply(x, weight, eps)
    assert isinstance(result, Tensor)
    return result


class MLP(nn.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_gated(self.gate_proj(x), self.up_proj(x)))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    result = _Gated.apply(gate, up)
    assert isinstance(result, Tensor)
    return result
