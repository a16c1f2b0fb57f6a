"""The parallel ranks of a run, and the part of each parameter on this rank. A single process needs neither.

`lean_ft.parallel` shards parameters by rows. A sharded parameter is a DTensor, whose local tensor holds this rank's
rows. Lower layers (optimizer, losses, files) use `Ranks` to agree with other ranks, and `part_of` to find which part of
a tensor is on this rank. `ALONE` is a single process.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lean_ft.torch_private import local_rows

T = TypeVar("T")
local = local_rows  # this process's rows of a parameter, sharded or not


class Ranks:
    """The ranks that train one model, as seen by one of them. This base class is a single process."""

    rank, size = 0, 1
    shard, num_shards = 0, 1  # index and number of the shards of each parameter
    num_sharing = 1
    """Number of ranks that share each micro-batch; each of them has all values that belong to whole completions."""
    num_alike = 1
    """Number of ranks that generate the same tokens, because their attention heads are divided."""

    @property
    def for_thread(self) -> "Ranks":
        """The same ranks for use in another thread, with a separate process group."""
        return self

    def places(self, number: int) -> list[int]:
        """Return the places of this rank's micro-batches among the step's `number`, in the order of `share`. A place
        from `number` on is a micro-batch without targets."""
        return list(range(number))

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """Yield this rank's micro-batches of a step (or its tokens of shared ones), and whether each is the last. Every
        rank gets the same number."""
        for place, micro_batch in enumerate(micro_batches, start=1):
            yield micro_batch, place == len(micro_batches)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return values

    def sum_shards(self, value: Tensor) -> Tensor:
        """Sum over the ranks that hold the shards of one parameter, in place."""
        return value

    def highest(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all ranks. Hosts wait for one another; devices do not."""
        return list(numbers)

    def highest_of(self, values: Tensor) -> Tensor:
        """Elementwise maximum over all ranks, in place, of a tensor in host memory."""
        return values

    def total(self, number: int) -> int:
        """Return the sum of a number over all ranks."""
        return number

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0. Every rank returns its result (plain data) or raises its error."""
        return work()

    def on_every_rank(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank, and return the list of results (plain data) on all. An error on one rank is raised
        on all."""
        return [work()]

    def check_same(self, what: dict[str, Any]) -> None:
        """Raise ValueError on every rank, naming the difference, unless all give the same plain data."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter that may be sharded or divided, without its gradient; its own values if it is
        whole here. All ranks call this."""
        return tensor.detach()

    def gather_no_more(self, model: nn.Module) -> None:
        """Reshard all parameters of the model, including those that a pass without gradients left gathered."""


ALONE = Ranks()


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided into equal parts before each part is sharded by rows, and the index of this rank's
    part."""

    over: str  # the setting of `parallel` that divides it
    dim: int
    num_parts: int
    part: int

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole that a part of `shape` belongs to."""
        return *shape[: self.dim], shape[self.dim] * self.num_parts, *shape[self.dim + 1 :]


def remember_cuts(parameters: Iterable[tuple[str, Tensor]], cuts: Mapping[str, Cut]) -> None:
    """Attach its `Cut` to each divided parameter, for `whole_shape` and `part_of`."""
    for name, parameter in parameters:
        if name in cuts:
            parameter.cut = cuts[name]  # pyright: ignore[reportAttributeAccessIssue]


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the undivided parameter."""
    cut: Cut | None = getattr(tensor, "cut", None)
    return tuple(tensor.shape) if cut is None else cut.whole(tensor.shape)


def whole_numel(tensor: Tensor) -> int:
    """Return the number of elements of the undivided parameter."""
    return math.prod(whole_shape(tensor))


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor: consecutive elements of the flattened whole from `first` on, or equally spaced
    runs."""

    values: Tensor  # contiguous, except in transposed parts
    shape: tuple[int, ...]  # of the whole
    first: int = 0
    is_kept_by_others: bool = False
    """Whether a lower rank has the same values and saves them."""
    run: int | None = None  # consecutive elements per run, for a matrix that is divided by columns; None: all
    stride: int = 0  # from the start of one run to the next

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.values.element_size()

    @property
    def transposed(self) -> "Part":
        """The same part of the transposed matrix, as a view that is not contiguous."""
        assert self.run is None, "a matrix that is divided by columns is not stored transposed"
        rows, first = len(self.values), self.first // self.shape[1]
        of_rows = {"values": self.values.mT, "run": rows or None, "stride": self.shape[0]}
        return replace(self, shape=self.shape[::-1], first=first, **of_rows)

    def within(self, whole: Tensor) -> Tensor:
        """Return this part of `whole`, a contiguous tensor, as a view."""
        flat, number = whole.view(-1), self.values.numel()
        if self.run is None or not number:
            return flat[self.first : self.first + number].view(self.values.shape)
        view = flat[self.first :].as_strided((number // self.run, self.run), (self.stride, 1))
        return view if view.shape == self.values.shape else view.view(self.values.shape)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the start in the whole and the length of each run."""
        number = self.values.numel()
        if self.run is None:
            yield self.first, number
            return
        for i in range(number // self.run):
            yield self.first + i * self.stride, self.run


def part_of(tensor: Tensor) -> Part:
    """Return this rank's part of a parameter, which is all of it unless it is divided or sharded."""
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
