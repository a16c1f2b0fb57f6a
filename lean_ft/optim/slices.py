"""Work on a large tensor slice by slice, in float32, without ever holding a float32 copy of it.

A slice is small enough that its float32 intermediates stay in a core's cache, so slicing costs no speed on
a CPU, and the workspace of a step is a few slices whatever the largest tensor is. On a GPU, slices are
larger, since each is a kernel launch or several; a compiled function has no intermediates there and takes
the tensor whole.

Stochastic rounding (Gupta et al. 2015, https://arxiv.org/abs/1502.02551): bfloat16 is the upper half of
float32, so adding 16 random bits below it and cutting the lower half off rounds up with the probability
that makes the mean exact.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, StepInfo
from lean_ft.shapes_only import device_type, repeated

CPU_SLICE = 1 << 17  # elements; 512 KiB of float32, of which a core's second-level cache holds a few
GPU_SLICE = 1 << 22
GPU_COMPILED_SLICE = 1 << 30  # below the 2**31 elements that 32-bit indices reach


class Sliced:
    """A function over equally long vectors, called slice by slice: `function(*vectors, noise, *scalars)`.

    With `compile`, it is compiled once for slices of every length, and the scalars reach it as 0-d tensors,
    so that a new learning rate or step number compiles nothing anew.
    """

    def __init__(self, function: Callable, *, compile: bool) -> None:
        self._function = compile_once(function) if compile else function
        self._compile = compile

    def __call__(
        self, vectors: Sequence[Tensor | None], *scalars: float | Tensor, noise: "RoundingNoise | None" = None
    ) -> Tensor:
        """Calls the function on every slice; the sum of what it returned, where it returns scalars."""
        first = vectors[0]
        assert first is not None
        if self._compile:
            scalars = tuple(as_scalar_tensor(scalar) for scalar in scalars)
        total = SliceSum(first.device)
        for part in slices(first.numel(), slice_length(first.device, self._compile)):
            total.add(
                self._function(
                    *(None if vector is None else cut(vector, part) for vector in vectors),
                    None if noise is None else noise.draw(part.stop - part.start),
                    *scalars,
                )
            )
        return total.value


class SliceSum:
    """Adds up one scalar a slice, at once.

    Kept in a list, the small tensors would come to lie in the memory that slices free, the next slice would not fit
    between them, and the heap would grow to the size of the whole tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros((), device=device)

    def add(self, term: Tensor | None) -> None:
        if term is not None:
            self.value += term


def compile_once(function: Callable) -> Callable:
    """`function` compiled for all sizes of its tensors; a graph break is an error."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def as_scalar_tensor(value: float | Tensor) -> Tensor:
    """A float32 scalar on the CPU, which kernels on any device take without a copy; a tensor stays as it is."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def slice_length(device: torch.device, compiled: bool) -> int:
    """Elements worked on at a time; a multiple of every block size in use."""
    if device_type(device) == "cpu":
        return CPU_SLICE
    return GPU_COMPILED_SLICE if compiled else GPU_SLICE


def slices(num_elements: int, length: int) -> Iterator[slice]:
    """Cut `num_elements` into slices of `length`, the last one shorter."""
    for start in repeated(range(0, num_elements, length)):
        yield slice(start, min(start + length, num_elements))


def cut(tensor: Tensor, part: slice) -> Tensor:
    """The part as a tensor of its own on the same memory: of a view, dynamo would compile for the size of the whole."""
    return tensor[part].data


def flat(tensor: Tensor) -> Tensor:
    """The tensor as a vector that shares its memory and is no part of any graph."""
    return tensor.detach().view(-1)


class RoundingNoise:
    """16 random bits an element for one parameter's update, the same whenever in the step it is drawn."""

    def __init__(self, device: torch.device, seed: int, index: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed + index)

    @classmethod
    def for_update(cls, state: ParameterState, step: StepInfo) -> "RoundingNoise":
        return cls(state.param.device, step.noise_seed, state.index)

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
