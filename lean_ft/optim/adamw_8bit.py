"""AdamW with both moments in 8 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

State, in bitsandbytes' format: for each moment one uint8 code a parameter, and one float32 scale (the largest
magnitude) a block of 256: 2.03 bytes a parameter. Tensors of fewer than 4096 elements (norms, biases) keep float32
moments.

On CUDA, bitsandbytes' kernel does the update; its own `step()` is not used, for it waits for the device at each
parameter. Paged state lies in CUDA's managed memory: the driver moves it to the host where the GPU has no room.
Elsewhere, and for what that kernel has not (update clipping, stochastic rounding), the update below runs over slices of
whole blocks, so no float32 copy of a large tensor is ever made.

Two differences from bitsandbytes in that update. A second moment is never rounded to zero: one 6e6 times smaller than its
block's largest would be, and the first moment beside it, still there, would then be divided by eps alone, an update a
hundred times too large. And every code is the nearest, where bitsandbytes on a CPU looks codes up with a resolution of
3e-5 of the block's largest. The kernel on CUDA does round second moments to zero.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lean_ft.optim.adamw import clipped_lr
from lean_ft.optim.blockwise import BlockwiseAdamW
from lean_ft.optim.dynamic_code import ZERO_CODE, ArithmeticCode, DynamicCode, TableCode, smallest_magnitude
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
from lean_ft.shapes_only import device_type, stage

BLOCK = 256  # elements that share a scale
MIN_PAGED_ELEMENTS = 100_000  # smaller states are not worth paging

PAGED_WITHOUT_CUDA = (
    "optimizer.name=paged_adamw_8bit: paged state is CUDA's managed memory; on this device the state is ordinary "
    "memory, as with adamw_8bit."
)


class AdamW8bit(BlockwiseAdamW):
    """AdamW whose moments are kept as 8-bit codes with a scale a block; `paged` keeps them in managed memory."""

    def __init__(self, *, paged: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.paged = paged
        if self._compile:
            codes = ArithmeticCode(signed=True), ArithmeticCode(signed=False)
            self._compiled_update = compile_once(_update_with(*codes))
            self._compiled_sum_of_ratios = compile_once(_sum_of_ratios_with(codes[1]))
        self._tables: dict[torch.device, tuple[TableCode, TableCode]] = {}

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        if self.paged and device_type(param.device) != "cuda":
            self.notes = (PAGED_WITHOUT_CUDA,)
        return super().init_state(param)

    def init_own(self, param: Tensor) -> dict[str, Tensor]:
        num_blocks = -(-param.numel() // BLOCK)
        return {
            "exp_avg": self._codes(param, ZERO_CODE[True]),
            "exp_avg_absmax": torch.zeros(num_blocks, device=param.device),
            "exp_avg_sq": self._codes(param, ZERO_CODE[False]),
            "exp_avg_sq_absmax": torch.zeros(num_blocks, device=param.device),
        }

    def _codes(self, param: Tensor, zero: int) -> Tensor:
        if self.paged and param.is_cuda and param.numel() >= MIN_PAGED_ELEMENTS:
            import bitsandbytes.functional as bnb

            codes = bnb.get_paged(*param.shape, dtype=torch.uint8, device=param.device)
            bnb.fill(codes, zero)
            return codes
        return torch.full(param.shape, zero, dtype=torch.uint8, device=param.device)

    def update_own(self, state: ParameterState, step: StepInfo) -> None:
        if device_type(state.param.device) == "cuda" and not (self.update_clipping or self.draws_noise):
            self._update_by_bitsandbytes(state, step)
        else:
            self._update_in_slices(state, step)

    def _update_by_bitsandbytes(self, state: ParameterState, step: StepInfo) -> None:
        if stage() is not None:
            return  # one kernel, without any workspace
        import bitsandbytes.functional as bnb

        codes, codes_sq = state.tensors["exp_avg"], state.tensors["exp_avg_sq"]
        if getattr(codes, "is_paged", False):
            bnb.prefetch_tensor(codes)
            bnb.prefetch_tensor(codes_sq)
        signed, unsigned = self._tables_on(state.param.device)
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
            qmap1=signed.values,
            qmap2=unsigned.values,
            absmax1=state.tensors["exp_avg_absmax"],
            absmax2=state.tensors["exp_avg_sq_absmax"],
            weight_decay=decay_of(state, self.weight_decay),
        )

    def _update_in_slices(self, state: ParameterState, step: StepInfo) -> None:
        weight, grad = flat(state.param), flat(state.grad)
        codes, codes_sq = flat(state.tensors["exp_avg"]), flat(state.tensors["exp_avg_sq"])
        scales, scales_sq = state.tensors["exp_avg_absmax"], state.tensors["exp_avg_sq_absmax"]
        correction2 = 1 - self.beta2**step.number
        signed, unsigned = self._tables_on(weight.device)
        lr: float | Tensor = step.lr
        if self.update_clipping:
            ratios = self._for_slices(
                _sum_of_ratios_with(unsigned),
                self._compiled_sum_of_ratios if self._compile else None,
                [grad, codes_sq],
                [scales_sq],
                (self.beta2, 1 - self.beta2, correction2, self.eps**2),
            )
            lr = clipped_lr(step.lr, ratios, weight.numel())
        self._for_slices(
            _update_with(signed, unsigned),
            self._compiled_update if self._compile else None,
            [weight, grad, codes, codes_sq],
            [scales, scales_sq],
            (
                lr,
                self.beta1,
                1 - self.beta1,
                1 - self.beta1**step.number,
                self.beta2,
                1 - self.beta2,
                correction2**0.5,
                self.eps,
                decay_of(state, self.weight_decay),
            ),
            RoundingNoise.for_update(state, step) if self.draws_noise else None,
        )

    def _for_slices(
        self,
        plain: Callable,
        compiled: Callable | None,
        elements: list[Tensor],
        scales: list[Tensor],
        scalars: tuple[float | Tensor, ...],
        noise: RoundingNoise | None = None,
    ) -> Tensor:
        """Call on slices of whole blocks, and on the last, ragged block filled up with zeros; sum what they return."""
        num_elements, device = elements[0].numel(), elements[0].device
        whole = num_elements // BLOCK * BLOCK
        scalar_tensors = tuple(as_scalar_tensor(scalar) for scalar in scalars) if compiled else ()
        total = SliceSum(device)
        for part in slices(whole, slice_length(device, compiled is not None)):
            length = part.stop - part.start
            blocks = slice(part.start // BLOCK, part.stop // BLOCK)
            arguments = (
                *(cut(tensor, part) for tensor in elements),
                *(cut(tensor, blocks) for tensor in scales),
                noise.draw(length) if noise else None,
            )
            if compiled and length > BLOCK:  # a size of one would be compiled for separately
                total.add(compiled(*arguments, *scalar_tensors))
            else:
                total.add(plain(*arguments, *scalars))
        if whole < num_elements:
            rest = num_elements - whole
            padded = [torch.nn.functional.pad(tensor[whole:], (0, BLOCK - rest)) for tensor in elements]
            last_scales = [tensor[whole // BLOCK :] for tensor in scales]
            total.add(plain(*padded, *last_scales, noise.draw(BLOCK) if noise else None, *scalars))
            for tensor, updated in zip(elements, padded, strict=True):
                tensor[whole:].copy_(updated[:rest])
        return total.value

    def _tables_on(self, device: torch.device) -> tuple[TableCode, TableCode]:
        if device not in self._tables:
            self._tables[device] = (
                TableCode(signed=True, device=device),
                TableCode(signed=False, device=device),
            )
        return self._tables[device]


def _sum_of_ratios_with(code_sq: DynamicCode) -> Callable:
    """The sum of g^2 / max(v_hat, eps^2) over one slice."""

    def sum_of_ratios(
        grad: Tensor,  # (N,)
        codes_sq: Tensor,  # (N,)
        scales_sq: Tensor,  # (N / BLOCK,)
        noise: None,
        beta2: float | Tensor,
        one_minus_beta2: float | Tensor,
        correction2: float | Tensor,
        eps_squared: float | Tensor,
    ) -> Tensor:
        square = grad.view(-1, BLOCK).float().square()
        v = code_sq.decode(codes_sq.view(-1, BLOCK)).mul_(scales_sq[:, None] * beta2)
        v_hat = v.add_(square * one_minus_beta2).div_(correction2)
        return square.div_(v_hat.clamp_(min=eps_squared)).sum()

    return sum_of_ratios


def _update_with(code: DynamicCode, code_sq: DynamicCode) -> Callable:
    """The update of one slice; in place on intermediates, for plain calls are bound by memory traffic."""

    def update(
        weight: Tensor,  # (N,), as are the next three
        grad: Tensor,
        codes: Tensor,
        codes_sq: Tensor,
        scales: Tensor,  # (N / BLOCK,), as is the next
        scales_sq: Tensor,
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
        m = code.decode(codes.view(-1, BLOCK)).mul_(scales[:, None] * beta1)
        v = code_sq.decode(codes_sq.view(-1, BLOCK)).mul_(scales_sq[:, None] * beta2)
        m.add_(gradient * one_minus_beta1)
        v.add_(gradient.square().mul_(one_minus_beta2))

        direction = (m / correction1).div_(v.sqrt().div_(root_correction2).add_(eps))
        value = weight.view(-1, BLOCK).to(torch.float32, copy=True)
        direction.add_(value * weight_decay)
        value.sub_(direction.mul_(lr))
        store(weight.view(-1, BLOCK), value, None if noise is None else noise.view(-1, BLOCK))

        new_scales, new_scales_sq = m.abs().amax(1), v.amax(1)
        scales.copy_(new_scales)
        scales_sq.copy_(new_scales_sq)
        codes.view(-1, BLOCK).copy_(code.encode(m.mul_(_inverse(new_scales))))
        v.mul_(_inverse(new_scales_sq)).clamp_(min=smallest_magnitude(signed=False))
        codes_sq.view(-1, BLOCK).copy_(code_sq.encode(v))

    return update


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale (N / BLOCK, 1), finite where a block is all zeros."""
    return (1.0 / scales.clamp(min=torch.finfo(torch.float32).tiny))[:, None]
