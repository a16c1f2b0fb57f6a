"""Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235) with a learning rate from outside.

The second moment of a matrix is kept as the means of its rows and of its columns: R + C float32 numbers
rather than R * C. Vectors keep theirs whole. An update is divided by its own RMS where that exceeds 1. The
decay of the moment at step t is 1 - t^-0.8. There is no first moment. The paper's relative step size and its
scaling by the RMS of the weights are left out: the schedule sets the learning rate here, which is
transformers' Adafactor with relative_step and scale_parameter off.

Three passes over slices of whole rows, for the moment, the RMS and the update: no float32 copy of a matrix is
made. Dimensions before the last two number separate matrices. M, R, C: matrices, rows and columns.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of
from lean_ft.optim.slices import (
    RoundingNoise,
    SliceSum,
    as_scalar_tensor,
    compile_once,
    cut,
    flat,
    slice_length,
    slices,
    store,
)

MOMENT_EPS = 1e-30  # added to squared gradients, so that nothing is divided by zero
DECAY_EXPONENT = -0.8
LARGEST_RMS = 1.0


class Adafactor(Rule):
    """weight -= lr * (u / max(1, RMS(u)) + weight_decay * weight), u = g / sqrt(row_mean * column_mean /
    mean)."""

    def __init__(self, *, weight_decay: float, stochastic_rounding: bool, compile: bool) -> None:
        self.weight_decay = weight_decay
        self.draws_noise = stochastic_rounding
        self._compile = compile
        self._square_sums = compile_once(_square_sums) if compile else _square_sums
        self._sum_of_squares = compile_once(_sum_of_squares) if compile else _sum_of_squares
        self._update = compile_once(_update) if compile else _update

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
            rows, columns = (1, state.param.numel()) if state.param.ndim < 2 else state.param.shape[-2:]
            weight = flat(state.param).view(-1, rows, columns)  # (M, R, C)
            grad = flat(state.grad).view(-1, rows, columns)
            # 1 / sqrt(v) is the product of a factor of the row (M, R, 1) and one of the column (M, 1, C).
            row_factor, column_factor = self._advance(state, grad, beta2)

            squares = SliceSum(grad.device)
            for m, part in self._row_slices(grad):
                sum_of_squares = self._pick(self._sum_of_squares, _sum_of_squares, part)
                squares.add(sum_of_squares(cut(grad[m], part), cut(row_factor[m], part), column_factor[m].data))
            rms = (squares.value / grad.numel()).sqrt()
            lr = step.lr / (rms / LARGEST_RMS).clamp(min=1.0)

            noise = RoundingNoise.for_update(state, step) if self.draws_noise else None
            decay = step.lr * decay_of(state, self.weight_decay)
            for m, part in self._row_slices(grad):
                update = self._pick(self._update, _update, part)
                update(
                    cut(weight[m], part),
                    cut(grad[m], part),
                    cut(row_factor[m], part),
                    column_factor[m].data,
                    noise.draw((part.stop - part.start) * columns).view(-1, columns) if noise else None,
                    lr,
                    as_scalar_tensor(decay) if self._compile else decay,
                )

    def _advance(self, state: ParameterState, grad: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
        """Move the second moment on and return the factors of 1 / sqrt(v)."""
        _, rows, columns = grad.shape
        if "exp_avg_sq" in state.tensors:
            moment = state.tensors["exp_avg_sq"].view(1, 1, columns)
            moment.lerp_(grad.float().square().add_(MOMENT_EPS), 1.0 - beta2)
            return torch.ones_like(moment[..., :1]), moment.rsqrt()
        row_moment = state.tensors["exp_avg_sq_row"].view(-1, rows, 1)
        column_moment = state.tensors["exp_avg_sq_col"].view(-1, 1, columns)
        row_means, column_means = torch.zeros_like(row_moment), torch.zeros_like(column_moment)
        for m, part in self._row_slices(grad):
            square_sums = self._pick(self._square_sums, _square_sums, part)
            of_rows, of_columns = square_sums(cut(grad[m], part))
            row_means[m, part, 0] = of_rows / columns
            column_means[m, 0] += of_columns / rows
        row_moment.lerp_(row_means.add_(MOMENT_EPS), 1.0 - beta2)
        column_moment.lerp_(column_means.add_(MOMENT_EPS), 1.0 - beta2)
        return (row_moment / row_moment.mean(1, keepdim=True)).rsqrt_(), column_moment.rsqrt()

    def _row_slices(self, grad: Tensor) -> Iterator[tuple[int, slice]]:
        """(matrix, slice of its rows) of about a slice's elements each."""
        matrices, rows, columns = grad.shape
        rows_at_a_time = max(1, slice_length(grad.device, self._compile) // columns)
        for m in range(matrices):
            for part in slices(rows, rows_at_a_time):
                yield m, part

    @staticmethod
    def _pick(compiled: Callable, plain: Callable, part: slice) -> Callable:
        """A single row goes the plain way: a size of one would be compiled for separately."""
        return compiled if part.stop - part.start > 1 else plain


def _square_sums(grad: Tensor) -> tuple[Tensor, Tensor]:
    squares = grad.float().square()
    return squares.sum(1), squares.sum(0)


def _sum_of_squares(grad: Tensor, row_factor: Tensor, column_factor: Tensor) -> Tensor:
    return (grad.float() * row_factor).mul_(column_factor).square_().sum()


def _update(
    weight: Tensor,  # (R, C)
    grad: Tensor,
    row_factor: Tensor,  # (R, 1)
    column_factor: Tensor,  # (1, C)
    noise: Tensor | None,
    lr: Tensor,
    decay: float | Tensor,
) -> None:
    value = weight.to(torch.float32, copy=True)
    update = (grad.float() * row_factor).mul_(column_factor).mul_(lr)
    update.add_(value * decay)
    store(weight, value.sub_(update), noise)
