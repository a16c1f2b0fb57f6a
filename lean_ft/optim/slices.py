"""Compute on a large tensor slice by slice in float32, without a float32 copy of the whole tensor.

On a CPU, a slice's float32 intermediates fit in a core's cache, so slicing costs no speed, and the workspace of a step
is a few slices. A compiled function keeps few intermediates but costs 0.1 ms per call, so its slices are larger. On a
GPU, slices are larger still, because each one is a kernel launch or several. There, a compiled function's intermediates
are the random bits of stochastic rounding and, for 4-bit codes, up to 8 bytes per element.

Stochastic rounding (Gupta et al. 2015, https://arxiv.org/abs/1502.02551): bfloat16 is the upper half of float32, so
adding 16 random bits to the lower half and truncating rounds up with the probability that makes the mean exact.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lean_ft.optim.rule import ParameterState, StepInfo
from lean_ft.system.world import in_chunks

CPU_SLICE = 1 << 17  # elements: 512 KiB of float32, a fraction of a core's L2 cache
CPU_COMPILED_SLICE = 1 << 20
GPU_SLICE = 1 << 22
GPU_COMPILED_SLICE = 1 << 24


class Sliced:
    """Calls `function(slices, noise, *scalars)` on one slice of the tensors after another, on devices of `device_type`.

    The first dimension is sliced, in whole `block`s. A tensor with fewer entries than the first one has one entry for
    several elements, such as a scale per block. An incomplete last block is padded with zeros, in copies.

    With `compile`, the function is compiled once for slices of all lengths. Its scalars are then 0-d tensors, so
    that a new learning rate or step number does not recompile it.
    """

    def __init__(self, function: Callable[..., None], *, compile: bool, block: int = 1) -> None:
        self._function, self._block = function, block
        # With Dynamo disabled, torch.compile returns the function itself.
        compiled = torch.compile(function, dynamic=True, fullgraph=True) if compile else function
        self._compiled = None if compiled is function else compiled

    def __call__(
        self,
        device_type: str,
        tensors: Sequence[Tensor],
        *scalars: float | Tensor,
        noise: "RoundingNoise | None" = None,
    ) -> None:
        first, block = tensors[0], self._block
        filled_up = -(-len(first) // block) * block
        # Elements of the first tensor per entry of each tensor.
        spans = [filled_up // max(1, len(tensor)) for tensor in tensors]
        row = max(1, first.numel() // max(1, len(first)))
        rows = max(1, slice_length(device_type, self._compiled is not None) // row)
        scalar_tensors = [_as_tensor(scalar) for scalar in scalars] if self._compiled is not None else []

        def call(parts: list[Tensor]) -> None:
            bits = None if noise is None else noise.draw(parts[0].numel()).view(parts[0].shape)
            # Dynamo would compile separately for a size of 1.
            if self._compiled is None or min(map(len, parts)) == 1:
                self._function(parts, bits, *scalars)
            else:
                shaped = [self._shaped(part, span, device_type) for part, span in zip(parts, spans, strict=True)]
                noise_bits = None if bits is None else self._shaped(bits, 1, device_type)
                self._compiled(shaped, noise_bits, *scalar_tensors)

        whole = len(first) // block * block
        for part in in_chunks(whole, rows):
            call([tensor[part.start // span : part.stop // span] for tensor, span in zip(tensors, spans, strict=True)])
        if rest := len(first) - whole:
            ends = [tensor[whole // span :] for tensor, span in zip(tensors, spans, strict=True)]
            filled = [pad(end, (0, block - rest)) if span == 1 else end for end, span in zip(ends, spans, strict=True)]
            call(filled)
            for end, part in zip(ends, filled, strict=True):
                end.copy_(part[: len(end)])

    def _shaped(self, part: Tensor, span: int, device_type: str) -> Tensor:
        """The part in the shape for the compiled function, where only the number of rows varies.

        On a GPU, rows are blocks: everything then has one shape, and Inductor makes one kernel without intermediates.
        For flat parts it makes several kernels and float32 copies of the slice. On a CPU, Inductor would not vectorize
        the single loop, and the copies stay in the cache.
        """
        part = part.data
        if device_type != "cpu" and span < self._block:
            from lean_ft.torch_private import dynamo

            part = part.view(-1, self._block // span)
            dynamo.mark_static(part, 1)
        return part


def _as_tensor(value: float | Tensor) -> Tensor:
    """A number as a 0-d float32 tensor on the CPU, which kernels on any device accept without a copy.

    A tensor is returned as a new tensor on the same memory: for a view, Dynamo would compile for the base's size.
    """
    return value.data if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def slice_length(device_type: str, compiled: bool) -> int:
    """Elements per slice, a multiple of every block size."""
    if device_type == "cpu":
        return CPU_COMPILED_SLICE if compiled else CPU_SLICE
    return GPU_COMPILED_SLICE if compiled else GPU_SLICE


def flat(tensor: Tensor) -> Tensor:
    """The tensor as a detached vector that shares its memory."""
    return tensor.detach().view(-1)


class RoundingNoise:
    """16 random bits per element for one parameter's update; they do not depend on the order of updates."""

    def __init__(self, device: torch.device, seed: int, index: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed + index)

    @classmethod
    def for_update(cls, state: ParameterState, step: StepInfo) -> "RoundingNoise | None":
        seed = shard_seed(state, step)
        return None if seed is None else cls(state.param.device, seed, state.index)

    def draw(self, num_elements: int) -> Tensor:
        """int16 (num_elements,), all bits random."""
        # One 64-bit draw serves four elements, because the generator takes most of the time.
        words = torch.empty((num_elements + 3) // 4, dtype=torch.int64, device=self._device)
        return words.random_(-(2**63), None, generator=self._generator).view(torch.int16)[:num_elements].data


def shard_seed(state: ParameterState, step: StepInfo) -> int | None:
    """The seed of this rank's random bits, to which a parameter's index is added; None: round to nearest.

    Each shard has different bits, and replicas of a shard have the same bits.
    """
    return None if step.noise_seed is None else step.noise_seed + 2**16 * state.ranks.shard


def store(target: Tensor, value: Tensor, noise: Tensor | None) -> None:
    """Write float32 `value` into `target`, rounded to nearest, or stochastically if `noise` is given and it is
    bfloat16."""
    if noise is None or target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    bits = (value.view(torch.int32) + (noise.to(torch.int32) & 0xFFFF)) & -0x10000
    # Adding to the bits of a NaN could make it a finite number and hide a diverged run.
    target.copy_(torch.where(value.isfinite(), bits.view(torch.float32), value))


def move(
    tensors: list[Tensor], noise: Tensor | None, lr: float | Tensor, scale: float | Tensor, decay: float | Tensor
) -> None:
    """weight -= lr * (scale * direction + decay * weight) on a slice, in float32, rounded once."""
    weight, direction = tensors
    value = weight.to(torch.float32, copy=True)
    store(weight, value - lr * (direction.float() * scale + value * decay), noise)
