"""AdamW with both moments in 8 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

State, in bitsandbytes' format: for each moment one uint8 code a parameter, and one float32 scale (the largest
magnitude) a block of 256: 2.03 bytes a parameter.

On CUDA, bitsandbytes' kernel does the update; its own `step()` is not used, for it waits for the device at each
parameter. Paged state lies in CUDA's managed memory: the driver moves it to the host where the GPU has no room.
Elsewhere, and for what that kernel has not (update clipping, stochastic rounding), the update runs over slices of whole
blocks, so no float32 copy of a large tensor is ever made.

Two differences from bitsandbytes in that update. A second moment is never rounded to zero: one 6e6 times smaller than its
block's largest would be, and the first moment beside it, still there, would then be divided by eps alone, an update a
hundred times too large. And every code is the nearest, where bitsandbytes on a CPU looks codes up with a resolution of
3e-5 of the block's largest. The kernel on CUDA does round second moments to zero.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lean_ft.optim.adamw import AdamW, Moment
from lean_ft.optim.dynamic_code import DynamicCode
from lean_ft.optim.rule import ParameterState, StepInfo, decay_of
from lean_ft.system.shapes_only import device_type, stage

BLOCK = 256  # elements that share a scale; no attribute, of which dynamo would make a variable
MIN_PAGED_ELEMENTS = 100_000  # smaller states are not worth paging


class Moment8bit(Moment):
    """A moment as 8-bit codes; the first is signed, the second is not. `paged` keeps the codes in managed memory."""

    block = BLOCK

    def __init__(self, code: DynamicCode, *, paged: bool) -> None:
        self.code, self._paged = code, paged

    def init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        if self._paged and stage() is None and not param.is_meta and param.numel() >= MIN_PAGED_ELEMENTS:
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
        # Finite where a block is all zeros.
        scaled = moment * (1.0 / new_scales.clamp(min=torch.finfo(torch.float32).tiny))[:, None]
        if not self.code.signed:
            scaled.clamp_(min=self.code.smallest_magnitude())
        scales.copy_(new_scales)
        codes.view(-1, BLOCK).copy_(self.code.encode(scaled))


class AdamW8bit(AdamW):
    """AdamW over 8-bit moments; bitsandbytes' kernel makes the plain update on a GPU."""

    def __init__(self, *, paged: bool, **settings: Any) -> None:
        self._codes = DynamicCode(signed=True), DynamicCode(signed=False)
        first, second = (Moment8bit(code, paged=paged) for code in self._codes)
        super().__init__(moments=(first, second), **settings)

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        for state in states:
            if device_type(state.param.device) == "cuda" and not (self.update_clipping or self.draws_noise):
                self._update_by_bitsandbytes(state, step)
            else:
                self.update_in_slices(state, step)

    def _update_by_bitsandbytes(self, state: ParameterState, step: StepInfo) -> None:
        if stage() is not None:
            return  # one kernel, without any workspace
        import bitsandbytes.functional as bnb

        codes, scales, codes_sq, scales_sq = state.tensors.values()
        if getattr(codes, "is_paged", False):
            bnb.prefetch_tensor(codes)
            bnb.prefetch_tensor(codes_sq)
        device = state.param.device  # paged codes are the host's to torch
        signed, unsigned = (code.tables(device)[0] for code in self._codes)
        # The library launches on the default stream; gradients of a model that is cut come on another.
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
