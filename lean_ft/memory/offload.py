"""Activation offload: what layers keep for backward waits in pinned host memory.

Every tensor that autograd saves during the model's forward pass is sent to the host while the computation goes on, and
is fetched back shortly before backward comes to it, last saved first. Fetching ahead is what makes it cheap: the copies
run beside the backward pass of later layers, and only a link slower than the computation shows. With full activation
checkpointing what is kept, and travels, is one hidden state a layer.

Left on the device: parameters and buffers, which are there anyway; tensors under 1 MiB, whose copies cost more than they
free; and the output layer, whose loss makes its gradients in the forward pass and keeps no activations.

Source: PyTorch's saved-tensor hooks; torchtune's activation offloading, which has the side stream but fetches each
tensor when it is asked for.
"""

from types import MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lean_ft.system.host_link import IN_FLIGHT_BYTES, HostLink, Sent, open_link
from lean_ft.torch_private import storage_key, version_of

SMALLEST_BYTES = 2**20
AHEAD_BYTES = IN_FLIGHT_BYTES  # fetched before backward asks for it


def offload_activations(model: nn.Module) -> None:
    """Keeps in host memory what `model`'s forward pass saves for backward.

    Raises:
        ValueError: when the model is not on a CUDA device, or has no `layers`.
    """
    device = next(model.parameters()).device
    if not isinstance(getattr(model, "layers", None), nn.ModuleList):
        raise ValueError(f"offload_activations expects a model with `layers`, but got {type(model).__name__}")
    offload_to(model, open_link(device, "memory.activation_offload=true", "memory.activation_offload=false"))


def offload_to(model: nn.Module, link: HostLink) -> "Offloaded":
    """The same over a given link."""
    offloaded = Offloaded(link, model)
    forward = model.forward  # bound, and perhaps edited by another technique already

    def offloading(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        offloaded.begin()
        # Outside of what is compiled: the hooks then see what a compiled layer saves.
        with saved_tensors_hooks(offloaded.pack, offloaded.unpack):
            return forward(*args, **kwargs)

    model.forward = MethodType(offloading, model)
    return offloaded


class Offloaded:
    """The tensors that are away, in the order in which they were saved."""

    def __init__(
        self,
        link: HostLink,
        model: nn.Module,
        smallest_bytes: int = SMALLEST_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._link = link
        # Quantised weights are buffers.
        self._of_model = {storage_key(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
        self._smallest_bytes, self._ahead_bytes = smallest_bytes, ahead_bytes
        self._order: list[ReferenceType[Sent]] = []  # autograd owns them: a graph that is dropped drops them
        self._places: dict[int, int] = {}  # id of a Sent -> its place in the order
        # Saved by several layers, as rotary angles are: kept on the device.
        self._shared: list[ReferenceType[Sent]] = []
        self._came: set[int] = set()  # places that backward has asked for

    @property
    def num_away(self) -> int:
        """How many tensors autograd still holds that are away."""
        return sum(sent() is not None for sent in self._order)

    def begin(self) -> None:
        """A forward pass begins: forgets what earlier ones saved, if autograd has dropped all of it."""
        self._link.let_all_go()
        if self._order and self.num_away == 0:
            self._link.forget_arrivals()
            self._order.clear()
            self._places.clear()
            self._shared.clear()
            self._came.clear()

    def pack(self, tensor: Tensor) -> Tensor | Sent:
        # Without its history: an operation that saves its own result would keep its whole graph alive in a circle.
        tensor = tensor.detach()
        if (
            tensor.nbytes < self._smallest_bytes
            or storage_key(tensor.untyped_storage()) in self._of_model
            or tensor.untyped_storage().nbytes() < tensor.nbytes  # expanded: it is smaller than it looks
        ):
            return tensor
        if (known := self._known(tensor)) is not None:
            return known
        sent = self._link.send(tensor)
        self._places[id(sent)] = len(self._order)
        self._order.append(ref(sent))
        return sent

    def _known(self, tensor: Tensor) -> Sent | None:
        """What was sent already of the same tensor, which then stays on the device: layer after layer asks for it."""
        for references in (self._shared, self._order[-4:]):
            for reference in reversed(references):
                sent = reference()
                if sent is None or sent.source is None:  # gone from the device: its memory may be another's
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
            return tensor  # its place, that of the first layer, says nothing of where backward is
        self._link.let_go_of(packed)  # backward has it now, and is the last to need it
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
