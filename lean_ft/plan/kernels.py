"""What a GPU runs for an operation: its number of launches, or plain operations where it has no kernel.

The numbers of launches are those of PyTorch 2.13 on a simulated GPU (`benchmarks/planned_launches.py`). lean_ft's own
operators register theirs (`lean_ft.system.costs`).
"""

from collections.abc import Sequence
from typing import Any

from lean_ft.plan.devices import Device
from lean_ft.system.costs import Launched, SlowPath, cost_of
from lean_ft.torch_private import OpOverload

_LAUNCHES = {
    "_foreach_norm": 2,
    "topk": 2,
    "sort": 11,  # a pass for each byte of 64-bit keys, and three for counts and indices
}
_FIRST_FACTOR = {**dict.fromkeys(("mm", "bmm"), 0), **dict.fromkeys(("addmm", "baddbmm"), 1)}  # of matrix products


def on_gpu(func: OpOverload, args: Sequence[Any], device: Device) -> Launched | SlowPath:
    """What a GPU runs for an operation."""
    if (cost := cost_of(func.overloadpacket)) is not None:
        return cost.on_gpu(device.capability, *args)
    return Launched(_LAUNCHES.get(func.overloadpacket.__name__, 1))


def first_factor(func: OpOverload) -> int | None:
    """The index of the first factor of a matrix product, whose second factor follows; None for other operations."""
    cost = cost_of(func.overloadpacket)
    return _FIRST_FACTOR.get(func.overloadpacket.__name__) if cost is None else cost.first_factor
