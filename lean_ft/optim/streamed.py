"""Optimizer state in pinned host memory, which travels to the GPU ahead of the update that needs it, and back.

State is read and written once a step, each parameter's at one moment. So it lives on the host; while one parameter is
updated, the states of the next ones are on their way, in the order of the last step (backward's, where the update is
made there), and those of the last ones on their way back. A large parameter, an embedding say, whose elements a rule
updates independently of one another is updated in parts, which follow one another as parameters do. What is on the
device is a few hundred MiB, whatever the model. With 8-bit AdamW 2 bytes a parameter travel each way; a link of 25 GB/s
moves 3 billion of them in half a second, beside a backward pass that takes longer.

Small states stay on the device: norms and biases are not worth a copy.

Source: our own; the idea of states on the host is ZeRO-Offload's (Ren et al. 2021, arXiv:2101.06840), which updates
there, and is bound by the host's arithmetic.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lean_ft.optim.rule import ParameterState
from lean_ft.system.host_link import IN_FLIGHT_BYTES, HostLink, Sent, open_link

SMALLEST_BYTES = 2**16
PART_BYTES = IN_FLIGHT_BYTES // 4  # of state that is updated at a time, where a parameter's may be cut

_Place = tuple[int, int]  # a parameter's index, and which of its parts


class StreamedState:
    """The large state tensors of an optimizer, on the host."""

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
        self._sent: dict[_Place, dict[str, Sent]] = {}  # the state that lives on the host
        self._following: dict[_Place, _Place] = {}  # whose update came after whose, in the last step
        self._last: _Place | None = None  # updated in this step
        self._step_number = 0

    def init_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A parameter's tensors, the large ones on the host."""
        return {
            name: self._link.host_copy(tensor) if tensor.nbytes >= self._smallest_bytes else tensor
            for name, tensor in tensors.items()
        }

    def on_device(self, state: ParameterState, step_number: int) -> Iterator[ParameterState]:
        """The state as an update takes it, a part of the parameter after another; after its update each goes home."""
        if step_number != self._step_number:
            # No update of the next step follows one of this: its state would be on the device all through forward.
            self._step_number, self._last = step_number, None
        names = [name for name, tensor in state.tensors.items() if tensor.nbytes >= self._smallest_bytes]
        for number, part in enumerate(self._parts(state, names)):
            place = state.index, number
            away = self._sent.setdefault(place, {name: Sent(part.tensors[name]) for name in names})
            tensors = {**part.tensors, **{name: self._link.fetch(sent) for name, sent in away.items()}}
            self._prefetch_after(place)
            yield replace(part, tensors=tensors)
            # A copy out that still reads memory when the next update writes to it brings a mixture home, but the copy
            # after that update comes later on the same stream, and nobody reads the host's state in between.
            for name in away:
                away[name] = self._link.send(tensors[name], part.tensors[name])

    def _parts(self, state: ParameterState, names: list[str]) -> list[ParameterState]:
        """The parameter whole, or where the state of these names is large and the rule allows it rows of it; all views."""
        param, together = state.param, state.rule.updated_together
        state_bytes = sum(state.tensors[name].nbytes for name in names)
        if together is None or state_bytes < 2 * self._part_bytes or param.ndim == 0:
            return [state]
        row = param.numel() // len(param)
        # Rows that are whole blocks of what is updated together.
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
                if tensor.shape != param.shape:  # entries for several elements each, in their order
                    span = filled_up // len(tensor)
                    entries = slice(start * row // span, min(len(tensor), (start + rows) * row // span))
                tensors[name] = tensor[entries]
            parts.append(replace(state, whole=part, tensors=tensors))
        return parts

    def settle(self) -> None:
        """Returns when the host may read all state."""
        self._link.synchronize()

    def forget(self) -> None:
        """Returns when the host may write all state, in place: no copy of it comes after, and none made ahead is used."""
        self._link.synchronize()
        self._link.forget_arrivals()
        self._sent.clear()

    def _prefetch_after(self, place: _Place) -> None:
        """Starts the copies of the next updates' states, as they followed one another in the last step."""
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
    """A place for state in pinned host memory.

    Raises:
        ValueError: where there is no other memory to keep state in.
    """
    return StreamedState(open_link(device, "optimizer.state=streamed", "optimizer.state=device"))
