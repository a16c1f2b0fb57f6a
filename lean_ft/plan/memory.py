"""Count the memory of tensors that have shapes, dtypes and lifetimes but no contents.

A storage counts from the operation that allocates it until the last reference of Python and autograd is gone, when an
allocator would free it. Each storage has a label for its purpose; the sums by label explain the peak.

Memory that a kernel allocates and frees inside itself cannot be seen. That is small for the kernels here, except for
attention's backward pass on a GPU, which is computed from its shapes.

On a CPU, resident memory is counted. A page becomes resident at the first write to it, so an empty tensor counts as it
is filled. Freed heap memory of small tensors stays resident until enough of it is free at the top of the heap (see
`lean_ft.memory.host_memory`). With a host pool, large tensors count as on a GPU, because they reuse resident pages.

On a GPU, every storage is a block of a simulated caching allocator per stream, which computes the reserved memory.
"""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lean_ft.memory.host_memory import MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES
from lean_ft.memory.host_pool import SMALLEST_BYTES
from lean_ft.models.float32_products import block_bytes, slow_dtypes
from lean_ft.plan.allocator import CachingAllocator, MemoryBlock
from lean_ft.plan.devices import Device
from lean_ft.plan.kernels import first_factor
from lean_ft.plan.labels import label_of_caller
from lean_ft.plan.result import Peak
from lean_ft.system.shards import local
from lean_ft.torch_private import OpOverload, storage_key, tree_iter

_TUNED_VERSIONS = 2  # of a pointwise kernel, by Inductor
FREED = "freed, not given back"  # the label of free memory on a CPU's heap


@dataclass
class _Storage:
    num_bytes: int
    resident_bytes: int
    label: str
    block: MemoryBlock | None = None  # of a GPU's allocator


class Memory:
    """The memory of a device. `host_pool`: a CPU with `memory.host_pool`.

    A storage's label is the one set by `labelled`, else that of the function which allocates it
    (`lean_ft.plan.labels`), else `label`. `where` says how far the step is.
    """

    def __init__(self, device: Device, host_pool: bool = False) -> None:
        self.device = device
        self._converted = slow_dtypes() if device.is_cpu else frozenset()
        self.fills_pages = device.is_cpu and not host_pool
        self._heap_limit = SMALLEST_BYTES if host_pool else MMAP_THRESHOLD_BYTES
        self.label = "other"
        self.where = ""
        self._label_is_set = False  # by `labelled`, whatever function allocates
        self.live: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak = Peak()
        self.pinned_bytes = 0  # the most pinned host memory at one time
        self._pinned: dict[int, int] = {}  # pinned bytes by address, which are not device memory
        self._peak_bytes = self._tuning_peak_bytes = 0
        self._heap_bytes = self._heap_top = 0  # CPU: used heap memory, and the top of the heap
        self.stream = "computing"
        self._allocators: defaultdict[str, CachingAllocator] = defaultdict(CachingAllocator)  # GPU: by stream
        self._storages: dict[int, _Storage] = {}  # by address

    @property
    def current(self) -> tuple[str, str]:
        """The label of a storage allocated now, and how far the step is."""
        label = None if self._label_is_set else label_of_caller()
        return (self.label, self.where) if label is None else (label, label)

    def note(self, tensors: object, written: bool = True) -> None:
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

    def counts(self, tensors: object) -> bool:
        """Whether the storage of each tensor is counted already."""
        return all(self._known(tensor) is not None for tensor in tree_iter(tensors) if isinstance(tensor, Tensor))

    def write(self, tensors: object) -> None:
        """Count data written to known storages. A part written twice counts as two parts."""
        for tensor in tree_iter(tensors):
            known = self._known(tensor) if isinstance(tensor, Tensor) else None
            if known is not None and known.resident_bytes < known.num_bytes:
                self._count(known, min(known.resident_bytes + num_bytes(tensor), known.num_bytes))

    def overwrite(self, tensor: Tensor, result: Tensor) -> None:
        """Count `result` in the memory of `tensor`, which nothing reads any more, if it is new and has the same
        size."""
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
            self.peak = Peak(self.current[1], {label: count for label, count in self.live.items() if count})
            if freed:
                self.peak.bytes_by_label[FREED] = freed

    def _free(self, address: int) -> None:
        storage = self._storages.pop(address, None)
        if storage is not None:
            self._count(storage, 0)
            if not self.device.is_cpu:
                self._allocators[self.stream].free(storage.block)

    def occupy(self, sizes: Sequence[int]) -> None:
        """Count memory that is allocated and freed at once."""
        allocator = self._allocators[self.stream]
        label = self.current[0]
        taken = [_Storage(num_bytes, 0, label, allocator.allocate(num_bytes)) for num_bytes in sizes]
        for storage in taken:
            self._count(storage, storage.num_bytes)
        for storage in taken:
            self._count(storage, 0)
            allocator.free(storage.block)

    def inside(self, func: OpOverload, args: Sequence[Any]) -> list[int]:
        """Sizes of the temporary tensors inside an operation, in bytes: a CPU that computes 16-bit products in float32
        converts the operands in blocks."""
        first = first_factor(func) if self.device.is_cpu else None
        if first is None or args[first].dtype not in self._converted:
            return []
        left, right = args[first : first + 2]
        return block_bytes(left, right if left.ndim == right.ndim else right[0])  # grouped: one group's matrix

    def tune(self, copied: Sequence[int] = ()) -> None:
        """Reserve the memory that the compiler uses on a GPU while it tunes a kernel at its first call: a buffer that
        clears the L2 cache, and copies of the tensors that the kernel writes over (`copied`, in bytes). It copies a
        tensor to the host instead if the copy would raise the peak so far; each version of the kernel that it tries
        raises that peak by the buffer. This memory is not part of `peak`, which is that of a later step."""
        if self.device.is_cpu:
            return
        allocator = self._allocators[self.stream]
        for _ in range(_TUNED_VERSIONS):
            budget = max(self._peak_bytes, self._tuning_peak_bytes) - self.live_bytes
            sizes = [self.device.l2_cache_bytes]
            for num_bytes in copied:
                if num_bytes <= budget:
                    budget -= num_bytes
                    sizes.append(num_bytes)
            self._tuning_peak_bytes = max(self._tuning_peak_bytes, self.live_bytes + sum(sizes))
            for block in [allocator.allocate(num_bytes) for num_bytes in sizes]:
                allocator.free(block)

    @property
    def reserved_bytes(self) -> int:
        """Memory taken from the driver so far; on a CPU the peak."""
        if self.device.is_cpu:
            return self.peak.total_bytes
        return sum(allocator.reserved_bytes for allocator in self._allocators.values())

    def pin(self, tensor: Tensor) -> None:
        """Count pinned host memory until it is freed."""
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self._pinned.pop, storage_key(storage))
        self._pinned[storage_key(storage)] = storage.nbytes()
        self.pinned_bytes = max(self.pinned_bytes, sum(self._pinned.values()))

    def enter(self, label: str, where: str) -> None:
        """Set the label of new storages that have no other, and how far the step is."""
        self.label, self.where = label, where

    @contextlib.contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Context manager in which memory is allocated for the named stream."""
        before, self.stream = self.stream, name
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def labelled(self, label: str, where: str = "") -> Iterator[None]:
        """Context manager that sets the label of new storages, and `where` (the label by default)."""
        before = self.label, self.where, self._label_is_set
        self.label, self.where, self._label_is_set = label, where or label, True
        try:
            yield
        finally:
            self.label, self.where, self._label_is_set = before


def num_bytes(tensor: Tensor) -> int:
    """The bytes of this rank's elements of a tensor."""
    return local(tensor).numel() * tensor.element_size()
