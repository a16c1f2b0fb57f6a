"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum with its singular values equalized.

The state is one momentum tensor in the weight's dtype per matrix; embeddings, the output layer and vectors use AdamW.
An update is 0.2 * sqrt(max(R, C)) times a matrix with singular values near 1, about as large as AdamW's updates, so one
learning rate serves both (Liu et al. 2025, https://arxiv.org/abs/2502.16982). The numbers equal torch.optim.Muon with
`adjust_lr_fn="match_rms_adamw"`, except that sums are float32.

Five steps of an odd polynomial equalize the singular values. They are bfloat16 matrix products on the whole matrix and
need about four times its memory. R, C: rows and columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, move, store

POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # coefficients of x, x^3 and x^5: steep at zero, then near 1
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
RMS_OF_ADAMW = 0.2


class Muon(Rule):
    """weight -= lr * (0.2 * sqrt(max(R, C)) * orthogonal(grad and momentum) + weight_decay * weight).

    For the matrices inside layers; dimensions before the last two number separate matrices.
    """

    def __init__(self, *, momentum: float, weight_decay: float, stochastic_rounding: bool, compile: bool) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.draws_noise = stochastic_rounding
        self._advance = Sliced(_advance, compile=compile)
        self._move = Sliced(move, compile=compile)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(param, requires_grad=False)}

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        for state in states:
            noise = RoundingNoise.for_update(state, step)
            direction = torch.empty_like(state.param, dtype=torch.bfloat16, requires_grad=False)
            momentum = flat(state.tensors["momentum"])
            self._advance(state.device_type, [flat(state.grad), momentum, flat(direction)], self.momentum, noise=noise)
            scale = RMS_OF_ADAMW * max(state.param.shape[-2:]) ** 0.5
            direction = orthogonal(direction).contiguous()
            self._move(
                *(state.device_type, [flat(state.param), flat(direction)]),
                *(step.lr, scale, self.weight_decay),
                noise=noise,
            )


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix (..., R, C) in bfloat16 with singular values between 0.5 and 1.5, except those that were tiny."""
    a, b, c = POLYNOMIAL
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16().view(-1, *matrix.shape[-2:])
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrix.shape)


def _advance(tensors: list[Tensor], noise: Tensor | None, beta: float | Tensor) -> None:
    """Update the momentum and write Nesterov's look-ahead direction."""
    grad, momentum, direction = tensors
    gradient = grad.float()
    total = momentum.float() * beta + gradient * (1 - beta)
    store(momentum, total, noise)
    direction.copy_(total * beta + gradient * (1 - beta))
