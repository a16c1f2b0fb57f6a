"""AdamW with both moments in 4 bits (Li et al. 2023, https://arxiv.org/abs/2309.01507).

State, in torchao's format: for each moment one 4-bit code a parameter, two in a byte, the first in the upper half, and
one float32 scale (the largest magnitude) a block of 128: 1.06 bytes a parameter. The first moment's codes stand for 16
values spaced as the 8-bit rule spaces its 256, the second's for 1/16, 2/16 ... 1: without a zero, so that nothing is
divided by eps alone. Tensors of fewer than 4096 elements (norms, biases) keep float32 moments.

The update runs over slices of whole blocks, so no float32 copy of a large tensor is made. torchao, whose optimizer
updates a tensor at once, leaves tensors that are not whole blocks in the weight's type; here their last block is
filled up.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lean_ft.optim.adamw import clipped_lr
from lean_ft.optim.blockwise import BlockwiseAdamW
from lean_ft.optim.rule import ParameterState, StepInfo, decay_of
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

BLOCK = 128  # elements that share a scale
# What the first moment's codes stand for: the dynamic map of 3 exponent bits, as the 8-bit rule's is of 7.
SIGNED_VALUES = (
    *(-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0),
    *(0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0),
)


class AdamW4bit(BlockwiseAdamW):
    """AdamW whose moments are kept as 4-bit codes with a scale a block."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        compile = self._compile
        self._update = compile_once(_update) if compile else _update
        self._sum_of_ratios = compile_once(_sum_of_ratios) if compile else _sum_of_ratios

    def init_own(self, param: Tensor) -> dict[str, Tensor]:
        num_blocks = -(-param.numel() // BLOCK)

        def codes() -> Tensor:
            return torch.zeros(num_blocks * BLOCK // 2, dtype=torch.uint8, device=param.device)

        def scales() -> Tensor:
            return torch.zeros(num_blocks, device=param.device)

        return {
            "exp_avg": codes(),
            "exp_avg_scale": scales(),
            "exp_avg_sq": codes(),
            "exp_avg_sq_scale": scales(),
        }

    def update_own(self, state: ParameterState, step: StepInfo) -> None:
        weight, grad = flat(state.param), flat(state.grad)
        names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        codes, scales, codes_sq, scales_sq = (state.tensors[name] for name in names)
        values = _signed_values(weight.device)
        correction2 = 1 - self.beta2**step.number
        parts = list(slices(len(scales) * BLOCK, slice_length(weight.device, self._compile)))
        lr: float | Tensor = step.lr
        if self.update_clipping:
            ratios = SliceSum(weight.device)
            for part in parts:
                halves, blocks = _halves(part), _blocks(part)
                scalars = self._scalars(self.beta2, 1 - self.beta2, correction2, self.eps**2)
                sum_of_ratios = self._sum_of_ratios if part.stop - part.start > BLOCK else _sum_of_ratios
                ratios.add(sum_of_ratios(_filled(grad, part), cut(codes_sq, halves), cut(scales_sq, blocks), *scalars))
            lr = clipped_lr(step.lr, ratios.value, weight.numel())
        noise = RoundingNoise.for_update(state, step) if self.draws_noise else None
        scalars = self._scalars(
            lr,
            self.beta1,
            1 - self.beta1,
            1 - self.beta1**step.number,
            self.beta2,
            1 - self.beta2,
            correction2**0.5,
            self.eps,
            decay_of(state, self.weight_decay),
        )
        for part in parts:
            halves, blocks = _halves(part), _blocks(part)
            weight_part = _filled(weight, part)
            # A size of one would be compiled for separately.
            update = self._update if part.stop - part.start > BLOCK else _update
            update(
                weight_part,
                _filled(grad, part),
                cut(codes, halves),
                cut(codes_sq, halves),
                cut(scales, blocks),
                cut(scales_sq, blocks),
                values,
                None if noise is None else noise.draw(part.stop - part.start),
                *scalars,
            )
            if part.stop > weight.numel():  # the last block was filled up, in a copy
                weight[part.start :].copy_(weight_part[: weight.numel() - part.start])

    def _scalars(self, *values: float | Tensor) -> tuple[float | Tensor, ...]:
        return tuple(as_scalar_tensor(value) for value in values) if self._compile else values


def _halves(part: slice) -> slice:
    return slice(part.start // 2, part.stop // 2)


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, part.stop // BLOCK)


def _filled(vector: Tensor, part: slice) -> Tensor:
    """The part, which where it goes beyond the end is a copy filled up with zeros."""
    missing = part.stop - vector.numel()
    return cut(vector, part) if missing <= 0 else pad(vector[part.start :], (0, missing))


@cache
def _signed_values(device: torch.device) -> Tensor:
    return torch.tensor(SIGNED_VALUES, device=device)


def _unpacked(codes: Tensor) -> Tensor:
    """Codes (N / BLOCK, BLOCK) from bytes (N / 2,)."""
    return torch.stack([codes >> 4, codes & 15], -1).view(-1, BLOCK)


def _packed(codes: Tensor) -> Tensor:
    pairs = codes.to(torch.uint8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def _second_moment(codes_sq: Tensor, scales_sq: Tensor) -> Tensor:
    return (_unpacked(codes_sq).float() + 1) * (scales_sq[:, None] / 16)


def _sum_of_ratios(
    grad: Tensor,  # (N,)
    codes_sq: Tensor,  # (N / 2,)
    scales_sq: Tensor,  # (N / BLOCK,)
    beta2: float | Tensor,
    one_minus_beta2: float | Tensor,
    correction2: float | Tensor,
    eps_squared: float | Tensor,
) -> Tensor:
    """The sum of g^2 / max(v_hat, eps^2) over one slice."""
    square = grad.view(-1, BLOCK).float().square()
    v_hat = (_second_moment(codes_sq, scales_sq) * beta2 + square * one_minus_beta2) / correction2
    return (square / v_hat.clamp(min=eps_squared)).sum()


def _update(
    weight: Tensor,  # (N,), as is the next
    grad: Tensor,
    codes: Tensor,  # (N / 2,), as is the next
    codes_sq: Tensor,
    scales: Tensor,  # (N / BLOCK,), as is the next
    scales_sq: Tensor,
    signed_values: Tensor,  # (16,)
    noise: Tensor | None,  # (N,)
    lr: float | Tensor,
    beta1: float | Tensor,
    one_minus_beta1: float | Tensor,
    correction1: float | Tensor,
    beta2: float | Tensor,
    one_minus_beta2: float | Tensor,
    root_correction2: float | Tensor,
    eps: float | Tensor,
    weight_decay: float | Tensor,
) -> None:
    gradient = grad.view(-1, BLOCK).float()
    m = signed_values[_unpacked(codes).long()] * (scales[:, None] * beta1) + gradient * one_minus_beta1
    v = _second_moment(codes_sq, scales_sq) * beta2 + gradient.square() * one_minus_beta2

    direction = (m / correction1) / (v.sqrt() / root_correction2 + eps)
    value = weight.view(-1, BLOCK).to(torch.float32, copy=True)
    value = value - lr * (direction + value * weight_decay)
    store(weight.view(-1, BLOCK), value, None if noise is None else noise.view(-1, BLOCK))

    new_scales, new_scales_sq = m.abs().amax(1), v.amax(1)
    tiny = torch.finfo(torch.float32).tiny
    m = m / new_scales.clamp(min=tiny)[:, None]
    v = v / new_scales_sq.clamp(min=tiny)[:, None]
    # The nearest code: how many midpoints between neighbouring values lie below.
    midpoints = (signed_values[1:] + signed_values[:-1]) / 2
    scales.copy_(new_scales)
    scales_sq.copy_(new_scales_sq)
    codes.copy_(_packed(torch.bucketize(m, midpoints)))
    codes_sq.copy_(_packed((v * 16).round().clamp(1, 16) - 1))
