"""Moments in 8 bits as torchao keeps them: for GPUs that bitsandbytes has no build for.

State, in torchao's format: for each moment one uint8 code a parameter, and one float32 scale (the largest magnitude) a
block of 256: 2.03 bytes a parameter, as with `adamw_8bit`, whose code values these are too.

The codes are read and written by torchao's functions. Its optimizer updates a tensor at once, and only compiled; here
the update runs over slices of whole blocks, so that it needs no float32 copy of a large tensor, compiled or not.
torchao rounds a second moment to zero where it is 6e6 times smaller than its block's largest; `adamw_8bit` does not.
"""

import torch
from torch import Tensor

from lean_ft.optim.adamw import Moment
from lean_ft.optim.dynamic_code import code_values

BLOCK = 256  # elements that share a scale


class Moment8bitTorchao(Moment):
    """A moment as torchao's 8-bit codes, of a tensor of whole blocks; the first is signed, the second is not."""

    block = BLOCK

    def __init__(self, *, signed: bool) -> None:
        self._values = code_values(signed)  # (256,) what the codes stand for

    def init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        if not param.is_meta:
            self._values = self._values.to(param.device)
        return {
            name: torch.zeros(param.shape, dtype=torch.uint8, device=param.device),
            f"{name}_scale": torch.zeros(param.numel() // BLOCK, device=param.device),
        }

    def read(self, kept: list[Tensor], factor: float | Tensor) -> Tensor:
        from torchao.optim.quant_utils import dequant_with_qmap

        codes, scales = kept
        return dequant_with_qmap(codes.view(-1, BLOCK), self._values, scales).mul_(factor)

    def write(self, kept: list[Tensor], moment: Tensor, noise: Tensor | None) -> None:
        from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

        codes, scales = kept
        scaled, new_scales = scale_tensor(moment, BLOCK)
        codes.view(-1, BLOCK).copy_(quantize_8bit_with_qmap(scaled, self._values))
        scales.copy_(new_scales)
