"""Count the memory and estimate the time of PyTorch code that runs on shapes.

Under `FakeTensorMode` tensors have shapes, dtypes and lifetimes but no contents, so a training step of any model runs in
seconds on any machine. `Trace` sees every operation. It counts a storage from the operation that allocates it until the last
reference of Python and autograd is gone, when an allocator would free it. Each storage has a label for its purpose; the sums
by label explain the peak. A value that the host reads is 1 or True.

The time of an operation follows from its arithmetic, its memory traffic and its class (`Device.kernel_seconds`). The host launches
kernels while the device computes, so a step takes at least the time of its launches. `Spent.ledger` lists the launches by module
and operation.

The tracer cannot see memory that a kernel allocates and frees inside itself. That is small for the kernels here, except for
flash attention's backward pass on a GPU, which is computed from its shapes.

On a CPU, resident memory is counted. A page becomes resident at the first write to it, so an empty tensor counts as it is
filled. Freed heap memory of small tensors stays resident until enough of it is free at the top of the heap (see
`lean_ft.memory.host_memory`). With a host pool, large tensors count as on a GPU, because they reuse resident pages.

On a GPU, every storage is a block of a simulated caching allocator per stream, which computes the reserved memory.

With several ranks, rank 0 is traced. The data that it sends in collectives is counted, and takes time at the rate of the link
within a machine, or of the network if the group spans machines.
"""

import contextlib
import inspect
import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lean_ft.memory.host_memory import MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES
from lean_ft.memory.host_pool import SMALLEST_BYTES
from lean_ft.models.float32_products import block_bytes, slow_dtypes
from lean_ft.plan.allocator import Block, CachingAllocator
from lean_ft.plan.devices import ONE_DEVICE, Device, Kernel, Machines
from lean_ft.plan.labels import LOSS, label_of_caller
from lean_ft.plan.result import Launches, Moment
from lean_ft.system.shards import local
from lean_ft.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    backward_node_number,
    next_node_number,
    read_scalar,
    storage_key,
    tree_iter,
)

_READ_VALUES: dict[torch.dtype, Any] = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0}
# Matrix products -> index of their first factor; the second factor follows.
_FIRST_FACTOR = {
    **dict.fromkeys(("aten.mm", "aten.bmm", "lean_ft.sum_of_products", "lean_ft.grouped_matmul"), 0),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm"), 1),
}
_GATHERING = ("embedding", "index_select", "gather", "index")  # read only the rows that they return
WAITS_FOR_OTHERS = LOSS  # collectives under this label do not overlap with computation
FREED = "freed, not given back"  # the label of free memory on a CPU's heap


class Cost(NamedTuple):
    """A launch, and the sizes of temporary tensors inside it. module: None for the one that runs now."""

    kernel: Kernel | None
    name: str
    module: str | None
    temporary: Sequence[int] = ()


@dataclass
class Spent:
    """Time and communication of a step so far."""

    ledger: dict[tuple[str, str], Launches] = field(default_factory=dict)  # (module, operation) -> its launches
    seconds: float = 0.0  # of the device, including what it waits for
    launch_seconds: float = 0.0  # of the host, while the device computes
    link_seconds: float = 0.0  # of copies to and from the host, which overlap
    exchange_seconds: float = 0.0  # of collectives, which overlap
    sent_bytes: float = 0.0  # to other devices of the machine
    sent_away_bytes: float = 0.0  # to other machines

    def again(self, before: "Spent", times: int) -> None:
        """Add `times` times what was spent since `before`."""
        for name, value in vars(before).items():
            now = getattr(self, name)
            if name != "ledger":
                setattr(self, name, now + (now - value) * times)
        for place, launches in self.ledger.items():
            new = launches.plus(before.ledger.get(place, Launches()), -1)
            self.ledger[place] = launches.plus(new, times)

    def copy(self) -> "Spent":
        return replace(self, ledger=dict(self.ledger))


@dataclass
class _Storage:
    num_bytes: int
    resident_bytes: int
    label: str
    block: Block | None = None  # of a GPU's allocator


class Trace(TorchDispatchMode):
    """A dispatch mode that computes `peak`, `timeline` and `spent`. `host_pool`: a CPU with `memory.host_pool`.

    A storage's label is the one set by `labelled`, else that of the function which allocates it (`lean_ft.plan.labels`),
    else `label`. `where` says how far the step is.
    """

    def __init__(self, device: Device, host_pool: bool = False, machines: Machines = ONE_DEVICE) -> None:
        super().__init__()
        self.device, self.machines = device, machines
        self._converted = slow_dtypes() if device.is_cpu else frozenset()
        self._fills_pages = device.is_cpu and not host_pool
        self._heap_limit = SMALLEST_BYTES if host_pool else MMAP_THRESHOLD_BYTES
        self.label = "other"
        self.where = ""
        self._label_is_set = False  # by `labelled`, whatever function allocates
        self.live: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak = Moment()
        self.timeline: list[tuple[float, dict[str, int]]] = []  # (seconds, bytes alive by label)
        self.spent = Spent()
        self.pinned_bytes = 0  # the most pinned host memory at one time
        self._pinned: dict[int, int] = {}  # pinned bytes by address, which are not device memory
        self.longest_document = 1
        self._peak_bytes = 0
        self._heap_bytes = self._heap_top = 0  # CPU: used heap memory, and the top of the heap
        self.stream = "computing"
        self._allocators: defaultdict[str, CachingAllocator] = defaultdict(CachingAllocator)  # GPU: by stream
        self._storages: dict[int, _Storage] = {}  # by address
        self._counting = True
        self.module_names: dict[int, str] = {}  # by id
        self._module_of_node: dict[int, str] = {}  # by the sequence number of autograd

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, or torch.compile would compile nothing while the mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is read_scalar and self._counting and isinstance(args[0], FakeTensor):
            return _READ_VALUES.get(args[0].dtype, 1)
        result = func(*args, **(kwargs or {}))
        if self._counting and func.namespace != "prim":  # queries of a device or layout move no data
            is_empty = func.__name__.startswith(("empty", "new_empty"))
            self.note(result, written=not (is_empty and self._fills_pages))
            if func.namespace in ("c10d", "_c10d_functional"):
                self.exchange(func, args)
            elif not func.is_view:
                self.write(_written(func, args, kwargs or {}))
                if not is_empty:
                    self.pay(self.cost(func, args, kwargs or {}, result))
        return result

    @property
    def current(self) -> tuple[str, str]:
        """The label of a storage allocated now, and how far the step is."""
        label = None if self._label_is_set else label_of_caller()
        return (self.label, self.where) if label is None else (label, label)

    # Memory ---------------------------------------------------------------------------------------------------------

    def note(self, tensors: Any, written: bool = True) -> None:
        """Count the new storages of `tensors` (any nesting), until each is freed.

        Storages that are not `written` yet count as `write` fills them.
        """
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._note(tensor, written)

    def _note(self, tensor: Tensor, written: bool) -> None:
        storage = local(tensor).untyped_storage()
        address, num_bytes = storage_key(storage), storage.nbytes()
        if address in self._pinned:
            return
        known = self._storages.get(address)
        if known is None:
            weakref.finalize(storage, self._free, address)
            self._storages[address] = known = _Storage(num_bytes, 0, self.current[0])
        elif known.num_bytes == num_bytes:
            return
        resident_bytes = num_bytes if written else min(known.resident_bytes, num_bytes)
        self._count(known, 0)
        known.num_bytes = num_bytes  # it may have been resized
        if not self.device.is_cpu:
            allocator = self._allocators[self.stream]
            allocator.free(known.block)
            known.block = allocator.allocate(num_bytes)
        self._count(known, resident_bytes)

    def counts(self, tensors: Any) -> bool:
        """Whether the storage of each tensor is counted already."""
        return all(self._known(tensor) is not None for tensor in tree_iter(tensors) if isinstance(tensor, Tensor))

    def write(self, tensors: Any) -> None:
        """Count data written to known storages. A part written twice counts as two parts."""
        for tensor in tree_iter(tensors):
            known = self._known(tensor) if isinstance(tensor, Tensor) else None
            if known is not None and known.resident_bytes < known.num_bytes:
                self._count(known, min(known.resident_bytes + _num_bytes(tensor), known.num_bytes))

    def overwrite(self, tensor: Tensor, result: Tensor) -> None:
        """Count `result` in the memory of `tensor`, which nothing reads any more, if it is new and has the same size."""
        before, after = (local(t).untyped_storage() for t in (tensor, result))
        if self._known(tensor) and not self._known(result) and before.nbytes() == after.nbytes():
            self.relabel(tensor, self.current[0])
            self._storages[storage_key(after)] = self._storages.pop(storage_key(before))
            weakref.finalize(after, self._free, storage_key(after))

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Change the label of the tensor's storage."""
        known = self._known(tensor)
        if known is not None:
            resident_bytes = known.resident_bytes
            self._count(known, 0)
            known.label = label
            self._count(known, resident_bytes)

    def _known(self, tensor: Tensor) -> _Storage | None:
        return self._storages.get(storage_key(local(tensor).untyped_storage()))

    def _count(self, storage: _Storage, resident_bytes: int) -> None:
        grown = resident_bytes - storage.resident_bytes
        storage.resident_bytes = resident_bytes
        self.live[storage.label] += grown
        self.live_bytes += grown
        freed = 0
        if self.device.is_cpu:
            if storage.num_bytes < self._heap_limit:
                self._heap_bytes += grown
            self._heap_top = min(max(self._heap_top, self._heap_bytes), self._heap_bytes + TRIM_THRESHOLD_BYTES)
            freed = self._heap_top - self._heap_bytes
        if self.live_bytes + freed > self._peak_bytes:
            self._peak_bytes = self.live_bytes + freed
            self.peak = Moment(self.current[1], {label: count for label, count in self.live.items() if count})
            if freed:
                self.peak.bytes_by_label[FREED] = freed

    def _free(self, address: int) -> None:
        storage = self._storages.pop(address, None)
        if storage is not None:
            self._count(storage, 0)
            if not self.device.is_cpu:
                self._allocators[self.stream].free(storage.block)

    def _occupy(self, sizes: Sequence[int]) -> None:
        """Count memory that is allocated and freed at once."""
        allocator = self._allocators[self.stream]
        label = self.current[0]
        taken = [_Storage(num_bytes, 0, label, allocator.allocate(num_bytes)) for num_bytes in sizes]
        for storage in taken:
            self._count(storage, storage.num_bytes)
        for storage in taken:
            self._count(storage, 0)
            allocator.free(storage.block)

    def _inside(self, func: Any, args: Any) -> list[int]:
        """Sizes of the temporary tensors inside an operation, in bytes.

        PyTorch's flash attention sums the queries' gradient in float32, with each document padded to 128 tokens and each head to
        32 or 64 features, and expands the gradients of keys and values to the query heads. A CPU that computes 16-bit products in
        float32 converts the operands in blocks.
        """
        if self.device.is_cpu:
            first = _FIRST_FACTOR.get(str(func.overloadpacket))
            if first is None or args[first].dtype not in self._converted:
                return []
            left, right = args[first : first + 2]
            return block_bytes(left, right if left.ndim == right.ndim else right[0])  # grouped: one group's matrix
        if str(func.overloadpacket) != "lean_ft.document_attention_backward":
            return []
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        query, key, cu_seqlens = named["query"], named["key"], named["cu_seqlens"]
        if query.itemsize != 2 or any(named.get(other) is not None for other in ("sinks", "softcap")):
            return []  # not flash attention
        num_tokens, num_heads, head_dim = query.shape
        filled_tokens = num_tokens + 128 * (len(cu_seqlens) - 1)
        multiple = 32 if head_dim <= 128 else 64
        expanded = [query.nbytes] * 2 if key.shape[1] < num_heads else []
        return [*expanded, 4 * filled_tokens * num_heads * -(-head_dim // multiple) * multiple]

    def tune(self) -> None:
        """Reserve the memory that the compiler uses on a GPU to clear the L2 cache while it tunes kernels at their first call. It is
        not part of `peak`, which is that of a later step."""
        if not self.device.is_cpu:
            allocator = self._allocators[self.stream]
            allocator.free(allocator.allocate(self.device.l2_cache_bytes))

    @property
    def reserved_bytes(self) -> int:
        """Memory taken from the driver so far; on a CPU the peak."""
        if self.device.is_cpu:
            return self.peak.total_bytes
        return sum(allocator.reserved_bytes for allocator in self._allocators.values())

    @contextlib.contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Context manager in which memory is allocated for the named stream."""
        before, self.stream = self.stream, name
        try:
            yield
        finally:
            self.stream = before

    # Time -----------------------------------------------------------------------------------------------------------

    def pay(self, cost: Cost | None) -> None:
        """Add the time and the temporary memory of one operation."""
        if cost is not None:
            self._occupy(cost.temporary)
            if cost.kernel is not None:
                self.spend(cost.kernel, cost.name, cost.module)

    def cost(self, func: Any, args: Any, kwargs: Any, result: Any, module: str | None = None) -> Cost:
        """The kernel and the temporary memory of one operation."""
        temporary = self._inside(func, args)
        name = str(func.overloadpacket).removeprefix("aten.")
        read = args[1:] if name in _GATHERING else args
        moved = sum(_num_bytes(tensor) for tensor in tree_iter((read, result)) if isinstance(tensor, Tensor))
        flops = self._flops(func, args, kwargs, result)
        if not moved and not flops:
            return Cost(None, name, module, temporary)
        is_attention = any(part in name for part in ("attention", "flash"))
        shape, product = (0, 0, 0), result
        if flops and not is_attention and (factors := [t for t in args if isinstance(t, Tensor) and t.ndim >= 2][-2:]):
            rows, inner = factors[0].shape[-2:]
            shape = (rows, int(flops / (2 * rows * inner)) if rows * inner else 0, inner)
            product = factors[0] if _has_dtype(args) else result
        kernel = Kernel(flops, moved, self._product_itemsize(product), is_attention, shape)
        return Cost(kernel, name, module, temporary)

    def spend(self, kernel: Kernel, name: str, module: str | None = None) -> None:
        """Add a kernel's time. The ledger lists it under `name` and `module`; the default is the module that runs now."""
        seconds, launches = self.device.kernel_seconds(kernel), self.spent.ledger
        self.spent.seconds += seconds
        self.spent.launch_seconds += self.device.launch_seconds
        place = (self.current_module() if module is None else module, name)
        new = Launches(1, kernel.flops, kernel.moved_bytes, seconds, self.device.limit_seconds(kernel))
        launches[place] = launches.get(place, Launches()).plus(new)
        self.timeline.append((self.spent.seconds, dict(self.live)))

    def current_module(self) -> str:
        """Return the name of the module whose `forward` runs now. In backward: of the module whose forward made this gradient's node."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "forward" and (module := _module_of(frame)) is not None:
                name = short_name(self.module_names.get(id(module), type(module).__name__))
                self._module_of_node.setdefault(next_node_number() - 1, name)
                return name
            frame = frame.f_back
        number = backward_node_number()
        name = None if number is None else self._module_of_node.get(number)
        return name or label_of_caller() or ""

    def pin(self, tensor: Tensor) -> None:
        """Count pinned host memory until it is freed."""
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self._pinned.pop, storage_key(storage))
        self._pinned[storage_key(storage)] = storage.nbytes()
        self.pinned_bytes = max(self.pinned_bytes, sum(self._pinned.values()))

    def travel(self, num_bytes: int) -> None:
        """Add the time of a copy between device and host."""
        self.spent.link_seconds += num_bytes / self.device.host_bytes_per_second

    @property
    def step_seconds(self) -> float:
        """Time of the step so far."""
        spent = self.spent
        return max(spent.seconds, spent.launch_seconds, spent.link_seconds, spent.exchange_seconds)

    def begin_step(self) -> None:
        """Reset time and timeline."""
        self.spent = Spent()
        self.timeline.clear()

    def exchange(self, func: Any, args: Any) -> None:
        """Count the data that this rank sends in a ring collective, and its time."""
        name = func.overloadpacket.__name__
        if name not in _SENT:
            return
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        else:
            group = dist.distributed_c10d._resolve_process_group(args[-1])  # pyright: ignore[reportPrivateImportUsage]
        ranks = dist.get_process_group_ranks(group)
        first, second = (sum(_num_bytes(t) for t in tree_iter(args[i]) if isinstance(t, Tensor)) for i in (0, 1))
        sent = _SENT[name](first, second, len(ranks))
        away = len({rank // self.machines.devices_each for rank in ranks}) > 1
        seconds = sent / (self.device.network_bytes_per_second if away else self.device.peer_bytes_per_second)
        if away:
            self.spent.sent_away_bytes += sent
        else:
            self.spent.sent_bytes += sent
        if self.current[0] == WAITS_FOR_OTHERS:
            self.spent.seconds += seconds
        else:
            self.spent.exchange_seconds += seconds

    def _product_itemsize(self, result: Any) -> int:
        """Bytes per element in the products that gave `result`."""
        first = next((tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)), None)
        if first is None:
            return 2
        return 4 if first.dtype in self._converted else first.element_size()

    def _flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        packet = func.overloadpacket
        name = str(packet)
        if name.startswith("lean_ft.document_attention"):
            backward = name.endswith("backward")
            query = args[2] if backward else args[0]  # (N, H, D)
            # Per head, two products of N x L x D forward and five backward; the causal mask halves each.
            return (5 if backward else 2) * query.numel() * self.longest_document
        count = flop_registry.get(packet)
        if name in _FIRST_FACTOR and _has_dtype(args):
            args = args[:-1]  # torch's formulas have no place for it
        return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager in which operations are not counted; explicit `note` and `spend` still are."""
        counting, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = counting

    @contextlib.contextmanager
    def labelled(self, label: str, where: str = "") -> Iterator[None]:
        """Context manager that sets the label of new storages, and `where` (the label by default)."""
        before = self.label, self.where, self._label_is_set
        self.label, self.where, self._label_is_set = label, where or label, True
        try:
            yield
        finally:
            self.label, self.where, self._label_is_set = before


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


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs."""
    values = frame.f_locals
    module = values.get("self")
    # Before Python 3.13 the frame keeps this copy of its variables, and with it tensors that the method has deleted.
    if isinstance(values, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()
    return module if isinstance(module, nn.Module) else None


def short_name(name: str) -> str:
    """A module's name without the layer's place: `model.layers.3.mlp.up_proj` -> `mlp.up_proj`."""
    parts = [part for part in re.findall(r"\w+", name) if not part.isdecimal()]
    for outer in ("self", "layer", "layers", "_orig_mod"):
        if outer in parts:
            parts = parts[len(parts) - parts[::-1].index(outer) :]
    return ".".join(parts)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that an operation writes to."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(kwargs.get(argument.name) if argument.kwarg_only or index >= len(args) else args[index])
    return written


def _has_dtype(args: Any) -> bool:
    """Whether a product of 16-bit factors is asked for in float32 (`torch.mm(..., out_dtype=)`)."""
    return isinstance(args[-1], torch.dtype)


def _num_bytes(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()
