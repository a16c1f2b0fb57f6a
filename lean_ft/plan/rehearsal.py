"""Rehearse one step of a real recipe on shapes, and count its memory and time.

The recipe's `main` runs in the library's shapes-only mode, on tensors without contents. The batch is the largest possible: every
row has `data.max_length` tokens, and every token is a target.

With several devices, rank 0's step is simulated (`lean_ft.plan.ranks`).
"""

import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lean_ft.memory import wants_host_pool
from lean_ft.models.source import source_of
from lean_ft.optim.rule import ParameterState
from lean_ft.plan.devices import ONE_DEVICE, Device, Kernel, Machines
from lean_ft.plan.fusion import fusing_backend
from lean_ft.plan.labels import ACTIVATIONS, BATCH, GRADIENTS, STATES, WORKSPACE
from lean_ft.plan.ranks import PlannedRanks, pretended_ranks
from lean_ft.plan.result import NotSimulatedError, Rehearsal
from lean_ft.plan.trace import Trace, short_name
from lean_ft.settings import MemoryConfig, ParallelConfig, RecipeConfig
from lean_ft.system.catalog import is_shipped
from lean_ft.system.environment import memory_bytes
from lean_ft.system.host_link import IN_FLIGHT_BYTES, HostLink
from lean_ft.system.log import console
from lean_ft.system.shapes_only import StepTaken, shapes_only
from lean_ft.torch_private import FakeTensorMode, functorch_config, unset_fake_temporarily

T = TypeVar("T")


def rehearse(
    recipe: ModuleType, cfg: RecipeConfig, device: Device, machines: Machines = ONE_DEVICE, *, takes_step: bool = True
) -> Rehearsal:
    """Run one step of `recipe.main(cfg)` for `device` without weights, data or the device; with several devices, rank 0's step.
    With `takes_step=False`, stop before the step: this only raises the errors that a run would raise before it.

    Raises ValueError as the recipe for contradictory settings, for a model folder without a config.json, and for a recipe that
    takes no step; NotSimulatedError for a line of user code that needs values.
    """
    started = time.perf_counter()
    memory, parallel = cfg.group(MemoryConfig), cfg.group(ParallelConfig)
    trace = Trace(device, host_pool=memory is not None and wants_host_pool(memory), machines=machines)
    num_sharing = 1 if parallel is None else parallel.context * parallel.tensor
    stage = WatchedStage(trace, num_sharing, takes_step)
    torch.compiler.reset()
    try:
        with (
            pretended_ranks(trace),
            shapes_only(stage),
            _quiet(),
            functorch_config.patch(activation_memory_budget=functorch_config.activation_memory_budget),
            torch.compiler.set_stance("default", force_backend=fusing_backend(trace)),
            stage.fake_mode,
            trace,
        ):
            recipe.main(cfg)
        raise ValueError(
            "the recipe ended without a step. To plan it, it must take a step between steps() and log() of lean_ft.training.Run."
        )
    except StepTaken:
        pass
    except ValueError:
        raise
    except Exception as error:
        _raise_with_line(recipe, error)
        if not isinstance(error, RuntimeError) or "overflow" not in str(error):
            raise
        raise ValueError(
            "a tensor of this step has more elements than 64 bits can count. Lower data.max_length or batch_size."
        ) from None
    finally:
        torch.compiler.reset()
    return Rehearsal(
        peak=trace.peak,
        reserved_bytes=trace.reserved_bytes,
        step_seconds=trace.step_seconds,
        tokens=stage.num_tokens,
        num_parameters=stage.num_parameters,
        pinned_bytes=trace.pinned_bytes,
        timeline=trace.timeline,
        planning_seconds=time.perf_counter() - started,
        machines=machines,
        sent_bytes=int(trace.spent.sent_bytes),
        sent_away_bytes=int(trace.spent.sent_away_bytes),
        exchange_seconds=trace.spent.exchange_seconds,
        ledger=trace.spent.ledger,
        model_files=stage.model_files,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Print none of the recipe's log lines and compiler warnings: the run prints them."""
    before = logging.root.manager.disable, console.quiet
    logging.disable(logging.ERROR)
    console.quiet = True
    try:
        yield
    finally:
        logging.disable(before[0])
        console.quiet = before[1]


def _raise_with_line(recipe: ModuleType, error: Exception) -> None:
    """Raise NotSimulatedError with the line of the user's own recipe or function that failed; return if none is involved."""
    own = {module.__file__ for name, module in sys.modules.items() if name.startswith("user_functions.")}
    folder = None if is_shipped(recipe) else Path(recipe.__file__ or "").parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in own or Path(frame.filename).parent == folder
    ]
    if frames:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise NotSimulatedError(
            f"{frames[-1].filename}, line {frames[-1].lineno}: `{frames[-1].line}` cannot be simulated ({reason}). The plan "
            "runs the recipe on tensors that have shapes and no values, so shapes that depend on values, such as x[mask] or "
            "nonzero(), are unknown. The run itself can still work. Use torch.where or multiply by the mask; or measure "
            "the peak of a short run: max_steps=5."
        ) from error


class WatchedStage:
    """The planner's side of `lean_ft.system.shapes_only`: stand-ins for what a run has and a plan lacks, counted in a `Trace`."""

    def __init__(self, trace: Trace, num_sharing: int = 1, takes_step: bool = True) -> None:
        """`num_sharing`: devices that share each micro-batch."""
        self.trace, self.num_sharing, self._takes_step = trace, num_sharing, takes_step
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.num_tokens = self.num_parameters = 0
        self.model_files: list[str] = []
        self.num_ranks = trace.machines.num_devices
        self.ranks_type = PlannedRanks
        self.device_type = "cpu" if trace.device.is_cpu else "cuda"  # the planned device; tensors are on the CPU
        cpu = torch.device("cpu")
        self.memory_bytes = memory_bytes(cpu) if trace.device.is_cpu else trace.device.memory_bytes
        self._in_flight: Tensor | None = None
        self._cublas_workspaces: list[Tensor] = []
        self._updated: set[tuple] = set()  # shapes and dtypes of parameters

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Context manager in which tensors are real and uncounted."""
        with unset_fake_temporarily(), self.trace.uncounted():
            yield

    def repeated(self, parts: Sequence[T], shown: int) -> Iterator[T]:
        """The first `shown` parts. The last of them is charged the time of all that follow."""
        for i, part in enumerate(parts[:shown], start=1):
            before = self.trace.spent.copy()
            yield part
            if i == shown:
                self.trace.spent.again(before, len(parts) - shown)

    def batches(self, longest: Callable[[], Any]) -> "LongestBatches":
        """Training batches in place of `lean_ft.data.Batches`, each made by `longest`."""
        return LongestBatches(self, longest)

    def watch(self, model: nn.Module) -> None:
        """Count what the model's forward pass allocates as activations."""
        self.num_parameters += sum(parameter.numel() for parameter in model.parameters())
        if (folder := source_of(model).folder) is not None:
            self.model_files.append(str(folder / "config.json"))
        self.trace.module_names |= {id(module): name for name, module in model.named_modules()}
        model.register_forward_pre_hook(lambda *args: self._enter(ACTIVATIONS, "forward"))

    def watch_optimizer(self, optimizer: Any, states: Sequence[ParameterState]) -> None:
        """Follow the optimizer's step: where backward begins, each gradient as it is completed, and the update.

        Called before the optimizer registers its own hooks, so that a gradient is noted before it is used.
        """
        for state in states:
            state.whole.register_post_accumulate_grad_hook(self._note_gradient(state.name))
        if optimizer.streamed is not None:  # a single step fetches nothing ahead
            with self.trace.on_stream("copying"):
                self._in_flight = torch.empty(min(IN_FLIGHT_BYTES, optimizer.state_bytes), dtype=torch.uint8)
        scale, apply_rules = optimizer.scale, optimizer.apply_rules

        def scale_and_enter(loss: Tensor, *, last: bool) -> Tensor:
            scaled = scale(loss, last=last)
            self._enter(WORKSPACE, "backward, at its start")
            return scaled

        optimizer.scale = scale_and_enter
        optimizer.apply_rules = lambda states: self._update(states, apply_rules)

    def watch_run(self, run: Any) -> None:
        """Have the run's loop take one step, which ends the rehearsal when it is logged."""

        def steps() -> Iterator[int]:
            self._begin_step()
            yield 0

        def log(**metrics: Any) -> None:
            raise StepTaken

        run.steps, run.log = steps, log

    def _begin_step(self) -> None:
        if not self._takes_step:
            raise StepTaken
        self.trace.begin_step()
        if num_bytes := self.trace.device.cublas_workspace_bytes:
            with self.trace.labelled(WORKSPACE):  # for the threads of forward and backward
                self._cublas_workspaces = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]

    def _enter(self, label: str, where: str) -> None:
        self.trace.label, self.trace.where = label, where

    def _note_gradient(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self.trace.where = f"backward, at {name}"
            if parameter.grad is not None:
                self.trace.relabel(parameter.grad, GRADIENTS)

        return note

    def open_link(self) -> HostLink:
        """A link to host memory that copies nothing."""
        return _PlannedLink(self.trace)

    def _update(self, states: Sequence[ParameterState], update: Callable[[Sequence[ParameterState]], None]) -> None:
        """Rehearse the update of the first parameter of each shape and dtype, and charge the time of all.

        The time is that of memory traffic: gradients are read, states and weights are read and written.
        """
        new = {(state.param.shape, state.param.dtype): state for state in states}
        new = {kind: state for kind, state in new.items() if kind not in self._updated}
        self._updated.update(new)
        spent = self.trace.spent.copy()
        if new:
            first = next(iter(new.values()))
            with self.trace.labelled(WORKSPACE, f"optimizer step of {first.name}"):
                update(list(new.values()))
        now = self.trace.spent
        now.seconds, now.launch_seconds, now.ledger = spent.seconds, spent.launch_seconds, spent.ledger
        for state in states:
            kept = [state.param, *state.tensors.values()]
            if self._in_flight is not None:
                self.trace.travel(2 * sum(t.nbytes for t in state.tensors.values()))
            moved = 2 * sum(t.nbytes for t in kept) + state.grad.nbytes
            self.trace.spend(Kernel(0.0, moved), "optimizer step", short_name(state.name.rpartition(".")[0]))


class LongestBatches:
    """Training batches of the largest possible size."""

    batches_per_epoch = 1
    fingerprint = ""

    def __init__(self, stage: WatchedStage, longest: Callable[[], Any]) -> None:
        self._stage, self._longest = stage, longest

    def take(self, n: int) -> list[Any]:
        """Rank 0's micro-batches of the step. Two stand for more, because the second finds the gradients of the first."""
        trace = self._stage.trace
        own = -(-n * self._stage.num_sharing // self._stage.num_ranks)
        with trace.labelled(BATCH):
            batches = [self._longest() for _ in range(min(own, 2))]
        trace.longest_document = batches[0].labels.shape[1]
        self._stage.num_tokens = n * batches[0].num_tokens
        return _Standing(batches, own, trace)


class _Standing(list[T]):
    """A list of one or two items that is charged the time of `count` items."""

    def __init__(self, items: list[T], count: int, trace: Trace) -> None:
        super().__init__(items)
        self._count, self._trace = count, trace

    def __iter__(self) -> Iterator[T]:
        before = self._trace.spent.copy()
        for i, item in enumerate(super().__iter__()):
            yield item
            if i == 0:
                self._trace.spent.again(before, self._count - len(self))


class _PlannedLink(HostLink):
    """Counts device memory and the time of copies. Host memory is counted as pinned."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        super().__init__(torch.device("cpu"))

    def _open(self) -> None:
        pass

    def _host_memory(self, like: Tensor, *, new: bool = False) -> Tensor:
        with self._trace.uncounted():
            host = torch.empty_like(like)
        self._trace.pin(host)
        return host

    def host_copy(self, tensor: Tensor) -> Tensor:
        return self._host_memory(tensor)

    def seen_from_device(self, host: Tensor) -> Tensor:
        return host

    def _device_memory(self, like: Tensor) -> Tensor:
        with self._trace.on_stream("copying" if like.nbytes <= self._in_flight_bytes else self._trace.stream):
            return torch.empty_like(like)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        self._trace.travel(source.nbytes)
        return "the end of this copy"

    def bring_back(self, host: Tensor) -> Tensor:
        with self._trace.labelled(STATES):
            return super().bring_back(host)

    def _finish(self) -> None:
        pass

    def _wait(self, event: Any) -> None:
        pass
