"""What lean_ft's own operators cost on a device, for plans. Each operator registers its costs where it is defined.

`torch.utils.flop_counter.register_flop_formula` beside it counts the arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lean_ft.torch_private import OpOverloadPacket


class Launched(NamedTuple):
    """Launches of an operation, sizes of its temporary tensors, and traffic beyond reading each argument and writing
    each result once."""

    number: int = 1
    temporary: Sequence[int] = ()
    repeated_bytes: int = 0


class Arithmetic(NamedTuple):
    """Arithmetic of an operation, and what its kernel computes in vain beside it, such as the empty rows of a tile."""

    flops: float
    idle_flops: float = 0.0


class SlowPath(NamedTuple):
    """Plain operations in place of a kernel; and why, with what would mend it."""

    run: Callable[[], object]
    why: str


def _one_launch(capability: tuple[int, int], *args: object) -> Launched:
    return Launched()


@dataclass(frozen=True)
class Cost:
    """The cost of an operator.

    Attributes:
        on_gpu: what a GPU of a compute capability runs for the operator's arguments.
        flops: the arithmetic of documents of at most this many tokens, by the operator's arguments; None: as the flop
            formula.
        gpu_arithmetic: the same on a GPU of a compute capability, with what its kernel computes in vain; None: `flops`.
        is_attention: whether its arithmetic is as fast as attention's, rather than as a matrix product's.
        first_factor: index of the first factor of a matrix product, whose second factor follows; None: no product that
            a CPU computes in blocks of float32.
        is_compiled: whether the operator compiles its kernel, which is tuned at its first call.
    """

    on_gpu: Callable[..., Launched | SlowPath] = _one_launch
    flops: Callable[..., float] | None = None
    gpu_arithmetic: Callable[..., Arithmetic] | None = None
    is_attention: bool = False
    first_factor: int | None = None
    is_compiled: bool = False


_COSTS: dict["OpOverloadPacket", Cost] = {}


def register_cost(operator: "OpOverloadPacket", cost: Cost = Cost()) -> None:
    """Register the cost of `torch.ops.lean_ft.NAME`. Default: one launch."""
    _COSTS[operator] = cost


def cost_of(operator: "OpOverloadPacket") -> Cost | None:
    """The registered cost of an operator (`OpOverload.overloadpacket`)."""
    return _COSTS.get(operator)
