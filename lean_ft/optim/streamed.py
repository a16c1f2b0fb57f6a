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

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lean_ft.host_link import IN_FLIGHT_BYTES, HostLink, Sent
from lean_ft.optim.rule import ParameterState, Rule, StepInfo

SMALLEST_BYTES = 2**16


class Streamed(Rule):
    """Any rule, with its large state tensors on the host."""

    def __init__(
        self, rule: Rule, link: HostLink, *, smallest_bytes: int = SMALLEST_BYTES, ahead_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        self._rule, self._link = rule, link
        self._smallest_bytes, self._ahead_bytes = smallest_bytes, ahead_bytes
        self.draws_noise = rule.draws_noise
        self._sent: dict[int, dict[str, Sent]] = {}  # by parameter: the state that lives on the host
        self._following: dict[int, int] = {}  # whose update came after whose, in the last step
        self._last: int | None = None  # updated in this step
        self._step_number = 0

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        tensors = self._rule.init_state(param)
        self.notes = self._rule.notes
        for name, tensor in tensors.items():
            if tensor.nbytes >= self._smallest_bytes:
                tensors[name] = self._link.host_copy(tensor)
        return tensors

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        if step.number != self._step_number:
            # No update of the next step follows one of this: its state would be on the device all through forward.
            self._step_number, self._last = step.number, None
        for state in states:
            away = self._away(state)
            tensors = {**state.tensors, **{name: self._link.fetch(sent) for name, sent in away.items()}}
            self._prefetch_after(state.index)
            self._rule.update([ParameterState(state.name, state.param, state.index, tensors)], step)
            # A copy out that still reads memory when the next update writes to it brings a mixture home, but the copy
            # after that update comes later on the same stream, and nobody reads the host's state in between.
            for name in away:
                away[name] = self._link.send(tensors[name], state.tensors[name])

    def settle(self) -> None:
        self._link.synchronize()

    def load_state(self, state: ParameterState, tensors: Mapping[str, Tensor]) -> None:
        # No copy of the old state may come after, and none that was fetched ahead is used.
        self._link.synchronize()
        self._link.forget_arrivals()
        self._sent.clear()
        self._rule.load_state(state, tensors)  # into the host's tensors, in place

    def _away(self, state: ParameterState) -> dict[str, Sent]:
        if state.index not in self._sent:
            self._sent[state.index] = {
                name: Sent.on_host(tensor)
                for name, tensor in state.tensors.items()
                if tensor.nbytes >= self._smallest_bytes
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


def stream_state(rule: Rule, device: torch.device) -> Streamed:
    """The rule with its state in pinned host memory.

    Raises:
        ValueError: where there is no other memory to keep state in.
    """
    if device.type != "cuda":
        raise ValueError(
            "optimizer.state=streamed keeps state in the host's memory and moves it to the GPU for each update, but the "
            f"model is on {device.type}: it is in the host's memory already. Set optimizer.state=device."
        )
    return Streamed(rule, HostLink(device))
