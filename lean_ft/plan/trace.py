"""Count the memory and estimate the time of PyTorch code that runs on shapes.

Under `FakeTensorMode` tensors have shapes, dtypes and lifetimes but no contents, so a training step of any model runs
in seconds on any machine. `Trace` sees every operation, and counts its memory (`lean_ft.plan.memory`), its time
(`lean_ft.plan.time`) and what it sends to other ranks (`lean_ft.plan.traffic`). A value that the host reads is 1 or
True.

With several ranks, rank 0 is traced.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lean_ft.plan.devices import ONE_DEVICE, Device, Kernel, Machines
from lean_ft.plan.kernels import on_gpu
from lean_ft.plan.labels import LOSS
from lean_ft.plan.memory import Memory, num_bytes
from lean_ft.plan.result import Launches
from lean_ft.plan.time import Spent, Time
from lean_ft.plan.traffic import sent_by
from lean_ft.system.costs import Launched, SlowPath, cost_of
from lean_ft.torch_private import FakeTensor, OpOverload, TorchDispatchMode, read_scalar, tree_iter

T = TypeVar("T")

_READ_VALUES: dict[torch.dtype, bool | float] = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0}
WAITS_FOR_OTHERS = LOSS  # collectives under this label do not overlap with computation


class Charge(NamedTuple):
    """What an operation takes on the device: its launches by name, and the sizes of its temporary tensors.

    module: the module that the launches belong to; None means the one that runs now.
    """

    launches: dict[str, Launches]
    module: str | None
    temporary: Sequence[int] = ()


class Trace(TorchDispatchMode):
    """A dispatch mode that counts `memory` and `time`. `host_pool`: a CPU with `memory.host_pool`."""

    def __init__(self, device: Device, host_pool: bool = False, machines: Machines = ONE_DEVICE) -> None:
        super().__init__()
        self.device, self.machines = device, machines
        self.memory, self.time = Memory(device, host_pool), Time(device)
        self.timeline: list[tuple[float, dict[str, int]]] = []  # (seconds, bytes alive by label)
        self.slow_paths: dict[str, None] = {}  # why operations run without a kernel, and what would mend it
        self._known: dict[tuple[object, ...], Charge] = {}  # of those operations
        self._tuned: set[OpOverload] = set()
        self._counting, self._decomposes = True, False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, or torch.compile would compile nothing while the mode is on."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is read_scalar and self._counting and isinstance(args[0], FakeTensor):
            self.time.host_waits()
            return _READ_VALUES.get(args[0].dtype, 1)
        if self._decomposes and func.namespace == "aten":
            with self:
                if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                    return result
        result = func(*args, **(kwargs or {}))
        if self._counting and func.namespace != "prim":  # queries of a device or layout move no data
            is_empty = func.__name__.startswith(("empty", "new_empty"))
            self.memory.note(result, written=not (is_empty and self.memory.fills_pages))
            if func.namespace in ("c10d", "_c10d_functional"):
                self.exchange(func, args)
            elif not (func.is_view or func.__name__.startswith("_unsafe_view")):
                self.memory.write(_written(func, args, kwargs or {}))
                if not is_empty:
                    self.pay(self.cost(func, args, kwargs or {}, result))
        return result

    def pay(self, cost: Charge | None) -> None:
        """Add the time and the temporary memory of one operation."""
        if cost is not None:
            self.memory.occupy(cost.temporary)
            for name, launches in cost.launches.items():
                self.spend(launches, name, cost.module)

    def cost(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
        module: str | None = None,
    ) -> Charge:
        """The launches and the temporary memory of one operation."""
        found = Launched() if self.device.is_cpu else on_gpu(func, args, self.device)
        if isinstance(found, SlowPath):
            self.slow_paths[found.why] = None
            key = (func, *(_description(argument) for argument in args))
            if key not in self._known:
                self._known[key] = self._cost_of_parts(found.run, args, result)
            return self._known[key]._replace(module=module)
        if self.device.is_cpu:
            found = Launched(temporary=self.memory.inside(func, args))
        else:  # each temporary tensor is written and read
            found = found._replace(repeated_bytes=found.repeated_bytes + 2 * sum(found.temporary))
        self._tune(func, args, kwargs)
        name, kernel = self.time.kernel(func, args, kwargs, result, found)
        return Charge({} if kernel is None else {name: self.time.launches(kernel)}, module, found.temporary)

    def _tune(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Reserve the memory of the first call of an operator that compiles its kernel. Inductor names what the kernel
        writes over as an input and as an output, and copies it for both."""
        cost = cost_of(func.overloadpacket)
        if cost is not None and cost.is_compiled and func not in self._tuned:
            self._tuned.add(func)
            written = [t for t in tree_iter(_written(func, args, kwargs)) if isinstance(t, Tensor)]
            self.memory.tune([num_bytes(tensor) for tensor in written for _ in ("input", "output")])

    def _cost_of_parts(self, run: Callable[[], object], args: Sequence[Any], result: object) -> Charge:
        """The launches of the operations that `run` calls, and the most memory that they take beside arguments and
        result."""
        apart = Trace(self.device)
        apart._decomposes = True  # inside an operation autograd does not, and `flatten` would hide a copy
        apart.time, before = self.time, self.time.spent
        self.time.spent = Spent()
        apart.memory.note(args)
        given_bytes = apart.memory.live_bytes + sum(num_bytes(t) for t in tree_iter(result) if isinstance(t, Tensor))
        try:
            with self.uncounted(), apart:
                run()
            launches = dict[str, Launches]()
            for (_, name), found in self.time.spent.ledger.items():
                launches[name] = launches.get(name, Launches()).plus(found)
        finally:
            self.time.spent = before
        return Charge(launches, None, [max(0, apart.memory.peak.total_bytes - given_bytes)])

    def spend(self, launches: Launches, name: str, module: str | None = None) -> None:
        """Add launches to the step and to its timeline."""
        self.time.spend(launches, name, module)
        self.timeline.append((self.time.spent.clock, dict(self.memory.live)))

    def exchange(self, func: OpOverload, args: Sequence[Any]) -> None:
        """Count the data that this rank sends in a ring collective, and its time."""
        if (sent := sent_by(func, args, self.machines.devices_each)) is not None:
            self.time.exchange(sent, waits=self.memory.current[0] == WAITS_FOR_OTHERS)

    def begin_step(self) -> None:
        """Reset time and timeline."""
        self.time.spent = Spent()
        self.timeline.clear()

    def kernel(self, name: str, compute: Callable[[], T], inputs: Sequence[Tensor], launches: int) -> T:
        """Return `compute()`, and count its result and this number of launches, but none of its operations."""
        with self.uncounted():
            result = compute()
        self.memory.note(result)
        moved = sum(num_bytes(t) for t in (*inputs, *tree_iter(result)) if isinstance(t, Tensor))
        self.spend(self.time.launches(Kernel(0.0, moved, number=launches)), name)
        return result

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager in which operations are not counted; explicit `note` and `spend` still are."""
        counting, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = counting


def _description(argument: object) -> object:
    return (argument.shape, argument.stride(), argument.dtype) if isinstance(argument, Tensor) else argument


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[object]:
    """Arguments that an operation writes to."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(kwargs.get(argument.name) if argument.kwarg_only or index >= len(args) else args[index])
    return written
