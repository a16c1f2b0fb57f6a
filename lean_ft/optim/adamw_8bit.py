"""AdamW with both moments in 8 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

The state has bitsandbytes' format: per moment, one uint8 code per parameter and one float32 scale (the largest
magnitude) per block of 256, 2.03 bytes per parameter for both.

On CUDA, bitsandbytes' kernel does the plain update. Its `step()` is not used, because it waits for the device at each
parameter. Paged state is in CUDA managed memory, which the driver moves to the host if the GPU is full. The features
that it lacks (update clipping, stochastic rounding) have a Triton kernel, `adamw_8bit_kernel`. On other devices, and
without Triton, the update runs over slices of whole blocks and never copies a large tensor to float32.

The sliced update and the Triton kernel differ from bitsandbytes in two ways. They never round a second moment to zero:
one that is 6e6 times smaller than its block's largest would become zero, and the first moment, which is still there,
would be divided by eps alone, an update 100 times too large. bitsandbytes' CUDA kernel does round second moments to
zero. And they always pick the nearest code; bitsandbytes on a CPU looks codes up with a resolution of 3e-5 of the
block's largest.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from lean_ft.optim.adamw import AdamW, AdamWSettings, Moment
from lean_ft.optim.dynamic_code import DynamicCode
from lean_ft.optim.rule import ParameterState, StepInfo, decay_of
from lean_ft.optim.slices import flat, shard_seed
from lean_ft.system.triton_compiler import HAS_TRITON
from lean_ft.system.world import as_kernel, capability
from lean_ft.torch_private import foreach_copy_, storage_key

BLOCK = 256  # elements that share a scale; a constant, because Dynamo would turn an attribute into a variable
# Of the compiled slices: 3,907 for the 32 elements of a thread, counted in the code for sm_90 by Triton 3.7.1.
COMPILED_INSTRUCTIONS = 122
_KERNEL_INSTRUCTIONS = 60  # of the Triton kernel, counted likewise by benchmarks/kernel_instructions.py
# Parameters of up to an eighth of this are updated together, as copies in one vector. It bounds the copies: 64 MiB of
# weights and gradients in float32.
JOINT_ELEMENTS = 2**23
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
    """AdamW over 8-bit moments, updated by a kernel on a GPU."""

    def __init__(self, *, paged: bool, **settings: Unpack[AdamWSettings]) -> None:
        self._codes = DynamicCode(signed=True), DynamicCode(signed=False)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}  # of the Triton kernel
        first, second = (Moment8bit(code, paged=paged) for code in self._codes)
        super().__init__(moments=(first, second), **settings)

    def instructions(self, state: ParameterState) -> int:
        if not (self.update_clipping or self.draws_noise):
            return 0
        return _KERNEL_INSTRUCTIONS if _runs_triton(state) else COMPILED_INSTRUCTIONS

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        for group in self.joint_groups(states):
            state = group[0]
            if len(group) > 1:
                self._update_jointly(group, step)
            elif self._has_bitsandbytes(state):
                kept, decay = list(state.tensors.values()), decay_of(state, self.weight_decay)
                self._update_by_bitsandbytes(state.param.detach(), state.grad, kept, decay, step)
            elif _runs_triton(state):
                self._update_by_kernel(state, step)
            else:
                self.update_in_slices(state, step)

    def _update_by_kernel(self, state: ParameterState, step: StepInfo) -> None:
        weight, grad, *moments = (flat(tensor) for tensor in (state.param, state.grad, *state.tensors.values()))
        scalars, seed = self.scalars(state, step, [grad, *moments]), shard_seed(state, step)

        def launch() -> None:
            if not weight.is_cuda:
                return  # planned for a GPU
            from lean_ft.optim import adamw_8bit_kernel as kernel

            if weight.device not in self._tables:
                self._tables[weight.device] = kernel.code_tables(*self._codes, weight.device)
            keys = None if seed is None else noise_keys(seed + state.index)
            kernel.update([weight, grad, *moments], self._tables[weight.device], scalars, keys)

        as_kernel("adamw_8bit", launch, [*2 * [weight, *moments], grad])  # read and written; read

    def _has_bitsandbytes(self, state: ParameterState) -> bool:
        return state.device_type == "cuda" and not (self.update_clipping or self.draws_noise)

    def joint_groups(self, states: Sequence[ParameterState]) -> list[list[ParameterState]]:
        """Small parameters of whole blocks, such as those of adapters, of one dtype and weight decay."""
        groups: list[list[ParameterState]] = []
        filling: dict[object, tuple[list[ParameterState], int]] = {}  # by kind: the last group and its elements
        for state in states:
            size = state.param.numel()
            is_small = self._has_bitsandbytes(state) and size <= JOINT_ELEMENTS // 8 and size % BLOCK == 0
            if not is_small or any(getattr(tensor, "is_paged", False) for tensor in state.tensors.values()):
                groups.append([state])
                continue
            kind = state.param.device, state.param.dtype, state.grad.dtype, decay_of(state, self.weight_decay)
            group, filled = filling.get(kind, ([], JOINT_ELEMENTS))
            if filled + size > JOINT_ELEMENTS:
                group, filled = [], 0
                groups.append(group)
            group.append(state)
            filling[kind] = group, filled + size
        return groups

    def _update_jointly(self, group: list[ParameterState], step: StepInfo) -> None:
        """Update copies of the parameters in one vector and copy them back. Blocks, and so the bits, are the same.

        The state is moved into one vector at the first update, and stays there.
        """
        params = [flat(state.param) for state in group]
        joined, grads = torch.cat(params), torch.cat([flat(state.grad) for state in group])
        kept = [_joined(group, name) for name in group[0].tensors]
        self._update_by_bitsandbytes(joined, grads, kept, decay_of(group[0], self.weight_decay), step)
        foreach_copy_(params, joined.split([len(param) for param in params]))

    def _update_by_bitsandbytes(
        self, param: Tensor, grad: Tensor, kept: list[Tensor], decay: float, step: StepInfo
    ) -> None:
        if not param.is_cuda:  # planned for a GPU: the kernel takes no workspace
            return as_kernel("adamw_8bit", lambda: None, [*2 * [param, *kept], grad])  # read and written; read
        import bitsandbytes.functional as bnb

        codes, scales, codes_sq, scales_sq = kept
        if getattr(codes, "is_paged", False):
            bnb.prefetch_tensor(codes)
            bnb.prefetch_tensor(codes_sq)
        device = param.device  # torch reports paged codes as host memory
        signed, unsigned = (code.tables(device)[0] for code in self._codes)
        # bitsandbytes launches on the default stream; gradients of a sharded model are on another one.
        here, theirs = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if here != theirs:
            theirs.wait_stream(here)
        bnb.optimizer_update_8bit_blockwise(
            "adam",
            grad,
            param,
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
            weight_decay=decay,
        )
        if here != theirs:
            here.wait_stream(theirs)


def _runs_triton(state: ParameterState) -> bool:
    """Whether the Triton kernel updates a parameter: on a GPU of compute capability 8.0 or higher."""
    if state.device_type != "cuda" or not (HAS_TRITON or not state.param.is_cuda):
        return False
    return state.param.dtype != torch.float64 and capability(state.param.device) >= (8, 0)


def noise_keys(seed: int) -> tuple[int, int]:
    """Two int32 for the Triton kernel's random bits: a step of SplitMix64 (Steele et al. 2014), so that neighboring
    seeds have unrelated keys."""
    word = (seed + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    high, low = divmod(word ^ word >> 31, 2**32)
    return low - 2**31, high - 2**31


def _joined(group: list[ParameterState], name: str) -> Tensor:
    """The state tensors of this name in one vector, of which they are views afterwards."""
    tensors = [state.tensors[name] for state in group]
    first, before, is_joined = tensors[0], 0, True
    for tensor in tensors:
        same_memory = storage_key(tensor.untyped_storage()) == storage_key(first.untyped_storage())
        is_joined = is_joined and same_memory and tensor.storage_offset() == first.storage_offset() + before
        before += tensor.numel()
    if is_joined:
        return first.as_strided((before,), (1,))
    joined = torch.cat([tensor.view(-1) for tensor in tensors])
    parts = joined.split([tensor.numel() for tensor in tensors])
    for state, tensor, part in zip(group, tensors, parts, strict=True):
        state.tensors[name] = part.view(tensor.shape)
    return joined
