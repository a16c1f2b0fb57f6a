"""AdamW with both moments in 8 bits as torchao keeps them: for GPUs that bitsandbytes has no build for.

State, in torchao's format: for each moment one uint8 code a parameter, and one float32 scale (the largest magnitude) a
block of 256: 2.03 bytes a parameter, as with `adamw_8bit`, whose code values these are too. Tensors of fewer than 4096
elements, or of no whole number of blocks, keep moments in the weight's type.

The codes are read and written by torchao's functions. Its optimizer updates a tensor at once, and only compiled; here
the update runs over slices of whole blocks, so that it needs no float32 copy of a large tensor, compiled or not.
torchao rounds a second moment to zero where it is 6e6 times smaller than its block's largest; `adamw_8bit` does not.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lean_ft.optim.blockwise import BlockwiseAdamW
from lean_ft.optim.rule import ParameterState, StepInfo, decay_of
from lean_ft.optim.slices import RoundingNoise, as_scalar_tensor, compile_once, cut, flat, slice_length, slices, store

BLOCK = 256  # elements that share a scale


class AdamW8bitTorchao(BlockwiseAdamW):
    """AdamW whose moments are kept as torchao's 8-bit codes with a scale a block."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, plain_dtype=None)
        compile = self._compile
        self._update = compile_once(_update) if compile else _update

    def takes(self, param: Tensor) -> bool:
        return super().takes(param) and param.numel() % BLOCK == 0

    def init_own(self, param: Tensor) -> dict[str, Tensor]:
        def codes() -> Tensor:
            return torch.zeros(param.shape, dtype=torch.uint8, device=param.device)

        def scales() -> Tensor:
            return torch.zeros(param.numel() // BLOCK, device=param.device)

        return {
            "exp_avg": codes(),
            "exp_avg_scale": scales(),
            "exp_avg_sq": codes(),
            "exp_avg_sq_scale": scales(),
        }

    def update_own(self, state: ParameterState, step: StepInfo) -> None:
        weight, grad = flat(state.param), flat(state.grad)
        codes, codes_sq = flat(state.tensors["exp_avg"]), flat(state.tensors["exp_avg_sq"])
        scales, scales_sq = state.tensors["exp_avg_scale"], state.tensors["exp_avg_sq_scale"]
        tables = _tables(weight.device)
        noise = RoundingNoise.for_update(state, step) if self.draws_noise else None
        scalars: tuple[float | Tensor, ...] = (
            step.lr,
            self.beta1,
            1 - self.beta1,
            1 - self.beta1**step.number,
            self.beta2,
            1 - self.beta2,
            (1 - self.beta2**step.number) ** 0.5,
            self.eps,
            decay_of(state, self.weight_decay),
        )
        if self._compile:
            scalars = tuple(as_scalar_tensor(scalar) for scalar in scalars)
        for part in slices(weight.numel(), slice_length(weight.device, self._compile)):
            blocks = slice(part.start // BLOCK, part.stop // BLOCK)
            # A size of one would be compiled for separately.
            update = self._update if blocks.stop - blocks.start > 1 else _update
            update(
                cut(weight, part),
                cut(grad, part),
                cut(codes, part),
                cut(codes_sq, part),
                cut(scales, blocks),
                cut(scales_sq, blocks),
                *tables,
                None if noise is None else noise.draw(part.stop - part.start),
                *scalars,
            )


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the codes of the first and of the second moment stand for, (256,) each."""
    from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

    return torch.tensor(get_qmap_signed(), device=device), torch.tensor(get_qmap_unsigned(), device=device)


def _update(
    weight: Tensor,  # (N,), as are the next three
    grad: Tensor,
    codes: Tensor,
    codes_sq: Tensor,
    scales: Tensor,  # (N / BLOCK,), as is the next
    scales_sq: Tensor,
    table: Tensor,  # (256,), as is the next
    table_sq: Tensor,
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
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

    gradient = grad.float()
    m = dequant_with_qmap(codes, table, scales) * beta1 + gradient * one_minus_beta1
    v = dequant_with_qmap(codes_sq, table_sq, scales_sq) * beta2 + gradient.square() * one_minus_beta2
    direction = (m / correction1) / (v.sqrt() / root_correction2 + eps)
    value = weight.to(torch.float32, copy=True)
    store(weight, value - lr * (direction + value * weight_decay), noise)
    for moment, own_codes, own_scales, own_table in ((m, codes, scales, table), (v, codes_sq, scales_sq, table_sq)):
        scaled, new_scales = scale_tensor(moment, BLOCK)
        own_codes.copy_(quantize_8bit_with_qmap(scaled, own_table))
        own_scales.copy_(new_scales)
