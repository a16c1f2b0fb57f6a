"""Activation offload: keep the activations that layers save for backward in pinned host memory.

Every tensor that autograd saves during the model's forward pass is copied to the host while the computation continues,
and copied back shortly before backward needs it, last saved first. Copies overlap with the backward pass of later
layers, so they cost time only if the link is slower than the computation. With full activation checkpointing, one
hidden state per layer is offloaded.

Not offloaded: parameters and buffers; tensors under 1 MiB, which are not worth a copy; and the output layer, whose loss
computes its gradients in the forward pass and keeps no activations.

Source: PyTorch's saved-tensor hooks; torchtune's activation offloading, which fetches each tensor only on demand.
"""

from types import MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lean_ft.system.host_link import HostLink, Sent, open_link
from lean_ft.system.passes import is_first_pass
from lean_ft.torch_private import storage_key, version_of

SMALLEST_BYTES = 2**20
# Prefetched for backward, at least one tensor. A layer's backward pass takes longer than the copy of its input.
AHEAD_BYTES = 2**25


def offload_activations(model: nn.Module) -> None:
    """Offload what `model`'s forward pass saves for backward. Raises ValueError if the model is not on a CUDA
    device."""
    device = next(model.parameters()).device
    offload_to(model, open_link(device, "memory.activation_offload=true", "memory.activation_offload=false"))


def offload_to(model: nn.Module, link: HostLink) -> "Offloaded":
    offloaded = Offloaded(link, model)
    forward = model.forward  # bound; another technique may have edited it

    def offloading(_: nn.Module, *args: object, **kwargs: object) -> Any:
        if not torch.is_grad_enabled() or is_first_pass():
            return forward(*args, **kwargs)
        offloaded.begin()
        # Outside of compiled layers, so that the hooks see what these save.
        with saved_tensors_hooks(offloaded.pack, offloaded.unpack):
            return forward(*args, **kwargs)

    model.forward = MethodType(offloading, model)
    return offloaded


class Offloaded:
    """Offloaded tensors, in the order in which they were saved."""

    def __init__(
        self, link: HostLink, model: nn.Module, smallest_bytes: int = SMALLEST_BYTES, ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        self._link = link
        # Quantized weights are buffers.
        self._of_model = {storage_key(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
        self._smallest_bytes, self._ahead_bytes = smallest_bytes, ahead_bytes
        self._order: list[ReferenceType[Sent]] = []  # owned by autograd, which drops them with the graph
        self._places: dict[int, int] = {}  # id of a Sent -> its place in the order
        # Saved by several layers, as rotary angles are: stay on the device.
        self._shared: list[ReferenceType[Sent]] = []
        self._came: set[int] = set()  # places that backward has reached

    @property
    def num_away(self) -> int:
        """Number of offloaded tensors that autograd still holds."""
        return sum(sent() is not None for sent in self._order)

    def begin(self) -> None:
        """Start a forward pass; forget the tensors of earlier ones if autograd has dropped them all."""
        self._link.let_all_go()
        if self._order and self.num_away == 0:
            self._link.forget_arrivals()
            self._order.clear()
            self._places.clear()
            self._shared.clear()
            self._came.clear()

    def pack(self, tensor: Tensor) -> Tensor | Sent:
        # Detached: an operation that saves its own result would otherwise keep its graph alive in a cycle.
        tensor = tensor.detach()
        if (
            tensor.nbytes < self._smallest_bytes
            or storage_key(tensor.untyped_storage()) in self._of_model
            or tensor.untyped_storage().nbytes() < tensor.nbytes  # expanded: it is smaller than it looks
        ):
            return tensor
        if (packed := self._known(tensor)) is not None:
            return packed
        sent = self._link.send(tensor)
        self._places[id(sent)] = len(self._order)
        self._order.append(ref(sent))
        return sent

    def _known(self, tensor: Tensor) -> Sent | None:
        """The earlier copy of the same tensor, which then stays on the device because several layers need it."""
        for references in (self._shared, self._order[-4:]):
            for reference in reversed(references):
                sent = reference()
                if sent is None or sent.source is None:  # freed on the device; its memory may be reused
                    continue
                if sent.version == version_of(tensor) and _same_memory(sent.source, tensor):
                    if references is not self._shared:
                        self._link.keep(sent)
                        self._shared.append(reference)
                    return sent
        return None

    def unpack(self, packed: Tensor | Sent) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = self._link.fetch(packed)
        if any(shared() is packed for shared in self._shared):
            return tensor  # its place is that of the first layer, not where backward is
        self._link.let_go_of(packed)  # backward is its last use
        ahead_bytes, place = 0, self._places[id(packed)]
        self._came.add(place)
        while place > 0 and ahead_bytes < self._ahead_bytes:
            place -= 1
            if place not in self._came and (sent := self._order[place]()) is not None:
                self._link.prefetch(sent)
                ahead_bytes += sent.host.nbytes
        return tensor


def _same_memory(a: Tensor, b: Tensor) -> bool:
    same_memory = storage_key(a.untyped_storage()) == storage_key(b.untyped_storage())
    same_start = same_memory and a.storage_offset() == b.storage_offset()
    return same_start and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
