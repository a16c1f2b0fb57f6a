"""Many ranks on one CPU: a process group of any size that sends nothing, in which this process is the first rank.

The recipe joins it as it would a real one, and FSDP2 gathers and cuts as it does; so what each of N devices takes is
counted, and not estimated. Ranks are cut alike but for the last rows: the first rank's parts are the largest.

Source: PyTorch's fake process group, which its own tests of parallelism run on.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lean_ft.plan.trace import Trace
from lean_ft.torch_private import wrapped_gathering

GATHERED = "gathered weights"


@contextlib.contextmanager
def pretended_ranks(trace: Trace) -> Iterator[None]:
    """Inside, this process is rank 0 of as many as the trace's machines have devices; of one nothing is done."""
    if trace.machines.num_devices == 1:
        yield
        return
    from lean_ft.torch_private import FakeStore

    assert not dist.is_initialized(), "a process of a run on many does not plan"
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
            with trace.labelled(GATHERED, trace.where):
                result = function(*args, **kwargs)
                if resizes:
                    trace.note([arg for arg in args if isinstance(arg, Tensor)])
                return result

        return call

    return wrapped_gathering(watched)
