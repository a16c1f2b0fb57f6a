"""Asynchronous copies between a GPU and pinned host memory, for offloading and streaming.

Copies run on their own stream, and the host never waits for them. Two rules keep them correct. A copy starts only after
the computation queued so far, which wrote the data to send or last used the memory to fetch into. And memory that a
copy reads is kept until the compute stream has been told to wait for that copy: from then on the allocator may reuse
it, in the order of the compute stream.

For a tensor larger than the limit of bytes in flight, the compute stream waits at once, since the tensor was sent to
free its memory for the next computation. Tensors that need not be freed at once are sent in parts
(`lean_ft.optim.streamed`).

Pinned memory is allocated in the requested sizes. PyTorch's allocator rounds up to powers of two, which for the
optimizer states and activations of a 3B model takes 11.4 GiB instead of 8.1.

Tensors that come back use memory that the allocator keeps for the copy stream, separate from the computation's: pieces
of other sizes, freed between its tensors, would fragment its memory. The next user of such memory is again a copy back,
which the first rule delays until the computation has used the old data. A tensor larger than the limit of bytes in
flight comes alone, and uses memory that the computation has freed.

Source: PyTorch's CUDA semantics on streams and pinned buffers. Left out: `record_stream`, which delays the reuse of
memory to an unpredictable time.
"""

import ctypes
import itertools
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lean_ft.system.world import world
from lean_ft.torch_private import version_of

IN_FLIGHT_BYTES = 128 * 2**20  # limit of memory kept on the device only because a copy still reads it


class Sent:
    """A tensor that was sent to the host: its copy there, and the copy back if it has started."""

    __slots__ = ("__weakref__", "arrival", "host", "source", "version")

    def __init__(self, host: Tensor, source: Tensor | None = None) -> None:
        self.host = host
        self.source = source  # while it is still on the device; None for a tensor that started on the host
        self.version = None if source is None else version_of(source)  # at the time of sending
        self.arrival: int | None = None  # the number of its copy back, if that has started


# Private to the process, on systems that support this
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class PinnedMemory:
    """Pinned host memory in blocks of the requested sizes. Free blocks are kept for reuse.

    Copies in flight may still read or write a freed block: its next user must use it in copies of the same stream, or
    wait for that stream.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        weakref.finalize(self, _unpin, self._free, 0).atexit = False

    def empty_like(self, tensor: Tensor, *, new: bool = False) -> Tensor:
        """Return an uninitialized tensor like this one. Its block is freed when nothing references its memory; a `new`
        block was never used by a copy.

        Before a block is added, free blocks that are too small are returned to the system, for which the host waits. So
        pinned memory stays near the peak use. Raises RuntimeError if the system cannot pin more.
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
    if hasattr(mmap, "MADV_DONTFORK"):  # a fork would make written pages move without the GPU's knowledge
        block.madvise(mmap.MADV_DONTFORK)
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(_address(block), num_bytes, 1)  # 1: portable, for all contexts
    if error != runtime.cudaError.success:
        raise RuntimeError(
            f"cannot pin {num_bytes:,} bytes of host memory ({error}), which optimizer.state=streamed, "
            "memory.activation_offload=true, memory.tied_gradient=host, memory.frozen_embeddings=host and "
            "memory.experts=streamed need. Free host memory, raise the limit of locked memory (`ulimit -l`), or unset "
            "one of these settings."
        )
    return block


def _unpin(blocks: list[mmap.mmap], kept_bytes: int) -> None:
    """Return the smallest blocks to the system until at most `kept_bytes` are left."""
    if sum(map(len, blocks)) > kept_bytes:
        torch.cuda.synchronize()  # copies may still use them
    blocks.sort(key=len, reverse=True)
    while sum(map(len, blocks)) > kept_bytes:
        block = blocks.pop()
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(_address(block))  # the last reference frees the block


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_byte.from_buffer(block))


class _PinnedBytes:
    """A contiguous pinned tensor in the form in which torch takes memory that a GPU can read; torch then keeps it
    alive."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        memory = {"data": (host.data_ptr(), False), "shape": (host.nbytes,), "typestr": "|u1"}
        self.__cuda_array_interface__ = {**memory, "strides": None, "version": 3}


class HostLink:
    """Sends tensors of one CUDA device to pinned host memory and fetches them back, asynchronously."""

    def __init__(self, device: torch.device, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self.device = device
        self._in_flight_bytes = in_flight_bytes
        self._leaving: dict[Sent, Any] = {}  # in sending order, with the event at the end of each copy
        self._leaving_bytes = 0
        # By number: the memory that a copy writes to, and the event at its end. Kept even if nobody fetches it.
        self._arriving: dict[int, tuple[Tensor, Any]] = {}
        self._numbers = itertools.count()
        self._open()

    def _open(self) -> None:
        self._stream = torch.cuda.Stream(self.device)
        self._pinned = PinnedMemory()

    def send(self, tensor: Tensor, host: Tensor | None = None) -> Sent:
        """Start a copy to `host`, or to new pinned memory. The caller may drop the tensor at once."""
        if host is None:
            host = self._host_memory(tensor)
        sent = Sent(host, tensor)
        self._leaving[sent] = self._copy(tensor, host)
        self._leaving_bytes += tensor.nbytes
        while self._leaving_bytes > self._in_flight_bytes:
            self.let_go_of(next(iter(self._leaving)))
        return sent

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy in pinned host memory, which is complete on return."""
        return self._host_memory(tensor, new=True).copy_(tensor)

    def keep_on_host(self, weight: Tensor) -> Sent:
        """Move a frozen weight to pinned host memory, which kernels then read over the link. Does not move it again."""
        if (host := getattr(weight, "host", None)) is None:
            host = self.host_copy(weight.detach())
            weight.data = self.seen_from_device(host)
            weight.host = host  # pyright: ignore[reportAttributeAccessIssue]
        return Sent(host)

    def weight_on_host(self, empty: Tensor, fill: Callable[[Tensor], object]) -> torch.nn.Parameter:
        """Return a weight like `empty` of any device, filled in pinned host memory."""
        host = self._host_memory(empty.detach(), new=True)
        fill(host)
        weight = torch.nn.Parameter(self.seen_from_device(host), requires_grad=empty.requires_grad)
        weight.host = host  # pyright: ignore[reportAttributeAccessIssue]
        return weight

    def bring_back(self, host: Tensor) -> Tensor:
        """Return the tensor on the device, copied on the compute stream, for use when nothing else is computed."""
        return torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)

    def seen_from_device(self, host: Tensor) -> Tensor:
        """Return a tensor of the device on the memory of a pinned host tensor, which kernels read over the link."""
        return torch.as_tensor(_PinnedBytes(host), device=self.device).view(host.dtype).view(host.shape)

    def prefetch(self, sent: Sent) -> None:
        """Start the copy back, unless the tensor is still or again on the device."""
        if sent.source is None and sent.arrival is None:
            value = self._device_memory(sent.host)
            sent.arrival = next(self._numbers)
            self._arriving[sent.arrival] = value, self._copy(sent.host, value)

    def fetch(self, sent: Sent) -> Tensor:
        """Return the tensor on the device, for computation queued from now on. A later call fetches it again."""
        if sent.source is not None:
            if version_of(sent.source) != sent.version:
                raise RuntimeError(
                    "a tensor was modified in place while backward or its copy to the host still needed it"
                )
            return sent.source
        self.prefetch(sent)
        assert sent.arrival is not None
        value, arrived = self._arriving.pop(sent.arrival)
        self._wait(arrived)
        sent.arrival = None
        return value

    def keep(self, sent: Sent) -> None:
        """Keep a tensor that is still on the device there, as long as its `Sent` exists."""
        if sent in self._leaving:
            assert sent.source is not None
            self._wait(self._leaving.pop(sent))
            self._leaving_bytes -= sent.source.nbytes

    def let_go_of(self, sent: Sent) -> None:
        """Free the tensor's memory on the device; a later `fetch` copies it back."""
        if sent in self._leaving:
            self.keep(sent)
            sent.source = None

    def let_all_go(self) -> None:
        """Make the compute stream wait for all copies to the host, and free the tensors' memory on the device."""
        while self._leaving:
            self.let_go_of(next(iter(self._leaving)))

    def forget_arrivals(self) -> None:
        """Drop prefetched tensors that nobody will fetch, since their owners are gone."""
        for value, arrived in self._arriving.values():
            if not self._lies_apart(value):
                self._wait(arrived)
        self._arriving.clear()

    def synchronize(self) -> None:
        """Make the host wait until all copies are complete; it may then use its memory."""
        self.let_all_go()
        self._finish()

    # Operations of the device, which tests without a GPU replace ---------------------------------------------------

    def _host_memory(self, like: Tensor, *, new: bool = False) -> Tensor:
        return self._pinned.empty_like(like, new=new)

    def _lies_apart(self, value: Tensor) -> bool:
        """Whether a tensor of this size comes back into the copy stream's memory."""
        return value.nbytes <= self._in_flight_bytes

    def _device_memory(self, like: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream if self._lies_apart(like) else None):
            return torch.empty_like(like, device=self.device)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Start a copy after all work queued on the compute stream, and return the event at its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _finish(self) -> None:
        self._stream.synchronize()

    def _wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


def open_link(device: torch.device, setting: str, instead: str) -> HostLink:
    """Return a link for a CUDA device.

    Raises ValueError on other devices, which have no separate memory, with the `setting` that needs the link and the
    one to use `instead`.
    """
    here = world()
    if here.device_type(device) != "cuda":
        raise ValueError(
            f"{setting} moves tensors from GPU memory to host memory, but the model is on {device.type}, which already "
            f"uses host memory. Set {instead}."
        )
    return here.link(lambda: HostLink(device))
