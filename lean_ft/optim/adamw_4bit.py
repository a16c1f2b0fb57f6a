"""AdamW moments in 4 bits (Li et al. 2023, https://arxiv.org/abs/2309.01507).

The state has torchao's format: per moment, one 4-bit code per parameter (two per byte, the first in the upper half)
and one float32 scale (the largest magnitude) per block of 128, 1.06 bytes per parameter for both. The first moment's
codes mean 16 values, spaced like the 256 values of the 8-bit code. The second moment's codes mean 1/16, 2/16 ... 1:
without a zero, no update is divided by eps alone.

The update runs over slices of whole blocks and never copies a large tensor to float32. torchao keeps tensors with an
incomplete last block in the weight's dtype; here that block is padded.
"""

import torch
from torch import Tensor

from lean_ft.optim.adamw import Moment

BLOCK = 128  # elements that share a scale
# Values of the first moment's codes: the dynamic map with 3 exponent bits (the 8-bit code has 7).
SIGNED_VALUES = (
    *(-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0),
    *(0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0),
)


class Moment4bit(Moment):
    """A moment as 4-bit codes, `signed` for the first moment."""

    block = BLOCK

    def __init__(self, *, signed: bool) -> None:
        self._values = torch.tensor(SIGNED_VALUES) if signed else None  # None: multiples of 1/16

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
            # The nearest code is the number of midpoints below.
            codes = torch.bucketize(scaled, (self._values[1:] + self._values[:-1]) / 2, out_int32=True)
        else:
            codes = (scaled * 16).round().clamp(1, 16) - 1
        pairs = codes.to(torch.uint8).view(-1, 2)
        scales.copy_(new_scales)
        bytes_of_two.copy_((pairs[:, 0] << 4 | pairs[:, 1]).view_as(bytes_of_two))
