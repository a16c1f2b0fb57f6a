"""APOLLO-Mini (Zhu et al. 2024, https://arxiv.org/abs/2412.05270): AdamW's step size for a matrix from one projection.

A matrix's gradient is multiplied by one random vector along its shorter side. AdamW runs on the resulting vector, and
the ratio of the norms after and before AdamW scales the whole gradient. The state is two float32 vectors as long as the
longer side, and one number. The random vector is drawn again from a seed, which changes every 200 steps. The norm of
the scaled gradient may grow by at most 1% per step.

The numbers equal the authors' code (apollo-torch 1.0.3): the ratio and the growth limit use moments without bias
correction, which is applied to the step size instead. One difference: after a gradient of zero, their code lets the
next one grow only from nearly zero; here it is not limited.

Embeddings, the output layer and vectors use AdamW's two moments, as in the paper. In a small model they are most of the
state. S, L: the shorter and the longer side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.gradients import gradient_norm
from lean_ft.optim.rule import ParameterState, Rule, StepInfo
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, move, slice_length
from lean_ft.system.world import in_chunks

SCALE = 128**0.5  # compensates for the norm that a projection to one dimension loses
STEPS_PER_PROJECTION = 200
NORM_EPS = 1e-8
LARGEST_GROWTH = 1.01  # of the scaled gradient's norm from one step to the next


class ApolloMini(Rule):
    """weight -= lr * (sqrt(128) * |adamw(p @ grad)| / |p @ grad| * grad + weight_decay * weight).

    For the matrices inside layers; a stack of experts' matrices counts as one matrix.
    """

    needs_whole_matrices = True

    def __init__(
        self, *, betas: tuple[float, float], eps: float, weight_decay: float, stochastic_rounding: bool, compile: bool
    ) -> None:
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.draws_noise = stochastic_rounding
        self._move = Sliced(move, compile=compile)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        longer = max(param.numel() // param.shape[-1], param.shape[-1])
        return {
            "exp_avg": torch.zeros(longer, device=param.device),
            "exp_avg_sq": torch.zeros(longer, device=param.device),
            "norm": torch.zeros((), device=param.device),  # of the last step's scaled gradient
        }

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        for state in states:
            ratio = self._ratio(state, step)
            noise = RoundingNoise.for_update(state, step)
            weight, grad = flat(state.param), flat(state.grad)
            self._move(state.device_type, [weight, grad], step.lr, ratio, self.weight_decay, noise=noise)

    def _ratio(self, state: ParameterState, step: StepInfo) -> Tensor:
        """Update the state; return the factor () for the gradient."""
        grad = state.grad.view(-1, state.param.shape[-1])
        projected = project(grad, projection_seed(state.index, step.number), state.device_type)  # (L,)
        exp_avg, exp_avg_sq = state.tensors["exp_avg"], state.tensors["exp_avg_sq"]
        exp_avg.lerp_(projected, 1 - self.beta1)
        exp_avg_sq.lerp_(projected.square(), 1 - self.beta2)
        adapted = exp_avg / exp_avg_sq.sqrt().add_(self.eps)
        ratio = SCALE * adapted.norm() / (projected.norm() + NORM_EPS)

        norm, last = gradient_norm(state.grad, state.device_type) * ratio, state.tensors["norm"]
        allowed = torch.where(last > 0, last * LARGEST_GROWTH, norm)
        limit = (allowed / norm.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
        last.copy_(norm * limit)
        return ratio * limit * ((1 - self.beta2**step.number) ** 0.5 / (1 - self.beta1**step.number))


def projection_seed(index: int, step_number: int) -> int:
    """Seed of a parameter's random vector, below 2**32 because a CPU generator drops the higher bits."""
    return (index + (step_number - 1) // STEPS_PER_PROJECTION * 2**16) % 2**32


def project(grad: Tensor, seed: int, device_type: str) -> Tensor:
    """Product (L,), float32, of a matrix (S, L) or (L, S) with a random normal vector (S,)."""
    rows, columns = grad.shape
    generator = torch.Generator(grad.device).manual_seed(seed)
    vector = torch.randn(min(rows, columns), generator=generator, device=grad.device)
    result = torch.zeros(max(rows, columns), device=grad.device)
    for part in in_chunks(rows, max(1, slice_length(device_type, compiled=False) // columns)):
        block = grad[part].float()
        if rows > columns:
            result[part] = block @ vector
        else:
            result.addmv_(block.T, vector[part])
    return result
