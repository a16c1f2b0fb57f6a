"""AdamW moments in torchao's 8-bit format, for GPUs without a bitsandbytes build.

Per moment, one uint8 code per parameter and one float32 scale (the largest magnitude) per block of 256, 2.03 bytes per
parameter for both. The code values are those of `adamw_8bit`.

torchao's functions read and write the codes. torchao's own optimizer updates whole tensors and needs torch.compile;
here the update runs over slices of whole blocks and never copies a large tensor to float32, compiled or not.
torchao rounds a second moment to zero if it is 6e6 times smaller than its block's largest; `adamw_8bit` does not.
"""

import torch
from torch import Tensor

from lean_ft.optim.adamw import Moment
from lean_ft.optim.dynamic_code import code_values

BLOCK = 256  # elements that share a scale


class Moment8bitTorchao(Moment):
    """A moment as torchao's 8-bit codes; the tensor's size must be a multiple of 256."""

    block = BLOCK

    def __init__(self, *, signed: bool) -> None:
        self._values = code_values(signed)  # (256,)

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
