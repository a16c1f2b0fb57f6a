"""Who else trains: the processes of one run, told by the environment that torchrun gives each of them.

A run at any number of ranks is the same run. Its micro-batches are planned for all of them together, sums are divided by
the targets of the whole step, and what decides the course of the run (a loss that is not finite, a signal, the time to save)
is agreed upon, so that every rank does the same. What hosts agree on goes through a group of its own, over gloo: it
waits for no GPU, and a thread that saves does not meet the collectives of the step under way.

Left out: ranks that come and go within a run. One that dies ends the run; torchrun starts it again, at another number of
ranks if need be, and it goes on from its newest checkpoint.
"""

import copy
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lean_ft.settings import ParallelConfig
from lean_ft.shapes_only import stage
from lean_ft.shards import ALONE, Ranks

T = TypeVar("T")

REPLICATE, SHARD = "replicate", "shard"  # the names of the mesh's dimensions


def join(cfg: ParallelConfig, device: torch.device) -> Ranks:
    """Meets the other processes of the run, and returns what connects this one with them; `ALONE` where there are none.

    Raises ValueError where the environment tells of others and not how to reach them, or where `parallel` does not
    multiply to their number.
    """
    size = 1 if stage() is not None else int(os.environ.get("WORLD_SIZE", "1"))
    shard = _num_shards(cfg, size)
    if size == 1:
        return ALONE
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={size} tells of {size} processes, but {', '.join(missing)} is not in the environment, so they "
            "cannot meet. Start them by leanft run --nproc-per-node, or by torchrun."
        )
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    timeout = timedelta(minutes=cfg.timeout_minutes)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        from torch.distributed.rendezvous import rendezvous

        store, rank, _ = next(rendezvous("env://", timeout=timeout))
        # The agent's store outlives processes that are started again, and the addresses of those before lie in it.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} of {size}"
        store = dist.PrefixStore(attempt, store)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    mesh = init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=(REPLICATE, SHARD))
    return ManyRanks(mesh, device, timeout)


def _num_shards(cfg: ParallelConfig, size: int) -> int:
    """Over how many ranks a copy of the model is cut."""
    asked = cfg.replicate * (cfg.shard or 1)
    if size % cfg.replicate or (cfg.shard is not None and asked != size):
        product = f"parallel.replicate={cfg.replicate}" + ("" if cfg.shard is None else f" x shard={cfg.shard}")
        processes = "1 process" if size == 1 else f"{size} processes"
        start = f"start {asked} (leanft run --nproc-per-node {asked})" if asked > 1 else "leave both out"
        raise ValueError(
            f"{product} needs {'a multiple of ' if cfg.shard is None else ''}{asked} processes, and there "
            f"{'is' if size == 1 else 'are'} {processes}. Set them so that they multiply to {size}, or {start}."
        )
    return size // cfg.replicate


class ManyRanks:
    """The ranks of a run, as `lean_ft.shards.Ranks` says.

    `mesh` has the dimensions `replicate` and `shard`. A model that `parallelize` cut belongs to them.
    """

    def __init__(self, mesh: Any, device: torch.device, timeout: timedelta) -> None:
        import torch.distributed as dist

        self.mesh, self.device = mesh, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shard, self.num_shards = mesh.get_local_rank(SHARD), mesh.size(1)
        self._hosts: Any
        self._hosts_beside: Any
        self._hosts, self._hosts_beside = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
        self._shards = mesh.get_group(SHARD)
        self.cut_models: list[nn.Module] = []  # those that `parallelize` was given

    @property
    def beside(self) -> "ManyRanks":
        other = copy.copy(self)
        other._hosts = self._hosts_beside
        return other

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        rounds = -(-len(micro_batches) // self.size)
        for i in range(rounds):
            place, is_last = i * self.size + self.rank, i == rounds - 1
            for model in self.cut_models:
                # Copies of a model add up their own gradients first, and then once with one another.
                model.set_requires_all_reduce(is_last)  # type: ignore[operator]
            if place < len(micro_batches):
                yield micro_batches[place], is_last
            else:  # one that adds zero to every gradient
                filler: Any = micro_batches[len(micro_batches) - 1]
                yield filler.without_targets(), is_last

    def sum(self, values: Tensor) -> Tensor:
        import torch.distributed as dist

        dist.all_reduce(values)
        return values

    def sum_shards(self, value: Tensor) -> Tensor:
        import torch.distributed as dist

        if self.num_shards > 1:
            dist.all_reduce(value, group=self._shards)
        return value

    def highest(self, *numbers: int) -> list[int]:
        import torch.distributed as dist

        values = torch.tensor(numbers)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._hosts)
        return values.tolist()

    def highest_of(self, values: Tensor) -> Tensor:
        import torch.distributed as dist

        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._hosts)
        return values

    def total(self, number: int) -> int:
        import torch.distributed as dist

        value = torch.tensor(number)
        dist.all_reduce(value, group=self._hosts)
        return int(value)

    def first(self, work: Callable[[], T]) -> T:
        import torch.distributed as dist

        result: list[Any] = [None, None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                result[0] = work()
            except Exception as raised:
                error, result[1] = raised, _told(raised)
        dist.broadcast_object_list(result, src=0, group=self._hosts)
        if error is not None:
            raise error
        if result[1] is not None:
            raise _error_again(result[1], 0)
        return result[0]

    def everywhere(self, work: Callable[[], object]) -> None:
        import torch.distributed as dist

        error: Exception | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, None if error is None else _told(error), group=self._hosts)
        if error is not None:
            raise error
        for rank, one in enumerate(told):
            if one is not None:
                raise _error_again(one, rank)

    def check_same(self, what: dict[str, Any]) -> None:
        import torch.distributed as dist

        all_of: list[Any] = [None] * self.size
        dist.all_gather_object(all_of, (platform.node(), what), group=self._hosts)
        (first_host, first), *others = all_of
        for rank, (host, other) in enumerate(others, start=1):
            different = [key for key in {**first, **other} if first.get(key) != other.get(key)]
            if different:
                lines = "".join(
                    f"\n  {key}: {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}" for key in different
                )
                raise ValueError(
                    f"rank {rank} ({host}) is of another run than rank 0 ({first_host}):{lines}\n"
                    "Start all with the same command, on the same files."
                )

    def gather_no_more(self, model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()


def _told(error: Exception) -> tuple[str, str]:
    """What the other ranks are told of an error: of which kind it is, and its message."""
    for kind in (ValueError, OSError):
        if isinstance(error, kind):
            return kind.__name__, str(error)
    return "RuntimeError", f"{type(error).__name__}: {error}"


def _error_again(told: tuple[str, str], rank: int) -> Exception:
    """What another rank raised, as one of the same kind."""
    kind, message = told
    if kind == "ValueError":
        return ValueError(message)
    return {"OSError": OSError, "RuntimeError": RuntimeError}[kind](f"rank {rank}: {message}")
