"""Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235) with a scheduled learning rate.

The second moment of a matrix is stored as its row means and column means: R + C float32 numbers instead of R * C.
Vectors keep a full second moment. An update is divided by its RMS if that exceeds 1. The moment's decay at step t is
1 - t^-0.8. There is no first moment. The paper's relative step size and its scaling by the RMS of the weights are left
out; this equals transformers' Adafactor with relative_step and scale_parameter off.

The rule makes three passes over slices of whole rows (moment, RMS, update) and never copies a matrix to float32.
Dimensions before the last two number separate matrices. M, R, C: matrices, rows and columns.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, store
from lean_ft.system.shards import whole_numel, whole_shape

MOMENT_EPS = 1e-30  # added to squared gradients, so that nothing is divided by zero
DECAY_EXPONENT = -0.8
LARGEST_RMS = 1.0


class Adafactor(Rule):
    """weight -= lr * (u / max(1, RMS(u)) + weight_decay * weight), u = g / sqrt(row_mean * column_mean / mean)."""

    needs_whole_matrices = False

    def __init__(self, *, weight_decay: float, stochastic_rounding: bool, compile: bool) -> None:
        self.weight_decay = weight_decay
        self.draws_noise = stochastic_rounding
        self._add_means = Sliced(_add_means, compile=compile)
        self._add_squares = Sliced(_add_squares, compile=compile)
        self._update = Sliced(_update, compile=compile)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        if param.ndim < 2:
            return {"exp_avg_sq": torch.zeros(param.shape, device=param.device)}
        return {
            "exp_avg_sq_row": torch.zeros(param.shape[:-1], device=param.device),
            "exp_avg_sq_col": torch.zeros(*param.shape[:-2], param.shape[-1], device=param.device),
        }

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        beta2 = 1.0 - step.number**DECAY_EXPONENT
        for state in states:
            shape = state.param.shape if state.param.ndim >= 2 else (1, state.param.numel())
            shape = (math.prod(shape[:-2]), *shape[-2:])  # may be empty on a rank
            weight, grad = flat(state.param).view(shape), flat(state.grad).view(shape)  # (M, R, C)
            # 1 / sqrt(v) is a row factor (M, R, 1) times a column factor (M, 1, C).
            row_factor, column_factor = self._advance(state, grad, beta2)
            matrices = list(zip(weight, grad, row_factor, column_factor, strict=True))

            squares = torch.zeros((), device=grad.device)
            for _, g, of_row, of_column in matrices:
                self._add_squares(state.device_type, [g, of_row], of_column, squares)
            rms = (state.sum(squares) / whole_numel(state.whole)).sqrt()
            lr = step.lr / (rms / LARGEST_RMS).clamp(min=1.0)

            noise = RoundingNoise.for_update(state, step)
            decay = step.lr * decay_of(state, self.weight_decay)
            for w, g, of_row, of_column in matrices:
                self._update(state.device_type, [w, g, of_row], of_column, lr, decay, noise=noise)

    def _advance(self, state: ParameterState, grad: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
        """Update the second moment; return the row and column factors of 1 / sqrt(v)."""
        matrices, rows, columns = grad.shape
        if "exp_avg_sq" in state.tensors:
            moment = state.tensors["exp_avg_sq"].view(1, 1, columns)
            moment.lerp_(grad.float().square().add_(MOMENT_EPS), 1.0 - beta2)
            return torch.ones_like(moment[..., :1]), moment.rsqrt()
        # A single matrix may have rows on several ranks; in a stack, each matrix is whole on one rank.
        is_cut = state.whole.ndim == 2
        num_rows = whole_shape(state.whole)[-2]
        row_moment = state.tensors["exp_avg_sq_row"].view(matrices, rows, 1)
        column_moment = state.tensors["exp_avg_sq_col"].view(matrices, 1, columns)
        row_means, column_means = torch.zeros_like(row_moment), torch.zeros_like(column_moment)
        for g, of_rows, of_columns in zip(grad, row_means, column_means, strict=True):
            self._add_means(state.device_type, [g, of_rows], of_columns, float(num_rows), float(columns))
        column_means = state.sum(column_means) if is_cut else column_means
        row_moment.lerp_(row_means.add_(MOMENT_EPS), 1.0 - beta2)
        column_moment.lerp_(column_means.add_(MOMENT_EPS), 1.0 - beta2)
        total = row_moment.sum(1, keepdim=True)
        mean = (state.sum(total) if is_cut else total) / num_rows
        return (row_moment / mean).rsqrt_(), column_moment.rsqrt()


# Functions of one slice: gradient (R, C), one number per row (R, 1), one number per column (1, C) shared by all slices.


def _add_means(
    tensors: list[Tensor], noise: None, column_means: Tensor, rows: float | Tensor, columns: float | Tensor
) -> None:
    grad, row_means = tensors
    squares = grad.float().square()
    row_means.copy_(squares.sum(1, keepdim=True) / columns)
    column_means.add_(squares.sum(0, keepdim=True) / rows)


def _add_squares(tensors: list[Tensor], noise: None, column_factor: Tensor, total: Tensor) -> None:
    grad, row_factor = tensors
    total.add_((grad.float() * row_factor).mul_(column_factor).square_().sum())


def _update(
    tensors: list[Tensor], noise: Tensor | None, column_factor: Tensor, lr: Tensor, decay: float | Tensor
) -> None:
    weight, grad, row_factor = tensors
    value = weight.to(torch.float32, copy=True)
    update = (grad.float() * row_factor).mul_(column_factor).mul_(lr)
    update.add_(value * decay)
    store(weight, value.sub_(update), noise)
