"""APOLLO-Mini (Zhu et al. 2024, https://arxiv.org/abs/2412.05270): AdamW's step size for a matrix from one projection.

The gradient of a matrix is projected to one random vector along its shorter side; AdamW runs on that vector alone, and
the ratio of what comes out to what went in scales the whole gradient, by one number a matrix. State: two float32
vectors as long as the longer side, and one number; nothing is kept of the projection, which is drawn anew from a seed
and changes every 200 steps. The scaled gradient may outgrow the last step's by 1 % at most.

Embeddings, the output layer and vectors have AdamW's two moments, as in the paper; in a small model they are most of the
state. S, L: the shorter and the longer side.
"""

from typing import Any

import torch
from torch import Tensor

from lean_ft.optim.gradients import gradient_norm
from lean_ft.optim.matrix_rule import MatrixRule
from lean_ft.optim.rule import ParameterState, StepInfo
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, slice_length, slices, store

SCALE = 128**0.5  # makes up for the size of a projection to one dimension
STEPS_A_PROJECTION = 200
LARGEST_GROWTH = 1.01  # of the scaled gradient's norm from one step to the next


class ApolloMini(MatrixRule):
    """weight -= lr * (sqrt(128) * |adamw(p @ grad)| / |p @ grad| * grad + weight_decay * weight)."""

    def __init__(self, *, betas: tuple[float, float], eps: float, compile: bool, **settings: Any) -> None:
        super().__init__(betas=betas, eps=eps, compile=compile, **settings)
        self.beta1, self.beta2 = betas
        self.eps = eps
        self._update = Sliced(_update, compile=compile)

    def init_own(self, param: Tensor) -> dict[str, Tensor]:
        longer = max(param.numel() // param.shape[-1], param.shape[-1])
        return {
            "exp_avg": torch.zeros(longer, device=param.device),
            "exp_avg_sq": torch.zeros(longer, device=param.device),
            "norm": torch.zeros((), device=param.device),  # of the last step's scaled gradient
        }

    def update_own(self, state: ParameterState, step: StepInfo) -> None:
        grad = state.grad.view(-1, state.param.shape[-1])  # experts' matrices are one
        projected = project(grad, seed=projection_seed(state.index, step.number))  # (L,)
        exp_avg, exp_avg_sq = state.tensors["exp_avg"], state.tensors["exp_avg_sq"]
        exp_avg.lerp_(projected, 1 - self.beta1)
        exp_avg_sq.lerp_(projected.square(), 1 - self.beta2)
        root = (exp_avg_sq / (1 - self.beta2**step.number)).sqrt_()
        adapted = exp_avg / (1 - self.beta1**step.number) / root.add_(self.eps)
        tiny = torch.finfo(torch.float32).tiny
        ratio = SCALE * adapted.norm() / projected.norm().clamp(min=tiny)

        norm, last = gradient_norm(state.grad) * ratio, state.tensors["norm"]
        allowed = torch.where(last > 0, last * LARGEST_GROWTH, norm)
        limit = (allowed / norm.clamp(min=tiny)).clamp(max=1.0)
        last.copy_(norm * limit)
        self._update(
            [flat(state.param), flat(state.grad)],
            step.lr,
            ratio * limit,
            self.weight_decay,
            noise=RoundingNoise.for_update(state, step) if self.draws_noise else None,
        )


def projection_seed(index: int, step_number: int) -> int:
    """What draws a parameter's vector in a step. It stays below 2**32: a generator on a CPU drops the bits above."""
    return (index + (step_number - 1) // STEPS_A_PROJECTION * 2**16) % 2**32


def project(grad: Tensor, seed: int) -> Tensor:
    """The products (L,), float32, of a matrix (S, L) or (L, S) with a vector (S,) of normal numbers drawn by the seed."""
    rows, columns = grad.shape
    generator = torch.Generator(grad.device).manual_seed(seed)
    vector = torch.randn(min(rows, columns), generator=generator, device=grad.device)
    result = torch.zeros(max(rows, columns), device=grad.device)
    for part in slices(rows, max(1, slice_length(grad.device, compiled=False) // columns)):
        block = grad[part].float()
        if rows > columns:
            result[part] = block @ vector
        else:
            result.addmv_(block.T, vector[part])
    return result


def _update(
    weight: Tensor,
    grad: Tensor,
    noise: Tensor | None,
    lr: float | Tensor,
    ratio: float | Tensor,
    weight_decay: float | Tensor,
) -> None:
    value = weight.to(torch.float32, copy=True)
    store(weight, value - lr * (grad.float() * ratio + value * weight_decay), noise)
