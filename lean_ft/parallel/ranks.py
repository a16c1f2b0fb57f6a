"""The process group of a run, from the environment that torchrun sets for each process.

A run gives the same result with any number of ranks. Micro-batches are planned for all ranks together, sums are divided
by the step's number of targets, and all ranks agree on what controls the run (a loss that is not finite, a signal, the
time to save). Hosts agree through separate gloo groups, so that they do not wait for a GPU, and a saving thread does
not interfere with the step's collectives.

Left out: ranks that join or leave within a run. If one dies, the run ends; torchrun restarts it, perhaps with another
number of ranks, and it resumes from its newest checkpoint.
"""

import copy
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lean_ft.data.rows import IGNORED
from lean_ft.settings import ParallelConfig
from lean_ft.system.contents import Words, differences
from lean_ft.system.launch import FAILURE_KEY, POLL_SECONDS, check_host, shared_store
from lean_ft.system.shards import ALONE, Cut, Ranks, local
from lean_ft.system.world import world

T = TypeVar("T")

REPLICATE, SHARD = "replicate", "shard"  # dimensions of the mesh
CONTEXT, TENSOR, EXPERTS = "context", "tensor", "experts"  # subdivisions of the shard dimension


def join(cfg: ParallelConfig, device: torch.device) -> Ranks:
    """Connect to the other processes of the run; returns `ALONE` for a single process.

    Raises ValueError if the environment is incomplete, or the `parallel` settings do not multiply to the number of
    processes.
    """
    return world().join(cfg, device, _connect)


def _connect(cfg: ParallelConfig, device: torch.device) -> Ranks:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    check_number(cfg, size)
    if size == 1:
        return ALONE
    _meet(size, device, timedelta(minutes=cfg.timeout_minutes), cfg)
    return ManyRanks(cfg, device)


def _meet(size: int, device: torch.device, timeout: timedelta, cfg: ParallelConfig) -> None:
    """Start the process group after checking that all ranks have the same `parallel` settings."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        lacking = f"WORLD_SIZE={size}, but {', '.join(missing)} is not in the environment"
        raise ValueError(f"{lacking}. Start the processes with leanft run --nproc-per-node or torchrun.")
    if dist.is_initialized():
        return
    host, port = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    check_host(host, f"MASTER_ADDR={host}")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank = int(os.environ["RANK"])
    settings = {f"parallel.{name}": value for name, value in cfg.model_dump().items()}
    try:
        store = shared_store(timeout)
        store.set(f"settings of {rank}", json.dumps([platform.node(), settings]))
        by_rank = _settings_of_all(store, size, timeout)
        # Without a launcher, rank 0 hosts the store. It must not stop before the others have read.
        store.set(f"rank {rank} has read", "")
        if rank == 0:
            store.wait([f"rank {other} has read" for other in range(size)], timeout)
    except dist.DistError as error:
        raise ValueError(
            f"rank {rank} did not reach the other ranks at MASTER_ADDR={host}, MASTER_PORT={port} within "
            f"parallel.timeout_minutes={timeout.total_seconds() / 60:.0f}: {error}. Start all ranks with the same "
            "address and port."
        ) from None
    _refuse_different(by_rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _settings_of_all(store: Any, size: int, timeout: timedelta) -> list[Any]:
    """Host and settings of each rank. Raises ValueError if a process on another machine has ended instead."""
    names, deadline = [f"settings of {rank}" for rank in range(size)], time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store.wait(names, min(timeout, timedelta(seconds=POLL_SECONDS)))
            return [json.loads(store.get(name)) for name in names]
        except dist.DistStoreError:
            if store.check([FAILURE_KEY]):
                raise ValueError(store.get(FAILURE_KEY).decode()) from None
            if time.monotonic() > deadline:
                raise


def check_number(cfg: ParallelConfig, size: int) -> int:
    """The number of ranks, of `size`, that share one replica of the model.

    Raises ValueError if the settings do not multiply to `size`.
    """
    names = [name for name in (CONTEXT, TENSOR) if getattr(cfg, name) > 1]
    names = ["replicate"] * (cfg.replicate > 1 or not names) + ["shard"] * (cfg.shard is not None) + names
    num_processes = cfg.replicate * (cfg.shard or 1) * cfg.context * cfg.tensor
    product = "parallel." + " x ".join(f"{name}={getattr(cfg, name)}" for name in names)
    if size % num_processes or (cfg.shard is not None and num_processes != size):
        there = "there is 1 process" if size == 1 else f"there are {size} processes"
        start = (
            f"start {num_processes} processes (leanft run --nproc-per-node {num_processes})"
            if num_processes > 1
            else "remove both"
        )
        raise ValueError(
            f"{product} needs {'a multiple of ' if cfg.shard is None else ''}{num_processes} processes, and {there}. "
            f"Set values whose product is {size}, or {start}."
        )
    num_shards = size // cfg.replicate
    if num_shards % cfg.experts:
        sharing = f"the {num_shards} processes that share a replica of the model"
        raise ValueError(f"parallel.experts={cfg.experts} does not divide {sharing}. Set a divisor of {num_shards}.")
    return num_shards


class ManyRanks(Ranks):
    """The ranks of a run with several processes; see `lean_ft.system.shards.Ranks`.

    `mesh` has the dimensions `replicate` and `shard`. Neighboring ranks of a replica share a micro-batch's tokens
    (`parallel.context` x `parallel.tensor`, the latter innermost) or a layer's experts. `groups` has this rank's groups
    by the setting's name, and the group that shares its tokens as `tokens`.
    """

    hosts_backend = "gloo"

    def __init__(self, cfg: ParallelConfig, device: torch.device) -> None:
        """The process group has been initialized."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_shards, timeout = check_number(cfg, self.size), timedelta(minutes=cfg.timeout_minutes)
        shape = (self.size // self.num_shards, self.num_shards)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATE, SHARD))
        self.device, self.shard = device, self.mesh.get_local_rank(SHARD)
        self._hosts, self._hosts_beside = (
            dist.new_group(backend=self.hosts_backend, timeout=timeout) for _ in range(2)
        )
        self._shards = self.mesh.get_group(SHARD)
        self.num_sharing = cfg.context * cfg.tensor
        self.num_alike = cfg.tensor
        self.groups: dict[str, Any] = {}
        self._meshes: dict[str, Any] = {}
        if cfg.context > 1:
            self.groups[CONTEXT] = self._divided((CONTEXT, cfg.context), (TENSOR, cfg.tensor)).get_group(CONTEXT)
        if self.num_sharing > 1:
            self.groups["tokens"] = self._divided(("tokens", self.num_sharing)).get_group("tokens")
        for over, number in ((TENSOR, cfg.tensor), (EXPERTS, cfg.experts)):
            if number > 1:
                self._meshes[over] = self._divided((over, number))
                self.groups[over] = self._meshes[over].get_group(over)
        self.layers_are_cut = WeakSet[nn.Module]()  # models that `cut` was called with
        self.resharded = WeakSet[nn.Module]()  # FSDP units that free their gathered weights after forward
        self.cut_models: list[nn.Module] = []  # models that `parallelize` was called with

    def _divided(self, *parts: tuple[str, int]) -> Any:
        """The mesh with its second dimension divided further, innermost last."""
        names, numbers = zip(*parts, strict=True)
        shape = (self.mesh.size(0), self.num_shards // math.prod(numbers), *numbers)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=(REPLICATE, SHARD, *names))

    def mesh_of(self, over: str | None) -> Any:
        """The mesh that shards a parameter's rows, if the setting `over` already splits the parameter; 2-D with
        replicas."""
        mesh = self.mesh if over is None else self._meshes[over]
        return mesh[SHARD] if mesh.size(0) == 1 else mesh[REPLICATE, SHARD]

    @property
    def for_thread(self) -> "ManyRanks":
        other = copy.copy(self)
        other._hosts = self._hosts_beside
        return other

    def places(self, number: int) -> list[int]:
        size, rank = self.size // self.num_sharing, self.rank // self.num_sharing
        return [i * size + rank for i in range(-(-number // size))]

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        places = self.places(len(micro_batches))
        for place in places:
            is_last = place == places[-1]
            self._complete_gradients(is_last)
            if place < len(micro_batches):
                yield self._own_tokens(micro_batches[place]), is_last
            else:  # a micro-batch that adds zero to every gradient
                filler: Any = micro_batches[len(micro_batches) - 1]
                yield self._own_tokens(filler.without_targets()), is_last

    def _own_tokens(self, batch: Any) -> Any:
        """This rank's slice of each row of a micro-batch. Values per completion stay on every rank that shares the
        row."""
        if self.num_sharing == 1:
            return batch
        part = batch.part_of_rows(self.rank % self.num_sharing, self.num_sharing)
        return part if part.labels_whole_rows else replace(part, num_targets=self._count_targets(part.labels))

    def _count_targets(self, labels: Tensor) -> int:
        return int((labels != IGNORED).sum())

    def _complete_gradients(self, is_last: bool) -> None:
        """Replicas accumulate gradients locally, and all-reduce them only after the last micro-batch."""
        for model in self.cut_models:
            model.set_requires_all_reduce(is_last)  # type: ignore[operator]

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def sum_shards(self, value: Tensor) -> Tensor:
        if self.num_shards > 1:
            dist.all_reduce(value, group=self._shards)
        return value

    def highest(self, *numbers: int) -> list[int]:
        return self.highest_of(torch.tensor(numbers)).tolist()

    def highest_of(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._hosts)
        return values

    def total(self, number: int) -> int:
        value = torch.tensor(number)
        dist.all_reduce(value, group=self._hosts)
        return int(value)

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        result: Any = self.on_every_rank(lambda: work() if self.rank == 0 else None)[0]
        return result

    def on_every_rank(self, work: Callable[[], T]) -> list[T]:
        mine: list[Any] = [None, None]  # return value, description of an error
        error: Exception | None = None
        try:
            mine[0] = work()
        except Exception as raised:
            error, mine[1] = raised, _describe(raised)
        by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(by_rank, mine, group=self._hosts)
        if error is not None:
            raise error
        for rank, (_, description) in enumerate(by_rank):
            if description is not None:
                raise _as_error(description, rank)
        return [result for result, _ in by_rank]

    def check_same(self, what: dict[str, Any]) -> None:
        by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(by_rank, (platform.node(), what), group=self._hosts)
        _refuse_different(by_rank)

    def row_counts(self, counts: Tensor, num_rows: int) -> list[list[int]]:
        """Read how many of `num_rows` rows go to each rank and come from it, (2, n). The host waits for the device."""
        return counts.tolist()

    def whole(self, tensor: Tensor) -> Tensor:
        mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
        values = local(tensor).detach()
        for dim, placement in enumerate(getattr(tensor, "placements", ())):
            if mesh is not None and placement.is_shard() and mesh.size(dim) > 1:
                rows = values.new_empty(-(-tensor.shape[0] // mesh.size(dim)), *tensor.shape[1:])
                rows[: len(values)] = values
                values = _gathered(rows, mesh.get_group(dim)).flatten(0, 1)[: tensor.shape[0]]
        cut: Cut | None = getattr(tensor, "cut", None)
        return values if cut is None else torch.cat([*_gathered(values, self.groups[cut.over])], cut.dim)

    def gather_no_more(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule  # here, since it imports the compiler

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather: (ranks of the group, ...) from each rank's values (...) of any dtype."""
    content = values.contiguous().view(-1).view(torch.uint8)  # some backends know few dtypes
    gathered = content.new_empty(group.size() * len(content))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(gathered, content, group=group)
    return gathered.view(values.dtype).view(-1, *values.shape)


def _refuse_different(by_rank: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raise ValueError unless all ranks have the same data; `by_rank` has each rank's host and data."""
    (first_host, first), *remaining = by_rank
    for rank, (host, other) in enumerate(remaining, start=1):
        different = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if different:
            words = Words("on rank 0", f"on rank {rank}", "differs", "on rank 0 alone", f"on rank {rank} alone")
            lines = "".join(
                f"\n  {line}" for key in different for line in differences(key, first.get(key), other.get(key), words)
            )
            raise ValueError(
                f"rank {rank} ({host}) differs from rank 0 ({first_host}):{lines}\n"
                "Start all ranks with the same command, on the same files."
            )


def _describe(error: Exception) -> tuple[str, str]:
    """Kind and message of an error, for the other ranks."""
    for error_class in (ValueError, OSError):
        if isinstance(error, error_class):
            return error_class.__name__, str(error)
    return "RuntimeError", f"{type(error).__name__}: {error}"


def _as_error(description: tuple[str, str], rank: int) -> Exception:
    """An error of the kind that another rank raised."""
    class_name, message = description
    if class_name == "ValueError":
        return ValueError(message)
    return {"OSError": OSError, "RuntimeError": RuntimeError}[class_name](f"rank {rank}: {message}")
