"""Optimizer state in pinned host memory, which travels to the GPU ahead of the update that needs it, and back.

State is read and written once a step, each parameter's at one moment. So it lives on the host; while one parameter is
updated, the states of the next ones are on their way, in the order of the last step (backward's, where the update is
made there), and those of the last ones on their way back. What is on the device is a few hundred MiB, whatever the
model. With 8-bit AdamW 2 bytes a parameter travel each way; a link of 25 GB/s moves 3 billion of them in half a second,
beside a backward pass that takes longer.

Small states stay on the device: norms and biases are not worth a copy.

Source: our own; the idea of states on the host is ZeRO-Offload's (Ren et al. 2021, arXiv:2101.06840), which updates
there, and is bound by the host's arithmetic.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lean_ft.host_link import IN_FLIGHT_BYTES, HostLink, Sent, open_link
from lean_ft.optim.rule import ParameterState

SMALLEST_BYTES = 2**16


class StreamedState:
    """The large state tensors of an optimizer, on the host."""

    def __init__(
        self, link: HostLink, *, smallest_bytes: int = SMALLEST_BYTES, ahead_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        self._link = link
        self._smallest_bytes, self._ahead_bytes = smallest_bytes, ahead_bytes
        self._sent: dict[int, dict[str, Sent]] = {}  # by parameter: the state that lives on the host
        self._following: dict[int, int] = {}  # whose update came after whose, in the last step
        self._last: int | None = None  # updated in this step
        self._step_number = 0

    def init_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A parameter's tensors, the large ones on the host."""
        return {
            name: self._link.host_copy(tensor) if tensor.nbytes >= self._smallest_bytes else tensor
            for name, tensor in tensors.items()
        }

    @contextmanager
    def on_device(self, state: ParameterState, step_number: int) -> Iterator[ParameterState]:
        """The state as an update takes it; afterwards it goes home."""
        if step_number != self._step_number:
            # No update of the next step follows one of this: its state would be on the device all through forward.
            self._step_number, self._last = step_number, None
        away = self._away(state)
        tensors = {**state.tensors, **{name: self._link.fetch(sent) for name, sent in away.items()}}
        self._prefetch_after(state.index)
        yield replace(state, tensors=tensors)
        # A copy out that still reads memory when the next update writes to it brings a mixture home, but the copy
        # after that update comes later on the same stream, and nobody reads the host's state in between.
        for name in away:
            away[name] = self._link.send(tensors[name], state.tensors[name])

    def settle(self) -> None:
        """Returns when the host may read all state."""
        self._link.synchronize()

    def forget(self) -> None:
        """Returns when the host may write all state, in place: no copy of it comes after, and none made ahead is used."""
        self._link.synchronize()
        self._link.forget_arrivals()
        self._sent.clear()

    def _away(self, state: ParameterState) -> dict[str, Sent]:
        if state.index not in self._sent:
            self._sent[state.index] = {
                name: Sent(tensor) for name, tensor in state.tensors.items() if tensor.nbytes >= self._smallest_bytes
            }
        return self._sent[state.index]

    def _prefetch_after(self, index: int) -> None:
        """Starts the copies of the next updates' states, as they followed one another in the last step."""
        if self._last is not None:
            self._following[self._last] = index
        self._last = index
        ahead_bytes, seen = 0, {index}
        while ahead_bytes < self._ahead_bytes and (index := self._following.get(index, -1)) not in seen:
            seen.add(index)
            for sent in self._sent.get(index, {}).values():
                self._link.prefetch(sent)
                ahead_bytes += sent.host.nbytes


def stream_state(device: torch.device) -> StreamedState:
    """A place for state in pinned host memory.

    Raises:
        ValueError: where there is no other memory to keep state in.
    """
    return StreamedState(open_link(device, "optimizer.state=streamed", "optimizer.state=device"))
