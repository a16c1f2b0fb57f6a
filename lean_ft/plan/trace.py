"""Counts the memory and estimates the time of PyTorch code that runs on shapes alone.

Under `FakeTensorMode` tensors have shapes, types and lifetimes but no contents, so a whole training step of any model
runs in seconds on any machine. `Trace` watches every operation: it counts the bytes of each storage from the operation
that makes it to the moment Python's and autograd's last reference is gone, which is when an allocator gets it back. Each
storage carries the label of what was going on when it was made; the sums by label at the peak say what the peak is of.

An operation's time is the longer of its arithmetic at the device's rate and its memory traffic at the device's bandwidth
(the roofline of Williams et al. 2009), plus a launch. It is good for comparing settings, not for promises.

What the tracer cannot see is what a kernel takes and gives back inside itself; the kernels here take little.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from lean_ft.plan.devices import Device


@dataclass
class Moment:
    """What was alive at one time: bytes by label, and where the step was."""

    where: str = ""
    bytes_by_label: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_label.values())


class Trace(TorchDispatchMode):
    """A dispatch mode that fills `peak`, `timeline` and `seconds`.

    `label` names what is made from now on; `where` says in words how far the step is.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.label = "other"
        self.where = ""
        self.live: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak = Moment()
        self.timeline: list[tuple[float, int, str]] = []  # (seconds, bytes alive, label)
        self.seconds = 0.0
        self.link_seconds = 0.0  # of copies to and from the host, which run beside the computation
        self.longest_document = 1
        self._peak_bytes = 0
        self._storages: dict[int, tuple[int, str]] = {}  # address -> (bytes, label)
        self._counting = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, or torch.compile would compile nothing while the mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._counting:
            self.note(result)
            if not func.is_view:
                self.charge(func, args, kwargs or {}, result)
        return result

    # Memory ---------------------------------------------------------------------------------------------------------

    def note(self, tensors: Any) -> None:
        """Counts the storages of `tensors` (any nesting) that are not counted yet, until each is freed."""
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor):
                self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, storage.nbytes()
        known = self._storages.get(address)
        if known is None:
            weakref.finalize(storage, self._free, address)
            self._count(address, num_bytes, self.label)
        elif known[0] != num_bytes:  # resized
            self._free(address)
            self._count(address, num_bytes, known[1])

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Counts the tensor's storage under another label from now on."""
        address = tensor.untyped_storage()._cdata
        if address in self._storages:
            num_bytes, _ = self._storages[address]
            self._free(address)
            self._count(address, num_bytes, label)

    def _count(self, address: int, num_bytes: int, label: str) -> None:
        self._storages[address] = num_bytes, label
        self.live[label] += num_bytes
        self.live_bytes += num_bytes
        if self.live_bytes > self._peak_bytes:
            self._peak_bytes = self.live_bytes
            self.peak = Moment(self.where, {key: count for key, count in self.live.items() if count})

    def _free(self, address: int) -> None:
        num_bytes, label = self._storages.pop(address, (0, ""))
        self.live[label] -= num_bytes
        self.live_bytes -= num_bytes

    # Time -----------------------------------------------------------------------------------------------------------

    def charge(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds the time of one operation."""
        moved = sum(_num_bytes(tensor) for tensor in tree_iter((args, result)) if isinstance(tensor, Tensor))
        self.spend(self._flops(func, args, kwargs, result), moved, _itemsize(result))

    def spend(self, flops: float, moved_bytes: float, itemsize: int = 2) -> None:
        """Adds the time of so much arithmetic and traffic in one kernel."""
        rate = self.device.flops_16bit if itemsize <= 2 else self.device.flops_32bit
        self.seconds += max(flops / rate, moved_bytes / self.device.bytes_per_second) + self.device.launch_seconds
        self.timeline.append((self.seconds, self.live_bytes, self.label))

    def travel(self, num_bytes: int) -> None:
        """Adds the time of a copy between the device and the host."""
        self.link_seconds += num_bytes / self.device.host_bytes_per_second

    def _flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        packet = func.overloadpacket
        name = str(packet)
        if name.startswith("lean_ft.document_attention"):
            backward = name.endswith("backward")
            query = args[2] if backward else args[0]  # (N, H, D)
            # Two products of N x L x D a head forward, five backward, half of each behind the causal diagonal.
            return (5 if backward else 2) * query.numel() * self.longest_document
        count = flop_registry.get(packet)
        return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Operations inside neither take memory nor time; `note` and `spend` still count what they are told."""
        counting, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = counting

    @contextlib.contextmanager
    def labelled(self, label: str, where: str = "") -> Iterator[None]:
        """What is made inside carries `label`."""
        before = self.label, self.where
        self.label, self.where = label, where or label
        try:
            yield
        finally:
            self.label, self.where = before


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _itemsize(result: Any) -> int:
    first = next((tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)), None)
    return 2 if first is None else first.element_size()
