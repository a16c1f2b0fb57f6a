"""AdamW with both moments in 8 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

The state has bitsandbytes' format: per moment, one uint8 code per parameter and one float32 scale (the largest
magnitude) per block of 256, 2.03 bytes per parameter for both.

On CUDA, bitsandbytes' kernel does the update. Its `step()` is not used, because it waits for the device at each
parameter. Paged state is in CUDA managed memory, which the driver moves to the host if the GPU is full. On other
devices, and for features that the kernel lacks (update clipping, stochastic rounding), the update runs over slices of
whole blocks and never copies a large tensor to float32.

The sliced update differs from bitsandbytes in two ways. It never rounds a second moment to zero: one that is 6e6 times
smaller than its block's largest would become zero, and the first moment, which is still there, would be divided by eps
alone, an update 100 times too large. And it always picks the nearest code; bitsandbytes on a CPU looks codes up with a
resolution of 3e-5 of the block's largest. The CUDA kernel does round second moments to zero.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from lean_ft.optim.adamw import AdamW, AdamWSettings, Moment
from lean_ft.optim.dynamic_code import DynamicCode
from lean_ft.optim.rule import ParameterState, StepInfo, decay_of

BLOCK = 256  # elements that share a scale; a constant, because Dynamo would turn an attribute into a variable
# Of the compiled slices: 3,907 for the 32 elements of a thread, counted in the code for sm_90 by Triton 3.7.1.
COMPILED_INSTRUCTIONS = 122
MIN_PAGED_ELEMENTS = 100_000  # smaller states are not worth paging


class Moment8bit(Moment):
    """A moment as 8-bit codes. `paged` puts the codes in CUDA managed memory."""

    block = BLOCK

    def __init__(self, code: DynamicCode, *, paged: bool) -> None:
        self.code, self._paged = code, paged

    def init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        if self._paged and param.is_cuda and param.numel() >= MIN_PAGED_ELEMENTS:
            import bitsandbytes.functional as bnb

            codes = bnb.get_paged(*param.shape, dtype=torch.uint8, device=param.device)
            bnb.fill(codes, self.code.zero_code)
        else:
            codes = torch.full(param.shape, self.code.zero_code, dtype=torch.uint8, device=param.device)
        return {name: codes, f"{name}_absmax": torch.zeros(-(-param.numel() // BLOCK), device=param.device)}

    def read(self, kept: list[Tensor], factor: float | Tensor) -> Tensor:
        codes, scales = kept
        return self.code.decode(codes.view(-1, BLOCK)).mul_(scales[:, None] * factor)

    def write(self, kept: list[Tensor], moment: Tensor, noise: Tensor | None) -> None:
        codes, scales = kept
        new_scales = moment.abs().amax(1)
        # The clamp keeps a block of zeros finite.
        scaled = moment * (1.0 / new_scales.clamp(min=torch.finfo(torch.float32).tiny))[:, None]
        if not self.code.signed:
            scaled.clamp_(min=self.code.smallest_magnitude())
        scales.copy_(new_scales)
        codes.view(-1, BLOCK).copy_(self.code.encode(scaled))


class AdamW8bit(AdamW):
    """AdamW over 8-bit moments, updated by bitsandbytes' kernel on a GPU where possible."""

    def __init__(self, *, paged: bool, **settings: Unpack[AdamWSettings]) -> None:
        self._codes = DynamicCode(signed=True), DynamicCode(signed=False)
        first, second = (Moment8bit(code, paged=paged) for code in self._codes)
        super().__init__(moments=(first, second), **settings)

    def instructions(self, state: ParameterState) -> int:
        return COMPILED_INSTRUCTIONS if self.update_clipping or self.draws_noise else 0

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        for state in states:
            if state.device_type == "cuda" and not (self.update_clipping or self.draws_noise):
                self._update_by_bitsandbytes(state, step)
            else:
                self.update_in_slices(state, step)

    def _update_by_bitsandbytes(self, state: ParameterState, step: StepInfo) -> None:
        if not state.param.is_cuda:
            return  # planned for a GPU: the kernel takes no workspace
        import bitsandbytes.functional as bnb

        codes, scales, codes_sq, scales_sq = state.tensors.values()
        if getattr(codes, "is_paged", False):
            bnb.prefetch_tensor(codes)
            bnb.prefetch_tensor(codes_sq)
        device = state.param.device  # torch reports paged codes as host memory
        signed, unsigned = (code.tables(device)[0] for code in self._codes)
        # bitsandbytes launches on the default stream; gradients of a sharded model are on another one.
        here, theirs = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if here != theirs:
            theirs.wait_stream(here)
        bnb.optimizer_update_8bit_blockwise(
            "adam",
            state.grad,
            state.param.detach(),
            codes,
            codes_sq,
            beta1=self.beta1,
            beta2=self.beta2,
            beta3=0.0,
            alpha=0.0,
            eps=self.eps,
            step=step.number,
            lr=step.lr,
            qmap1=signed,
            qmap2=unsigned,
            absmax1=scales,
            absmax2=scales_sq,
            weight_decay=decay_of(state, self.weight_decay),
        )
        if here != theirs:
            here.wait_stream(theirs)
