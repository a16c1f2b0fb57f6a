"""Moments in 4 bits (Li et al. 2023, https://arxiv.org/abs/2309.01507).

State, in torchao's format: for each moment one 4-bit code a parameter, two in a byte, the first in the upper half, and
one float32 scale (the largest magnitude) a block of 128: 1.06 bytes a parameter. The first moment's codes stand for 16
values spaced as the 8-bit rule spaces its 256, the second's for 1/16, 2/16 ... 1: without a zero, so that nothing is
divided by eps alone.

The update runs over slices of whole blocks, so no float32 copy of a large tensor is made. torchao, whose optimizer
updates a tensor at once, leaves tensors that are not whole blocks in the weight's type; here their last block is
filled up.
"""

import torch
from torch import Tensor

from lean_ft.optim.adamw import Moment

BLOCK = 128  # elements that share a scale
# What the first moment's codes stand for: the dynamic map of 3 exponent bits, as the 8-bit rule's is of 7.
SIGNED_VALUES = (
    *(-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0),
    *(0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0),
)


class Moment4bit(Moment):
    """A moment as 4-bit codes; the first is signed, the second is not."""

    block = BLOCK

    def __init__(self, *, signed: bool) -> None:
        self._values = torch.tensor(SIGNED_VALUES) if signed else None  # None: sixteenths

    def init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        if self._values is not None and not param.is_meta:
            self._values = self._values.to(param.device)
        num_blocks = -(-param.numel() // BLOCK)
        return {
            name: torch.zeros(num_blocks * BLOCK // 2, dtype=torch.uint8, device=param.device),
            f"{name}_scale": torch.zeros(num_blocks, device=param.device),
        }

    def read(self, kept: list[Tensor], factor: float | Tensor) -> Tensor:
        bytes_of_two, scales = kept
        codes = torch.stack([bytes_of_two >> 4, bytes_of_two & 15], -1).view(-1, BLOCK)
        if self._values is not None:
            return self._values[codes.long()] * (scales[:, None] * factor)
        return ((codes.float() + 1) * (scales[:, None] / 16)).mul_(factor)

    def write(self, kept: list[Tensor], moment: Tensor, noise: Tensor | None) -> None:
        bytes_of_two, scales = kept
        new_scales = moment.abs().amax(1)
        scaled = moment / new_scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        if self._values is not None:
            # The nearest code: how many midpoints between neighbouring values lie below.
            codes = torch.bucketize(scaled, (self._values[1:] + self._values[:-1]) / 2, out_int32=True)
        else:
            codes = (scaled * 16).round().clamp(1, 16) - 1
        pairs = codes.to(torch.uint8).view(-1, 2)
        scales.copy_(new_scales)
        bytes_of_two.copy_((pairs[:, 0] << 4 | pairs[:, 1]).view_as(bytes_of_two))
