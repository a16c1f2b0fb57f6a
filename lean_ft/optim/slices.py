"""Work on a large tensor slice by slice, in float32, without ever holding a float32 copy of it.

A slice is small enough that its float32 intermediates stay in a core's cache, so slicing costs no speed on
a CPU, and the workspace of a step is a few slices whatever the largest tensor is. A compiled function works
through a slice block by block and keeps little of it, so what counts there is that each call costs 0.1 ms. On a
GPU, slices are larger, since each is a kernel launch or several; the larger ones of a compiled function, whose
intermediates are the bits that round stochastically and, for 4-bit codes, up to 8 bytes an element.

Stochastic rounding (Gupta et al. 2015, https://arxiv.org/abs/1502.02551): bfloat16 is the upper half of
float32, so adding 16 random bits below it and cutting the lower half off rounds up with the probability
that makes the mean exact.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lean_ft.optim.rule import ParameterState, StepInfo
from lean_ft.system.shapes_only import device_type, repeated
from lean_ft.torch_private import dynamo

CPU_SLICE = 1 << 17  # elements; 512 KiB of float32, of which a core's second-level cache holds a few
CPU_COMPILED_SLICE = 1 << 20
GPU_SLICE = 1 << 22
GPU_COMPILED_SLICE = 1 << 24


class Sliced:
    """A function of tensors, called on one slice of them after another: `function(slices, noise, *others)`.

    Slices are of the first dimension, and of whole `block`s of it. A tensor with fewer entries than the first one has one
    for several, such as a scale for a block. A last block that is not full is filled up with zeros, in copies.

    With `compile`, the function is compiled once for slices of every length, and the scalars among `others` reach it as
    0-d tensors, so that a new learning rate or step number compiles nothing anew.
    """

    def __init__(self, function: Callable, *, compile: bool, block: int = 1) -> None:
        self._function, self._block = function, block
        # For all sizes; a graph break is an error. Where Dynamo is turned off, the function itself comes back.
        compiled = torch.compile(function, dynamic=True, fullgraph=True) if compile else function
        self._compiled = None if compiled is function else compiled

    def __call__(
        self, tensors: Sequence[Tensor], *others: float | Tensor, noise: "RoundingNoise | None" = None
    ) -> None:
        first, block = tensors[0], self._block
        filled_up = -(-len(first) // block) * block
        # How many entries of the first one an entry of each is for.
        spans = [filled_up // max(1, len(tensor)) for tensor in tensors]
        row = max(1, first.numel() // max(1, len(first)))
        rows = max(1, slice_length(first.device, self._compiled is not None) // row)
        others_compiled = [_as_tensor(other) for other in others] if self._compiled is not None else []

        def call(parts: list[Tensor]) -> None:
            bits = None if noise is None else noise.draw(parts[0].numel()).view(parts[0].shape)
            # A size of one would be compiled for separately.
            if self._compiled is None or min(map(len, parts)) == 1:
                self._function(parts, bits, *others)
            else:
                shaped = [self._shaped(part, span) for part, span in zip(parts, spans, strict=True)]
                self._compiled(shaped, None if bits is None else self._shaped(bits, 1), *others_compiled)

        whole = len(first) // block * block
        for part in slices(whole, rows):
            call([tensor[part.start // span : part.stop // span] for tensor, span in zip(tensors, spans, strict=True)])
        if rest := len(first) - whole:
            ends = [tensor[whole // span :] for tensor, span in zip(tensors, spans, strict=True)]
            filled = [pad(end, (0, block - rest)) if span == 1 else end for end, span in zip(ends, spans, strict=True)]
            call(filled)
            for end, part in zip(ends, filled, strict=True):
                end.copy_(part[: len(end)])

    def _shaped(self, part: Tensor, span: int) -> Tensor:
        """The part as the compiled function gets it, for which the number of rows alone is unknown.

        On a GPU the rows are blocks: all that is computed then has one shape, of which inductor makes one kernel that holds
        nothing in between. Of flat parts, whose blocks the function makes itself, it makes several, and float32 copies of
        the slice. On a CPU that one loop would not be vectorised, and the copies stay in the cache.
        """
        part = part.data
        if device_type(part.device) != "cpu" and span < self._block:
            part = part.view(-1, self._block // span)
            dynamo.mark_static(part, 1)
        return part


def _as_tensor(value: float | Tensor) -> Tensor:
    """A number as a float32 scalar on the CPU, which kernels on any device take without a copy.

    A tensor comes back as one of its own on the same memory: of a view, dynamo would compile for the size of the whole.
    """
    return value.data if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def slice_length(device: torch.device, compiled: bool) -> int:
    """Elements worked on at a time; a multiple of every block size in use."""
    if device_type(device) == "cpu":
        return CPU_COMPILED_SLICE if compiled else CPU_SLICE
    return GPU_COMPILED_SLICE if compiled else GPU_SLICE


def slices(num_elements: int, length: int) -> Iterator[slice]:
    """Cut `num_elements` into slices of `length`, the last one shorter."""
    for start in repeated(range(0, num_elements, length)):
        yield slice(start, min(start + length, num_elements))


def flat(tensor: Tensor) -> Tensor:
    """The tensor as a vector that shares its memory and is no part of any graph."""
    return tensor.detach().view(-1)


class RoundingNoise:
    """16 random bits an element for one parameter's update, the same whenever in the step it is drawn."""

    def __init__(self, device: torch.device, seed: int, index: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed + index)

    @classmethod
    def for_update(cls, state: ParameterState, step: StepInfo) -> "RoundingNoise | None":
        if step.noise_seed is None:
            return None
        # Each part of a parameter that is cut has noise of its own, and its copies the same.
        return cls(state.param.device, step.noise_seed + 2**16 * state.ranks.shard, state.index)

    def draw(self, num_elements: int) -> Tensor:
        """int16 (num_elements,), all bits random."""
        # One 64-bit draw holds four elements' bits: the generator, not the arithmetic, is what costs time here.
        words = torch.empty((num_elements + 3) // 4, dtype=torch.int64, device=self._device)
        return words.random_(-(2**63), None, generator=self._generator).view(torch.int16)[:num_elements].data


def store(target: Tensor, value: Tensor, noise: Tensor | None) -> None:
    """Write float32 `value` into `target`, to nearest, or a bfloat16 one stochastically where `noise` is given."""
    if noise is None or target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    bits = (value.view(torch.int32) + (noise.to(torch.int32) & 0xFFFF)) & -0x10000
    # Adding to the bits of a NaN could turn it into a number, and a run that diverged must be seen to.
    target.copy_(torch.where(value.isfinite(), bits.view(torch.float32), value))


def move(
    tensors: list[Tensor], noise: Tensor | None, lr: float | Tensor, scale: float | Tensor, decay: float | Tensor
) -> None:
    """weight -= lr * (scale * direction + decay * weight) of a slice, in float32, rounded once."""
    weight, direction = tensors
    value = weight.to(torch.float32, copy=True)
    store(weight, value - lr * (direction.float() * scale + value * decay), noise)
