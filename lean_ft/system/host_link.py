"""Copies between a GPU and pinned host memory, beside the computation: what offload and streaming are made of.

The copies run on a stream of their own and the host waits for none of them. Two rules keep them right. A copy starts
only when the computation queued so far has run, for that wrote what is sent, or last used the memory that is fetched
to. And memory that a copy reads is kept until the computing stream has been told to wait for that copy: after that the
allocator may hand it out again, in the order of the computing stream.

What is larger than all that may be in flight is waited for at once, by the computing stream: it was sent so that its
memory is free for what comes next. What has time is sent in parts (`lean_ft.optim.streamed`).

Pinned memory is taken in the sizes that are asked for. PyTorch's own allocator rounds up to powers of two, which for
the states and activations of a 3 B model is 11.4 GiB in place of 8.1.

What comes back lies in memory that the allocator keeps for the copies' stream, apart from the computation's: pieces of other
sizes, come and gone between its tensors, would leave holes that none of them fits into. The next to have such memory is
again a copy back, which the first rule keeps behind all that the computation did with it. What is larger than all that may be
in flight comes alone, and takes the place of what the computation has let go of.

Source: PyTorch's CUDA semantics on streams and pinned buffers. Left out: `record_stream`, which postpones the reuse of
memory to a moment that no one can predict.
"""

import ctypes
import itertools
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from lean_ft.system.shapes_only import stage
from lean_ft.torch_private import version_of

IN_FLIGHT_BYTES = 128 * 2**20  # most that is kept on the device only because a copy still reads it


class Sent:
    """A tensor that went to the host: its copy there, and a copy on the way back if one is."""

    __slots__ = ("__weakref__", "arrival", "host", "source", "version")

    def __init__(self, host: Tensor, source: Tensor | None = None) -> None:
        self.host = host
        self.source = source  # while it is still on the device; one that never was has been on the host all along
        self.version = None if source is None else version_of(source)  # when it was sent
        self.arrival: int | None = None  # the number of its copy back, if one has begun


# Private to the process, where the system knows the difference.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class PinnedMemory:
    """Host memory that a GPU copies to and from, in blocks of the sizes asked for, and the free ones kept for later.

    A block that is free again may be read or written by copies still under way: whoever has it next uses it in copies
    of the same stream, or waits for that one.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        weakref.finalize(self, _unpin, self._free, 0).atexit = False

    def empty_like(self, tensor: Tensor, *, new: bool = False) -> Tensor:
        """An uninitialised tensor like this one, whose block is free again when nothing holds its memory; a `new` block
        is one that no copy knows.

        Before a block is added, free ones that are too small go back to the system, for which the host waits: what is
        pinned stays near the most that was in use at once. Raises RuntimeError where the system pins no more.
        """
        if tensor.nbytes == 0:
            return torch.empty_like(tensor, device="cpu")
        fitting = [] if new else [free for free in self._free if len(free) >= tensor.nbytes]
        block = min(fitting, key=len, default=None)
        if block is not None:
            self._free.remove(block)
        else:
            _unpin(self._free, max(0, sum(map(len, self._free)) - tensor.nbytes))
            block = _pin(tensor.nbytes)
        memory = (ctypes.c_byte * tensor.nbytes).from_buffer(block)
        weakref.finalize(memory, _give_back, weakref.ref(self), block).atexit = False
        strides = torch.empty_like(tensor, device="meta").stride()
        return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).as_strided(tensor.shape, strides)


def _give_back(owner: "weakref.ref[PinnedMemory]", block: mmap.mmap) -> None:
    if (memory := owner()) is not None:
        memory._free.append(block)
    else:
        _unpin([block], 0)


def _pin(num_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, num_bytes, **_PRIVATE)
    if hasattr(mmap, "MADV_DONTFORK"):  # shared with a fork, a page that is written would move, and the GPU not know
        block.madvise(mmap.MADV_DONTFORK)
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(_address(block), num_bytes, 1)  # 1: for every context
    if error != runtime.cudaError.success:
        raise RuntimeError(
            f"the system did not pin {num_bytes:,} bytes of host memory ({error}), where optimizer.state=streamed, "
            "memory.activation_offload=true and memory.tied_gradient=host keep what is not on the GPU. Free memory of the "
            "host, raise the limit of locked memory (`ulimit -l`), or leave one of them out."
        )
    return block


def _unpin(blocks: list[mmap.mmap], kept_bytes: int) -> None:
    """Gives the smallest blocks back to the system until no more than so many bytes are left."""
    if sum(map(len, blocks)) > kept_bytes:
        torch.cuda.synchronize()  # copies may use them still
    blocks.sort(key=len, reverse=True)
    while sum(map(len, blocks)) > kept_bytes:
        block = blocks.pop()
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(_address(block))  # and with the last reference to it the block is gone


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_byte.from_buffer(block))


class HostLink:
    """Sends tensors of one CUDA device to pinned host memory and fetches them back, without waiting."""

    def __init__(self, device: torch.device, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self.device = device
        self._in_flight_bytes = in_flight_bytes
        self._leaving: dict[Sent, Any] = {}  # in the order of sending, with the event that ends each copy
        self._leaving_bytes = 0
        # By number, the memory that copies write to and the event that ends each: kept, though no one may come for it.
        self._arriving: dict[int, tuple[Tensor, Any]] = {}
        self._numbers = itertools.count()
        self._open()

    def _open(self) -> None:
        self._stream = torch.cuda.Stream(self.device)
        self._pinned = PinnedMemory()

    def send(self, tensor: Tensor, host: Tensor | None = None) -> Sent:
        """Starts a copy to `host`, or to new pinned memory; the caller may drop the tensor at once."""
        if host is None:
            host = self._host_memory(tensor)
        sent = Sent(host, tensor)
        self._leaving[sent] = self._copy(tensor, host)
        self._leaving_bytes += tensor.nbytes
        while self._leaving_bytes > self._in_flight_bytes:
            self.let_go_of(next(iter(self._leaving)))
        return sent

    def host_copy(self, tensor: Tensor) -> Tensor:
        """A copy in pinned host memory, done when this returns."""
        return self._host_memory(tensor, new=True).copy_(tensor)

    def bring_back(self, host: Tensor) -> Tensor:
        """The tensor on the device, in the computation's own memory and order, as nothing is computed beside the copy."""
        return torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)

    def prefetch(self, sent: Sent) -> None:
        """Starts the copy back, unless the tensor is on the device still or again."""
        if sent.source is None and sent.arrival is None:
            value = self._device_memory(sent.host)
            sent.arrival = next(self._numbers)
            self._arriving[sent.arrival] = value, self._copy(sent.host, value)

    def fetch(self, sent: Sent) -> Tensor:
        """The tensor on the device, for computation queued from now on; a later call fetches it anew."""
        if sent.source is not None:
            if version_of(sent.source) != sent.version:
                raise RuntimeError("a tensor was changed in place while backward, or its copy on the host, needed it")
            return sent.source
        self.prefetch(sent)
        assert sent.arrival is not None
        value, arrived = self._arriving.pop(sent.arrival)
        self._wait(arrived)
        sent.arrival = None
        return value

    def keep(self, sent: Sent) -> None:
        """Keeps what still is on the device there, for as long as there is a `Sent` for it."""
        if sent in self._leaving:
            assert sent.source is not None
            self._wait(self._leaving.pop(sent))
            self._leaving_bytes -= sent.source.nbytes

    def let_go_of(self, sent: Sent) -> None:
        """Keeps what was sent on the device no longer; a later `fetch` brings it back."""
        if sent in self._leaving:
            self.keep(sent)
            sent.source = None

    def let_all_go(self) -> None:
        """Has the computing stream wait for all that was sent, and keeps none of it on the device."""
        while self._leaving:
            self.let_go_of(next(iter(self._leaving)))

    def forget_arrivals(self) -> None:
        """Gives up what was prefetched and that no one will come for: its owners are gone."""
        for value, arrived in self._arriving.values():
            if not self._lies_apart(value):
                self._wait(arrived)
        self._arriving.clear()

    def synchronize(self) -> None:
        """The host waits until all copies that were begun are done, and may then use its memory."""
        self.let_all_go()
        self._finish()

    # What a device does, and a test without one stands in for ------------------------------------------------------

    def _host_memory(self, like: Tensor, *, new: bool = False) -> Tensor:
        return self._pinned.empty_like(like, new=new)

    def _lies_apart(self, value: Tensor) -> bool:
        """Whether what comes back so large has memory of the copies' stream."""
        return value.nbytes <= self._in_flight_bytes

    def _device_memory(self, like: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream if self._lies_apart(like) else None):
            return torch.empty_like(like, device=self.device)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Starts a copy after what the computing stream has queued; returns the event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _finish(self) -> None:
        self._stream.synchronize()

    def _wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


def open_link(device: torch.device, setting: str, instead: str) -> HostLink:
    """The link of a CUDA device, for the technique that `setting` asks for.

    Raises:
        ValueError: where there is no other memory to send anything to; `instead` is the setting to take there.
    """
    if (watcher := stage()) is not None and watcher.device_type == "cuda":
        return watcher.open_link()
    if device.type != "cuda":
        raise ValueError(
            f"{setting} moves what it is about from the GPU's memory to the host's, but the model is on {device.type}: "
            f"it is in the host's memory already. Set {instead}."
        )
    return HostLink(device)
