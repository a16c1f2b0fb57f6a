"""The planned step: where its passes begin, each gradient, the update, and batches of rounds of completions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lean_ft.online.rollouts import Rounds
from lean_ft.online.sampler import Sampler
from lean_ft.optim import Optimizer
from lean_ft.optim.rule import ParameterState
from lean_ft.plan.devices import Kernel
from lean_ft.plan.engine import plan_engine
from lean_ft.plan.labels import GRADIENTS, WORKSPACE
from lean_ft.plan.online import rehearse_round
from lean_ft.plan.result import EngineRound, Launches
from lean_ft.plan.time import short_name
from lean_ft.plan.trace import Trace
from lean_ft.settings import OnlineConfig
from lean_ft.system.host_link import IN_FLIGHT_BYTES
from lean_ft.system.observer import Observer

T = TypeVar("T")


class StepTaken(BaseException):
    """Raised after the planned step, to end the recipe."""


class PlannedStep(Observer):
    """Counts a step in `trace`, and ends the recipe when the step is logged.

    take: returns a number of micro-batches made by a function. `takes_step=False`: end the recipe before the step.
    """

    def __init__(
        self, trace: Trace, take: Callable[[Callable[[], Any], int], list[Any]], takes_step: bool = True
    ) -> None:
        self._trace, self._take, self._takes_step = trace, take, takes_step
        self.engine: EngineRound | None = None
        self._in_flight: Tensor | None = None
        self._cublas_workspaces: list[Tensor] = []
        self._update_launches: dict[tuple, float] = {}  # by shape and dtype of a parameter

    def begin_step(self) -> None:
        if not self._takes_step:
            raise StepTaken
        self._trace.begin_step()
        if num_bytes := self._trace.device.cublas_workspace_bytes:
            with self._trace.memory.labelled(WORKSPACE):  # for the threads of forward and backward
                self._cublas_workspaces = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]

    def logged(self) -> None:
        raise StepTaken

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer.streamed is not None:  # a single step fetches nothing ahead
            with self._trace.memory.on_stream("copying"):
                self._in_flight = torch.empty(min(IN_FLIGHT_BYTES, optimizer.state_bytes), dtype=torch.uint8)
        for state in optimizer.states:
            state.whole.register_post_accumulate_grad_hook(lambda _, state=state: self._note_gradient(state))

    def _note_gradient(self, state: ParameterState) -> None:
        self._trace.memory.where = f"backward, at {state.name}"
        if state.whole.grad is not None:
            self._trace.memory.relabel(state.whole.grad, GRADIENTS)

    def begin_backward(self) -> None:
        self._trace.memory.enter(WORKSPACE, "backward, at its start")

    def update(self, optimizer: Optimizer, states: Sequence[ParameterState]) -> None:
        """Rehearse the update of parameters that are updated together, and of the others the first one of each shape
        and dtype, and charge the launches and the time of all.

        The time is that of memory traffic, or of the rule's instructions: gradients are read, states and weights are
        read and written.
        """
        groups = optimizer.joint_groups(states)
        for group in groups:
            if len(group) > 1:
                self._update_jointly(optimizer, group)
        states = [group[0] for group in groups if len(group) == 1]
        time = self._trace.time
        new = {(state.param.shape, state.param.dtype): state for state in states}
        new = {kind: state for kind, state in new.items() if kind not in self._update_launches}
        spent = time.spent.copy()
        if new:
            first = next(iter(new.values()))
            with self._trace.memory.labelled(WORKSPACE, f"optimizer step of {first.name}"):
                optimizer.apply_rules(list(new.values()))  # also makes tables that later updates read
                before = time.spent.num_launches
                optimizer.apply_rules(list(new.values()))
                number = time.spent.num_launches - before
            # One fused launch may update several parameters; kernels outside of PyTorch are not seen.
            self._update_launches |= dict.fromkeys(new, number / len(new) if number else 1.0)
        now = time.spent
        communicated = {name: getattr(now, name) for name in ("exchange_seconds", "sent_bytes", "sent_away_bytes")}
        time.spent = replace(spent, **communicated)
        for state in states:
            kept = [state.param, *state.tensors.values()]
            if self._in_flight is not None:
                time.travel(2 * sum(t.nbytes for t in state.tensors.values()))
            moved = 2 * sum(t.nbytes for t in kept) + state.grad.nbytes
            number = self._update_launches[state.param.shape, state.param.dtype]
            instructions = state.rule.instructions(state) * state.param.numel()
            kernel = Kernel(0.0, moved, number=number, instructions=instructions)
            self._trace.spend(time.launches(kernel), "optimizer step", short_name(state.name.rpartition(".")[0]))

    def _update_jointly(self, optimizer: Optimizer, group: list[ParameterState]) -> None:
        time = self._trace.time
        with self._trace.memory.labelled(WORKSPACE, f"optimizer step of {group[0].name} and others"):
            spent = time.spent.copy()
            optimizer.apply_rules(group)  # also joins the state
            time.spent, spent = spent, spent.copy()
            optimizer.apply_rules(group)
        total = Launches()
        for place, launches in time.spent.ledger.items():
            total = total.plus(launches.plus(spent.ledger.get(place, Launches()), -1))
        time.spent = spent
        self._trace.spend(total, "optimizer step", "small parameters")

    def sample(self, rounds: Rounds, cfg: OnlineConfig, answer: Callable[..., Any], fill: Callable[[], None]) -> None:
        if cfg.generation.engine == "own":
            rehearse_round(rounds, cfg, answer)
        elif isinstance(answer, Sampler):
            self.engine = plan_engine(rounds, cfg, answer.model, self._trace.device, self._trace.machines)

    def round_batches(self, make: Callable[[], list[T]], largest: Callable[[], T], number: int) -> list[T]:
        return self._take(largest, number)
