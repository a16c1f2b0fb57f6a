"""What the library needs to know of other processes that train the same model: little, and of one process nothing.

`lean_ft.parallel` cuts parameters by rows and hands each process its own; a parameter that is cut is a DTensor of
torch's, whose local tensor is this process's rows. Below it, the optimizer, the losses and the files ask `Ranks` for
what all have to agree on, and `part_of` for which part of a tensor is here. `ALONE` answers for one process.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lean_ft.torch_private import local_rows

T = TypeVar("T")
local = local_rows  # this process's rows of a parameter, sharded or not


class Ranks:
    """The processes that train one model, numbered from 0, as one of them sees them: here one, which has everything and agrees
    with itself."""

    rank, size = 0, 1
    shard, num_shards = 0, 1  # which of the parts that parameters are cut into is here, and of how many
    num_sharing = 1
    """How many ranks share each micro-batch, every one of which has what it tells of whole answers."""
    num_alike = 1
    """How many ranks generate the same tokens, as they have each other's heads."""

    @property
    def beside(self) -> "Ranks":
        """The same ranks for a thread of its own, whose agreements do not meet those of the loop."""
        return self

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """This rank's of a step's micro-batches, each with whether it is the last; as many on every rank. Where ranks share
        the tokens of one, its own tokens of it."""
        for place, micro_batch in enumerate(micro_batches, start=1):
            yield micro_batch, place == len(micro_batches)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return values

    def sum_shards(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold the parts of one parameter, in place."""
        return value

    def highest(self, *numbers: int) -> list[int]:
        """Of each number the highest that any rank gives. Hosts wait for one another; devices do not."""
        return list(numbers)

    def highest_of(self, values: Tensor) -> Tensor:
        """Of each element the highest that any rank has, in place; of a tensor in the host's memory."""
        return values

    def total(self, number: int) -> int:
        """The sum of a number over all ranks."""
        return number

    def first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0; what it returns, which is plain data, or raises, it does on every rank."""
        return work()

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank; returns on all what it returned on each, which is plain data. What it raises on one, it
        raises on all."""
        return [work()]

    def check_same(self, what: dict[str, Any]) -> None:
        """Raises ValueError on every rank, naming what differs, unless all give the same plain data."""

    def gather_no_more(self, model: Any) -> None:
        """Has the model's parameters cut again, those too that a pass without gradients left whole."""


ALONE = Ranks()


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut into equal parts before the rows of each are cut over ranks, and which part is here."""

    over: str  # the setting of `parallel` that cuts it
    dim: int
    num_parts: int
    part: int

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a part of `shape` is of."""
        return *shape[: self.dim], shape[self.dim] * self.num_parts, *shape[self.dim + 1 :]


def remember_cuts(parameters: Iterable[tuple[str, Tensor]], cuts: Mapping[str, Cut]) -> None:
    """Notes on each parameter that is cut how it is, where `whole_shape` and `part_of` find it."""
    for name, parameter in parameters:
        if name in cuts:
            parameter.cut = cuts[name]  # pyright: ignore[reportAttributeAccessIssue]


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a parameter as one process has it."""
    cut: Cut | None = getattr(tensor, "cut", None)
    return tuple(tensor.shape) if cut is None else cut.whole(tensor.shape)


def whole_numel(tensor: Tensor) -> int:
    """The elements of a parameter as one process has it."""
    return math.prod(whole_shape(tensor))


@dataclass(frozen=True)
class Part:
    """What of a tensor is here: the elements from `first` on of the whole, flattened; or runs of them, at equal distances."""

    values: Tensor  # contiguous
    shape: tuple[int, ...]  # of the whole
    first: int = 0
    is_kept_by_others: bool = False
    """Whether another rank, which comes before, has the same values and writes them where they are saved."""
    run: int | None = None  # how many elements stand together, as of a matrix that is cut by columns; None: all
    stride: int = 0  # from the beginning of one run to that of the next

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.values.element_size()

    def within(self, whole: Tensor) -> Tensor:
        """The elements that are here in `whole`, a view of a contiguous tensor."""
        flat, number = whole.view(-1), self.values.numel()
        if self.run is None or not number:
            return flat[self.first : self.first + number].view(self.values.shape)
        view = flat[self.first :].as_strided((number // self.run, self.run), (self.stride, 1))
        return view if view.shape == self.values.shape else view.view(self.values.shape)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Where in the whole each run begins, and how long it is."""
        number = self.values.numel()
        if self.run is None:
            yield self.first, number
            return
        for i in range(number // self.run):
            yield self.first + i * self.stride, self.run


def part_of(tensor: Tensor) -> Part:
    """The part of a parameter that is here; all of one that is not cut."""
    values, shape = local(tensor).detach(), tuple(tensor.shape)
    mesh, cut = getattr(tensor, "device_mesh", None), getattr(tensor, "cut", None)
    row, is_copy = 0, False
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        assert mesh is not None
        place = mesh.get_local_rank(dim)
        if placement.is_shard():
            row = min(place * -(-shape[0] // mesh.size(dim)), shape[0])
        else:
            is_copy |= place > 0
    if cut is None:
        return Part(values, shape, row * math.prod(shape[1:]), is_copy)
    whole = cut.whole(shape)
    if cut.dim == 0:
        return Part(values, whole, (cut.part * shape[0] + row) * math.prod(shape[1:]), is_copy)
    assert cut.dim == 1 and len(shape) == 2
    return Part(values, whole, row * whole[1] + cut.part * shape[1], is_copy, run=shape[1], stride=whole[1])
