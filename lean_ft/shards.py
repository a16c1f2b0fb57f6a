"""What the library needs to know of other processes that train the same model: little, and of one process nothing.

`lean_ft.distributed` cuts parameters by rows and hands each process its own; a parameter that is cut is a DTensor of
torch's, whose local tensor is this process's rows. Below it, the optimizer, the losses and the files ask `Ranks` for
what all have to agree on, and `part_of` for which part of a tensor is here. `ALONE` answers for one process, and then
nothing of torch.distributed is imported.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that train one model, numbered from 0, as one of them sees them."""

    rank: int
    size: int
    shard: int
    """Which of the parts that parameters are cut into is here."""
    num_shards: int

    @property
    def beside(self) -> "Ranks":
        """The same ranks for a thread of its own, whose agreements do not meet those of the loop."""
        ...

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """This rank's of a step's micro-batches, each with whether it is the last; as many on every rank."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        ...

    def sum_shards(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold the parts of one parameter, in place."""
        ...

    def highest(self, *numbers: int) -> list[int]:
        """Of each number the highest that any rank gives. Hosts wait for one another; devices do not."""
        ...

    def highest_of(self, values: Tensor) -> Tensor:
        """Of each element the highest that any rank has, in place; of a tensor in the host's memory."""
        ...

    def total(self, number: int) -> int:
        """The sum of a number over all ranks."""
        ...

    def first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0; what it returns, which is plain data, or raises, it does on every rank."""
        ...

    def everywhere(self, work: Callable[[], object]) -> None:
        """Runs `work` on every rank; what it raises on one, it raises on all."""
        ...

    def check_same(self, what: dict[str, Any]) -> None:
        """Raises ValueError on every rank, naming what differs, unless all give the same plain data."""
        ...

    def gather_no_more(self, model: Any) -> None:
        """Has the model's parameters cut again, those too that a pass without gradients left whole."""
        ...


class Alone:
    """One process: it has everything, and agrees with itself."""

    rank, size, shard, num_shards = 0, 1, 0, 1

    @property
    def beside(self) -> "Alone":
        return self

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        for place, micro_batch in enumerate(micro_batches, start=1):
            yield micro_batch, place == len(micro_batches)

    def sum(self, values: Tensor) -> Tensor:
        return values

    def sum_shards(self, value: Tensor) -> Tensor:
        return value

    def highest(self, *numbers: int) -> list[int]:
        return list(numbers)

    def highest_of(self, values: Tensor) -> Tensor:
        return values

    def total(self, number: int) -> int:
        return number

    def first(self, work: Callable[[], T]) -> T:
        return work()

    def everywhere(self, work: Callable[[], object]) -> None:
        work()

    def check_same(self, what: dict[str, Any]) -> None:
        pass

    def gather_no_more(self, model: Any) -> None:
        pass


ALONE = Alone()


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a tensor that is cut; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


@dataclass(frozen=True)
class Part:
    """What of a tensor is here: the elements from `first` on of the whole, flattened."""

    values: Tensor  # contiguous
    shape: tuple[int, ...]  # of the whole
    first: int = 0
    is_kept_by_others: bool = False
    """Whether another rank, which comes before, has the same values and writes them where they are saved."""

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.values.element_size()


def part_of(tensor: Tensor) -> Part:
    """The part of a parameter that is here; all of one that is not cut."""
    values, shape = local(tensor).detach(), tuple(tensor.shape)
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Part(values, shape)
    row, is_copy = 0, False
    for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        place = mesh.get_local_rank(dim)
        if placement.is_shard():
            row = min(place * -(-shape[0] // mesh.size(dim)), shape[0])
        else:
            is_copy |= place > 0
    return Part(values, shape, row * math.prod(shape[1:]), is_copy)
