"""Estimate the time of a step's operations on a device.

The time of an operation follows from its arithmetic, its memory traffic and its class (`Device.kernel_seconds`). The
host launches kernels while the device computes: where the host is late, the device waits. `Spent.ledger` lists the
launches by module and operation. Copies to the host and collectives overlap with computation, and take the time of
their links. Where the computation waits for a copy, so does the plan.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lean_ft.models.float32_products import slow_dtypes
from lean_ft.plan.devices import Device, Kernel
from lean_ft.plan.kernels import first_factor
from lean_ft.plan.labels import label_of_caller
from lean_ft.plan.memory import num_bytes
from lean_ft.plan.result import Launches
from lean_ft.plan.traffic import SentBytes
from lean_ft.system.costs import Arithmetic, Launched, cost_of
from lean_ft.torch_private import OpOverload, backward_node_number, next_node_number, tree_iter

T = TypeVar("T")

ATTENTION = ("attention", "flash")  # in names of PyTorch's operations
_GATHERING = ("embedding", "index_select", "gather", "index")  # read only the rows that they return


@dataclass
class Spent:
    """Time and communication of a step so far."""

    ledger: dict[tuple[str, str], Launches] = field(default_factory=dict)  # (module, operation) -> its launches
    seconds: float = 0.0  # of kernels, and of collectives that the device waits for
    clock: float = 0.0  # when the device has computed everything so far, with its waits for the host and for copies
    host_clock: float = 0.0  # when the host has launched everything so far
    link_clock: float = 0.0  # when all copies so far have ended
    launch_seconds: float = 0.0  # of the host, while the device computes
    link_seconds: float = 0.0  # of copies to and from the host, which overlap
    exchange_seconds: float = 0.0  # of collectives, which overlap
    sent_bytes: float = 0.0  # to other devices of the machine
    sent_away_bytes: float = 0.0  # to other machines

    def again(self, before: "Spent", times: int) -> None:
        """Add `times` times what was spent since `before`."""
        new = {name: getattr(self, name) - value for name, value in vars(before).items() if name != "ledger"}
        # A host that waited in the first repetition caught up with what came before it; in others it has not to.
        new["host_clock"] = min(new["host_clock"], new["clock"])
        for name, spent in new.items():
            setattr(self, name, getattr(self, name) + spent * times)
        for place, launches in self.ledger.items():
            new = launches.plus(before.ledger.get(place, Launches()), -1)
            self.ledger[place] = launches.plus(new, times)

    @property
    def num_launches(self) -> float:
        return sum(launches.number for launches in self.ledger.values())

    def copy(self) -> "Spent":
        return replace(self, ledger=dict(self.ledger))


class Time:
    """The time of a step on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._converted = slow_dtypes() if device.is_cpu else frozenset()
        self.spent = Spent()
        self.longest_document = 1
        self.module_names: dict[int, str] = {}  # by id
        self._module_of_node: dict[int, str] = {}  # by the sequence number of autograd

    def kernel(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: object, found: Launched
    ) -> tuple[str, Kernel | None]:
        """The name of an operation and its kernel; None if it neither computes nor moves data."""
        name = str(func.overloadpacket).removeprefix("aten.")
        read = args[1:] if name in _GATHERING else args
        written = args[:1] if result is None else result
        moved = sum(num_bytes(tensor) for tensor in tree_iter((read, written)) if isinstance(tensor, Tensor))
        flops, idle_flops = self._arithmetic(func, args, kwargs, result)
        if not moved and not flops:
            return name, None
        cost = cost_of(func.overloadpacket)
        is_attention = any(part in name for part in ATTENTION) if cost is None else cost.is_attention
        shape, product = (0, 0, 0), result
        matrices = [t for t in args if isinstance(t, Tensor) and t.ndim >= 2]
        in_float8 = [t for t in matrices if t.is_floating_point() and t.itemsize == 1]
        if flops and not is_attention and (factors := in_float8 or matrices[-2:]):
            rows, inner = factors[0].shape[-2:]
            shape = (rows, int(flops / (2 * rows * inner)) if rows * inner else 0, inner)
            product = factors[0] if in_float8 or _has_dtype(args) else result
        itemsize, moved = self._product_itemsize(product), moved + found.repeated_bytes
        later = found.repeated_bytes if found.number > 1 else 0
        return name, Kernel(flops, moved, itemsize, is_attention, shape, found.number, idle_flops, later)

    def launches(self, kernel: Kernel) -> Launches:
        """The launches of an operation, and their time."""
        seconds = self.device.kernel_seconds(kernel)
        return Launches(kernel.number, kernel.flops, kernel.moved_bytes, seconds, self.device.limit_seconds(kernel))

    def spend(self, launches: Launches, name: str, module: str | None = None) -> None:
        """Add launches. The ledger lists them under `name` and `module`; the default is the module that runs now."""
        self.spent.seconds += launches.seconds
        self.spent.launch_seconds += self.device.launch_seconds * launches.number
        self._run(launches)
        place = (self.current_module() if module is None else module, name)
        self.spent.ledger[place] = self.spent.ledger.get(place, Launches()).plus(launches)

    def _run(self, launches: Launches) -> None:
        """Run launches on the device. A kernel starts once the host has launched it and the one before has ended."""
        spent, each = self.spent, self.device.launch_seconds
        ready = spent.host_clock + each * min(launches.number, 1)
        spent.host_clock += each * launches.number
        last = spent.host_clock + launches.seconds / max(launches.number, 1)
        spent.clock = max(max(spent.clock, ready) + launches.seconds, last if launches.number else 0.0)

    def host_waits(self) -> None:
        """The host waits for the device, because it reads a value."""
        self.spent.host_clock = max(self.spent.host_clock, self.spent.clock)

    def current_module(self) -> str:
        """Return the name of the module whose `forward` runs now. In backward: of the module whose forward made this
        gradient's node."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "forward" and (module := _module_of(frame)) is not None:
                name = short_name(self.module_names.get(id(module), type(module).__name__))
                self._module_of_node.setdefault(next_node_number() - 1, name)
                return name
            frame = frame.f_back
        number = backward_node_number()
        name = None if number is None else self._module_of_node.get(number)
        return name or label_of_caller() or ""

    def charged(self, parts: Iterable[T], at: int, times: int) -> Iterator[T]:
        """Yield the parts, and charge the time of the part at this index as many more times."""
        for i, part in enumerate(parts):
            before = self.spent.copy()
            yield part
            if i == at:
                self.spent.again(before, times)

    def travel(self, num_bytes: int) -> float:
        """Add the time of a copy between device and host, which starts after the computation so far. Return its end."""
        spent, seconds = self.spent, num_bytes / self.device.host_bytes_per_second
        spent.link_seconds += seconds
        spent.link_clock = max(spent.link_clock, spent.clock) + seconds
        return spent.link_clock

    def wait_until(self, end: float) -> None:
        """The computation waits for the end of a copy."""
        self.spent.clock = max(self.spent.clock, end)

    def exchange(self, sent: SentBytes, *, waits: bool) -> None:
        """Add the time of a collective. `waits`: it does not overlap with computation."""
        device = self.device
        rate = device.network_bytes_per_second if sent.is_away else device.peer_bytes_per_second
        seconds = sent.num_bytes / rate
        if sent.is_away:
            self.spent.sent_away_bytes += sent.num_bytes
        else:
            self.spent.sent_bytes += sent.num_bytes
        if waits:
            self.spent.seconds += seconds
            self.spent.clock += seconds
        else:
            self.spent.exchange_seconds += seconds

    @property
    def step_seconds(self) -> float:
        """Time of the step so far."""
        spent = self.spent
        return max(spent.clock, spent.link_seconds, spent.exchange_seconds)

    def _product_itemsize(self, result: object) -> int:
        """Bytes per element in the products that gave `result`."""
        first = next((tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)), None)
        if first is None:
            return 2
        return 4 if first.dtype in self._converted else first.element_size()

    def _arithmetic(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
    ) -> Arithmetic:
        cost, count = cost_of(func.overloadpacket), flop_registry.get(func.overloadpacket)
        if cost is not None and cost.gpu_arithmetic is not None and not self.device.is_cpu:
            return cost.gpu_arithmetic(self.device.capability, self.longest_document, *args)
        if cost is not None and cost.flops is not None:
            return Arithmetic(cost.flops(self.longest_document, *args))
        if first_factor(func) is not None and _has_dtype(args):
            args = args[:-1]  # torch's formulas have no place for it
        return Arithmetic(float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0)


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs."""
    values = frame.f_locals
    module = values.get("self")
    # Before Python 3.13 the frame keeps this copy of its variables, and with it tensors that the method has deleted.
    if isinstance(values, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()
    return module if isinstance(module, nn.Module) else None


def short_name(name: str) -> str:
    """A module's name without the layer's place: `model.layers.3.mlp.up_proj` -> `mlp.up_proj`."""
    parts = [part for part in re.findall(r"\w+", name) if not part.isdecimal()]
    for outer in ("self", "layer", "layers", "_orig_mod"):
        if outer in parts:
            parts = parts[len(parts) - parts[::-1].index(outer) :]
    return ".".join(parts)


def _has_dtype(args: Sequence[Any]) -> bool:
    """Whether a product of 16-bit factors is asked for in float32 (`torch.mm(..., out_dtype=)`)."""
    return isinstance(args[-1], torch.dtype)
