"""Plan for many ranks in one process: a process group of any size that sends nothing, in which this process is rank 0.

The recipe joins the group as usual, and FSDP2 gathers and shards as usual, so the memory of a device is counted rather
than estimated. Rank 0 has the largest shards.

Source: PyTorch's fake process group, which its own parallelism tests use.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lean_ft.parallel.ranks import ManyRanks
from lean_ft.plan.trace import Trace
from lean_ft.system.shards import ALONE
from lean_ft.torch_private import wrapped_gathering

T = TypeVar("T")

GATHERED = "gathered weights"


class PlannedRanks(ManyRanks):
    """Rank 0 of a run without other ranks: it agrees with itself, and all batches are its own."""

    hosts_backend = "fake"

    def places(self, number: int) -> list[int]:
        return ALONE.places(number)

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        if micro_batches and getattr(micro_batches[0], "compares_steps", False):  # those of all ranks
            micro_batches = micro_batches[: len(super().places(len(micro_batches)))]
        for micro_batch, is_last in ALONE.share(micro_batches):
            self._complete_gradients(is_last)
            yield self._own_tokens(micro_batch), is_last

    def _count_targets(self, labels: Tensor) -> int:
        return labels.numel()  # the labels of a plan are zeros

    def row_counts(self, counts: Tensor, num_rows: int) -> list[list[int]]:
        size = counts.shape[1]
        return [[num_rows // size] * size] * 2  # evenly, since a plan routes nothing

    def highest(self, *numbers: int) -> list[int]:
        return list(numbers)

    def highest_of(self, values: Tensor) -> Tensor:
        return values

    def on_every_rank(self, work: Callable[[], T]) -> list[T]:
        return [work()]


@contextlib.contextmanager
def pretended_ranks(trace: Trace) -> Iterator[None]:
    """Context manager in which this process is rank 0 of the trace's devices. Does nothing for one device."""
    if trace.machines.num_devices == 1:
        yield
        return
    from lean_ft.torch_private import FakeStore

    assert not dist.is_initialized(), "a process of a distributed run does not plan"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=trace.machines.num_devices)
    try:
        with watched_sharding(trace):
            yield
    finally:
        dist.destroy_process_group()


def watched_sharding(trace: Trace) -> AbstractContextManager[None]:
    """Context manager in which `trace` counts the weights that FSDP2 gathers: FSDP2 resizes their storages."""

    def watched(function: Callable[..., Any], resizes: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with trace.memory.labelled(GATHERED, trace.memory.current[1]):
                result = function(*args, **kwargs)
                if resizes:
                    trace.memory.note([arg for arg in args if isinstance(arg, Tensor)])
                return result

        return call

    return wrapped_gathering(watched)
