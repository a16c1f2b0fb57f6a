"""Optimizer state in pinned host memory, copied to the GPU before the update that needs it, and back.

Each parameter's state is read and written once per step. While one parameter is updated, the states of the next ones
are copied in, in the order of the previous step, and those of the previous ones are copied out. If a rule updates
elements independently, a large parameter such as an embedding is updated in parts. A few hundred MiB of state are on
the device, whatever the model's size. With 8-bit AdamW, 2 bytes per parameter are copied each way; a 25 GB/s link moves
3 billion of them in 0.5 s, during a backward pass that takes longer. Small states (norms, biases) stay on the device.

Source: our own. ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) also keeps state on the host, but updates there, where
arithmetic is slower.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lean_ft.optim.rule import ParameterState
from lean_ft.system.host_link import IN_FLIGHT_BYTES, HostLink, Sent, open_link

SMALLEST_BYTES = 2**16
PART_BYTES = IN_FLIGHT_BYTES // 4  # state per update of a large parameter

_Place = tuple[int, int]  # index of a parameter, number of its part


class StreamedState:
    """The large state tensors of an optimizer, in host memory."""

    def __init__(
        self,
        link: HostLink,
        *,
        smallest_bytes: int = SMALLEST_BYTES,
        ahead_bytes: int = IN_FLIGHT_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._link = link
        self._smallest_bytes, self._ahead_bytes, self._part_bytes = smallest_bytes, ahead_bytes, part_bytes
        self._sent: dict[_Place, dict[str, Sent]] = {}  # state on the host
        self._following: dict[_Place, _Place] = {}  # each update's next one in the previous step
        self._last: _Place | None = None  # latest update of this step
        self._step_number = 0

    def init_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._link.host_copy(tensor) if tensor.nbytes >= self._smallest_bytes else tensor
            for name, tensor in tensors.items()
        }

    def on_device(self, state: ParameterState, step_number: int) -> Iterator[ParameterState]:
        """Yield the state on the device, one part of the parameter at a time; copy each part back after its update."""
        if step_number != self._step_number:
            # Do not prefetch across steps: the state would stay on the device during the forward pass.
            self._step_number, self._last = step_number, None
        names = [name for name, tensor in state.tensors.items() if tensor.nbytes >= self._smallest_bytes]
        for number, part in enumerate(self._parts(state, names)):
            place = state.index, number
            away = self._sent.setdefault(place, {name: Sent(part.tensors[name]) for name in names})
            tensors = {**part.tensors, **{name: self._link.fetch(sent) for name, sent in away.items()}}
            self._prefetch_after(place)
            yield replace(part, tensors=tensors)
            # If the next update writes while this copy still reads, the host gets a mixture. The copy after that update
            # is later on the same stream and overwrites it, and nothing reads the host's state in between.
            for name in away:
                away[name] = self._link.send(tensors[name], part.tensors[name])

    def _parts(self, state: ParameterState, names: list[str]) -> list[ParameterState]:
        """Views of the parameter's rows with their state; one part if the state is small or the rule needs all of
        it."""
        param, together = state.param, state.rule.updated_together
        state_bytes = sum(state.tensors[name].nbytes for name in names)
        if together is None or state_bytes < 2 * self._part_bytes or param.ndim == 0:
            return [state]
        row = param.numel() // len(param)
        # Each part must have whole groups of elements that are updated together.
        step = together // math.gcd(row, together)
        rows = -(-len(param) * self._part_bytes // state_bytes)
        rows = -(-rows // step) * step
        grad, filled_up = state.grad, -(-param.numel() // together) * together
        parts = []
        for start in range(0, len(param), rows):
            of_rows = slice(start, start + rows)
            part = nn.Parameter(param.detach()[of_rows], requires_grad=False)
            part.grad = grad[of_rows]
            tensors = {}
            for name, tensor in state.tensors.items():
                entries = of_rows
                if tensor.shape != param.shape:  # one entry for several elements
                    span = filled_up // len(tensor)
                    entries = slice(start * row // span, min(len(tensor), (start + rows) * row // span))
                tensors[name] = tensor[entries]
            parts.append(replace(state, whole=part, tensors=tensors))
        return parts

    def settle(self) -> None:
        """Wait until the host may read all state."""
        self._link.synchronize()

    def forget(self) -> None:
        """Wait until the host may overwrite all state, and drop prefetched copies."""
        self._link.synchronize()
        self._link.forget_arrivals()
        self._sent.clear()

    def _prefetch_after(self, place: _Place) -> None:
        """Start copying the states of the next updates, in the previous step's order."""
        if self._last is not None:
            self._following[self._last] = place
        self._last = place
        ahead_bytes, seen = 0, {place}
        while ahead_bytes < self._ahead_bytes and (place := self._following.get(place, place)) not in seen:
            seen.add(place)
            for sent in self._sent.get(place, {}).values():
                self._link.prefetch(sent)
                ahead_bytes += sent.host.nbytes


def stream_state(device: torch.device) -> StreamedState:
    """State in pinned host memory. Raises ValueError if the device has no memory of its own."""
    return StreamedState(open_link(device, "optimizer.state=streamed", "optimizer.state=device"))
