"""Many ranks on one CPU: a process group of any size that sends nothing, in which this process is the first rank.

The recipe joins it as it would a real one, and FSDP2 gathers and cuts as it does; so what each of N devices takes is
counted, and not estimated. Ranks are cut alike but for the last rows: the first rank's parts are the largest.

Source: PyTorch's fake process group, which its own tests of parallelism run on.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lean_ft.plan.trace import Trace

GATHERED = "gathered weights"


@contextlib.contextmanager
def pretended_ranks(trace: Trace) -> Iterator[None]:
    """Inside, this process is rank 0 of as many as the trace's machines have devices; of one nothing is done."""
    if trace.machines.num_devices == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a process of a run on many does not plan"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=trace.machines.num_devices)
    try:
        with watched_sharding(trace):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def watched_sharding(trace: Trace) -> Iterator[None]:
    """FSDP2 gives storages memory and takes it back, which no operation shows: the trace is told."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    def gathering(function: Callable[..., Any], notes: bool) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with trace.labelled(GATHERED, trace.where):
                result = function(*args, **kwargs)
                if notes:
                    trace.note([arg for arg in args if isinstance(arg, Tensor)])
                return result

        return watched

    alloc, free = (
        gathering(function, notes=True) for function in (_fsdp_param.alloc_storage, _fsdp_param.free_storage)
    )
    replaced = [
        (_fsdp_param, "alloc_storage", alloc),
        (_fsdp_param, "free_storage", free),
        (_fsdp_param_group, "alloc_storage", alloc),
    ]
    for name in ("foreach_all_gather", "foreach_all_gather_copy_out"):
        replaced.append((_fsdp_param_group, name, gathering(getattr(_fsdp_param_group, name), notes=False)))
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, before, strict=True):
            setattr(module, name, function)
