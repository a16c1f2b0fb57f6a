"""Stochastic gradient descent with optional momentum and decoupled weight decay.

State: none, or with momentum one tensor in the weight's dtype: `buffer = momentum * buffer + grad`, as in
torch.optim.SGD.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, store


class SGD(Rule):
    """weight -= lr * (gradient or momentum buffer + weight_decay * weight), in float32, rounded once."""

    needs_whole_matrices = False

    def __init__(self, *, momentum: float, weight_decay: float, stochastic_rounding: bool, compile: bool) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.draws_noise = stochastic_rounding
        self.updated_together = None if stochastic_rounding else 1
        self._update = Sliced(_update, compile=compile)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(param, requires_grad=False)} if self.momentum else {}

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        for state in states:
            self._update(
                state.device_type,
                [flat(tensor) for tensor in (state.param, state.grad, *state.tensors.values())],
                step.lr,
                self.momentum,
                decay_of(state, self.weight_decay),
                noise=RoundingNoise.for_update(state, step),
            )


def _update(
    tensors: list[Tensor], noise: Tensor | None, lr: float | Tensor, momentum: float | Tensor, decay: float | Tensor
) -> None:
    weight, grad, *buffers = tensors
    # In place on intermediates, since eager calls are bound by memory traffic; hence the copy of a float32 gradient.
    direction, value = grad.to(torch.float32, copy=True), weight.to(torch.float32, copy=True)
    for buffer in buffers:
        direction.add_(buffer.float().mul(momentum))
        store(buffer, direction, noise)
    direction.add_(value * decay)
    store(weight, value.sub_(direction.mul_(lr)), noise)
