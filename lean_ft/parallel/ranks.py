"""Who else trains: the processes of one run, told by the environment that torchrun gives each of them.

A run at any number of ranks is the same run. Its micro-batches are planned for all of them together, sums are divided by
the targets of the whole step, and what decides the course of the run (a loss that is not finite, a signal, the time to save)
is agreed upon, so that every rank does the same. What hosts agree on goes through a group of its own, over gloo: it
waits for no GPU, and a thread that saves does not meet the collectives of the step under way.

Left out: ranks that come and go within a run. One that dies ends the run; torchrun starts it again, at another number of
ranks if need be, and it goes on from its newest checkpoint.
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
from torch.distributed.device_mesh import init_device_mesh

from lean_ft.data import Batch
from lean_ft.data.rows import IGNORED
from lean_ft.settings import ParallelConfig
from lean_ft.system.launch import ENDED, LOOK_SECONDS, find_host, shared_store
from lean_ft.system.shapes_only import outside, stage
from lean_ft.system.shards import ALONE, Ranks

T = TypeVar("T")

REPLICATE, SHARD = "replicate", "shard"  # the names of the mesh's dimensions
CONTEXT, TENSOR, EXPERTS = "context", "tensor", "experts"  # and of those that a copy's ranks have besides


def join(cfg: ParallelConfig, device: torch.device) -> Ranks:
    """Meets the other processes of the run, and returns what connects this one with them; `ALONE` where there are none.

    Raises ValueError where the environment tells of others and not how to reach them, or where `parallel` does not
    multiply to their number.
    """
    watcher = stage()
    size = int(os.environ.get("WORLD_SIZE", "1")) if watcher is None else watcher.num_ranks
    shard = check_number(cfg, size)
    if size == 1:
        return ALONE
    timeout = timedelta(minutes=cfg.timeout_minutes)
    if watcher is None:
        _meet(size, device, timeout, cfg)
    with outside():
        mesh = init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=(REPLICATE, SHARD))
        return (ManyRanks if watcher is None else watcher.ranks_type)(mesh, device, timeout, cfg)


def _meet(size: int, device: torch.device, timeout: timedelta, cfg: ParallelConfig) -> None:
    """Begins the process group, as the environment tells, of ranks that are going to divide it alike."""
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={size} tells of {size} processes, but {', '.join(missing)} is not in the environment, so they "
            "cannot meet. Start them by leanft run --nproc-per-node, or by torchrun."
        )
    if not dist.is_initialized():
        host, port = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        find_host(host, f"MASTER_ADDR={host}")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        rank = int(os.environ["RANK"])
        settings = {f"parallel.{name}": value for name, value in cfg.model_dump().items()}
        try:
            store = shared_store(timeout)
            store.set(f"settings of {rank}", json.dumps([platform.node(), settings]))
            all_of = _of_all(store, size, timeout)
        except dist.DistError as error:
            raise ValueError(
                f"rank {rank} did not meet the others at MASTER_ADDR={host}, MASTER_PORT={port} within "
                f"parallel.timeout_minutes={timeout.total_seconds() / 60:.0f}: {error}. Start all of them with the same two."
            ) from None
        _refuse_different(all_of)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _of_all(store: Any, size: int, timeout: timedelta) -> list[Any]:
    """What all ranks have told of their settings. Raises ValueError where one of them, on another machine, has ended instead."""
    names, deadline = [f"settings of {rank}" for rank in range(size)], time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store.wait(names, min(timeout, timedelta(seconds=LOOK_SECONDS)))
            return [json.loads(store.get(name)) for name in names]
        except dist.DistStoreError:
            if store.check([ENDED]):
                raise ValueError(store.get(ENDED).decode()) from None
            if time.monotonic() > deadline:
                raise


def check_number(cfg: ParallelConfig, size: int) -> int:
    """Over how many of `size` ranks a copy of the model is cut, in one way or another. Raises ValueError where the settings do
    not multiply to them."""
    names = [name for name in (CONTEXT, TENSOR) if getattr(cfg, name) > 1]
    names = ["replicate"] * (cfg.replicate > 1 or not names) + ["shard"] * (cfg.shard is not None) + names
    asked = cfg.replicate * (cfg.shard or 1) * cfg.context * cfg.tensor
    product = "parallel." + " x ".join(f"{name}={getattr(cfg, name)}" for name in names)
    processes = "1 process" if size == 1 else f"{size} processes"
    if size % asked or (cfg.shard is not None and asked != size):
        start = f"start {asked} (leanft run --nproc-per-node {asked})" if asked > 1 else "leave both out"
        raise ValueError(
            f"{product} needs {'a multiple of ' if cfg.shard is None else ''}{asked} processes, and there "
            f"{'is' if size == 1 else 'are'} {processes}. Set them so that they multiply to {size}, or {start}."
        )
    of_copy = size // cfg.replicate
    if of_copy % cfg.experts:
        raise ValueError(
            f"parallel.experts={cfg.experts} is taken from the {of_copy} processes that share a copy of the model, of {processes} "
            "in all, and does not divide them. Set one that does."
        )
    return of_copy


class ManyRanks(Ranks):
    """The ranks of a run, as `lean_ft.system.shards.Ranks` says.

    `mesh` has the dimensions `replicate` and `shard`. A model that `parallelize` cut belongs to them. Neighbours among the
    ranks of a copy share a micro-batch's tokens (`parallel.context` x `parallel.tensor`, of which the latter are nearest) or
    a layer's experts; `groups` has those of this rank by the setting's name, and all that share its tokens as `tokens`.
    """

    hosts_backend = "gloo"

    def __init__(self, mesh: Any, device: torch.device, timeout: timedelta, cfg: ParallelConfig) -> None:
        self.mesh, self.device = mesh, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shard, self.num_shards = mesh.get_local_rank(SHARD), mesh.size(1)
        self._hosts: Any
        self._hosts_beside: Any
        self._hosts, self._hosts_beside = (
            dist.new_group(backend=self.hosts_backend, timeout=timeout) for _ in range(2)
        )
        self._shards = mesh.get_group(SHARD)
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
        self.layers_are_cut = WeakSet[nn.Module]()  # those that `cut` was given
        self.resharded = WeakSet[nn.Module]()  # FSDP units that free their gathered weights after forward
        self.cut_models: list[nn.Module] = []  # those that `parallelize` was given

    def _divided(self, *parts: tuple[str, int]) -> Any:
        """The mesh with its second dimension divided further, by neighbours."""
        names, numbers = zip(*parts, strict=True)
        shape = (self.mesh.size(0), self.num_shards // math.prod(numbers), *numbers)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=(REPLICATE, SHARD, *names))

    def mesh_of(self, over: str | None) -> Any:
        """Where rows of a parameter are cut that is cut by this setting already, or by none: with copies of two dimensions."""
        mesh = self.mesh if over is None else self._meshes[over]
        return mesh[SHARD] if mesh.size(0) == 1 else mesh[REPLICATE, SHARD]

    @property
    def beside(self) -> "ManyRanks":
        other = copy.copy(self)
        other._hosts = self._hosts_beside
        return other

    def share(self, micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
        size, rank = self.size // self.num_sharing, self.rank // self.num_sharing
        rounds = -(-len(micro_batches) // size)
        for i in range(rounds):
            place, is_last = i * size + rank, i == rounds - 1
            self._complete_gradients(is_last)
            if place < len(micro_batches):
                yield self._own_tokens(micro_batches[place]), is_last
            else:  # one that adds zero to every gradient
                filler: Any = micro_batches[len(micro_batches) - 1]
                yield self._own_tokens(filler.without_targets()), is_last

    def _own_tokens(self, batch: Any) -> Any:
        """Of a micro-batch the tokens that are here: of each row as many as on every other rank that shares it. What it tells of
        whole answers each of these ranks has."""
        if self.num_sharing == 1:
            return batch
        batch = batch.built
        num_rows, num_tokens = batch.input_ids.shape
        if num_tokens % self.num_sharing:
            raise ValueError(
                f"{self.num_sharing} processes share each row (parallel.context x tensor), and the rows of this batch have "
                f"{num_tokens} tokens, which they do not divide. Set data.packing=bfd with a data.max_length that they divide."
            )
        place, width = self.rank % self.num_sharing, num_tokens // self.num_sharing
        own: dict[str, Any] = {
            name: getattr(batch, name)[:, place * width : (place + 1) * width].contiguous()
            for name in ("input_ids", "labels", "is_token")
            if getattr(batch, name) is not None
        }
        if batch.labels_whole_rows:
            del own["labels"]
            own |= {name: self._own_tokens(value) for name, value in vars(batch).items() if isinstance(value, Batch)}
            return replace(batch, **own)
        return replace(batch, **own, num_targets=self._count_targets(own["labels"]), num_tokens=num_rows * width)

    def _count_targets(self, labels: Tensor) -> int:
        return int((labels != IGNORED).sum())

    def _complete_gradients(self, is_last: bool) -> None:
        """Copies of a model add up their own gradients first, and then once with one another."""
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

    def first(self, work: Callable[[], T]) -> T:
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

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        mine: list[Any] = [None, None]  # what it returned, and what is told of an error
        error: Exception | None = None
        try:
            mine[0] = work()
        except Exception as raised:
            error, mine[1] = raised, _told(raised)
        all_of: list[Any] = [None] * self.size
        dist.all_gather_object(all_of, mine, group=self._hosts)
        if error is not None:
            raise error
        for rank, (_, told) in enumerate(all_of):
            if told is not None:
                raise _error_again(told, rank)
        return [result for result, _ in all_of]

    def check_same(self, what: dict[str, Any]) -> None:
        all_of: list[Any] = [None] * self.size
        dist.all_gather_object(all_of, (platform.node(), what), group=self._hosts)
        _refuse_different(all_of)

    def gather_no_more(self, model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()


def _refuse_different(all_of: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raises ValueError unless all ranks, of each of which the host is given and plain data, have the same data."""
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
