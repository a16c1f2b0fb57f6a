"""Traffic between ranks: the bytes that this rank sends in a ring collective."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lean_ft.plan.memory import num_bytes
from lean_ft.torch_private import OpOverload, tree_iter

# Bytes that each of n ranks sends, by the sizes of an operation's first and second argument. Others send a few bytes.
_SENT: dict[str, Callable[[int, int, int], float]] = {
    "_allgather_base_": lambda output, own, n: own * (n - 1),
    "_reduce_scatter_base_": lambda own, whole, n: own * (n - 1),
    "allreduce_": lambda whole, _, n: 2 * whole * (n - 1) / n,
    "broadcast_": lambda whole, _, n: whole,
    "alltoall_base_": lambda output, whole, n: whole * (n - 1) / n,
    "all_gather_into_tensor": lambda own, _, n: own * (n - 1),
    "reduce_scatter_tensor": lambda whole, _, n: whole * (n - 1) / n,
    "all_reduce": lambda whole, _, n: 2 * whole * (n - 1) / n,
    "all_reduce_": lambda whole, _, n: 2 * whole * (n - 1) / n,
    "all_to_all_single": lambda whole, _, n: whole * (n - 1) / n,
}


class SentBytes(NamedTuple):
    """Bytes that this rank sends, and whether they leave its machine."""

    num_bytes: float
    is_away: bool


def sent_by(func: OpOverload, args: Sequence[Any], devices_each: int) -> SentBytes | None:
    """What an operator sends on machines with `devices_each` devices; None if it is no collective, or sends a few
    bytes."""
    name = func.overloadpacket.__name__
    if name not in _SENT:
        return None
    if func.namespace == "c10d":
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
    else:
        group = dist.distributed_c10d._resolve_process_group(args[-1])  # pyright: ignore[reportPrivateImportUsage]
    ranks = dist.get_process_group_ranks(group)
    first, second = (sum(num_bytes(t) for t in tree_iter(args[i]) if isinstance(t, Tensor)) for i in (0, 1))
    return SentBytes(_SENT[name](first, second, len(ranks)), len({rank // devices_each for rank in ranks}) > 1)
