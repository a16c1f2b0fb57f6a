"""A plan's result: memory and time of one step. Imports no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lean_ft.plan.devices import ONE_DEVICE, Machines


@dataclass
class Peak:
    """Memory at one time: bytes by label, and the place in the step."""

    where: str = ""
    bytes_by_label: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_label.values())


class Launches(NamedTuple):
    """Sums over launches of one operation. limit_seconds: at the device's published rates."""

    number: float = 0
    flops: float = 0.0
    moved_bytes: float = 0.0
    seconds: float = 0.0
    limit_seconds: float = 0.0

    def plus(self, other: "Launches", times: float = 1) -> "Launches":
        return Launches(*(own + times * more for own, more in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Rehearsal:
    """Memory and time of one optimizer step, on each device."""

    peak: Peak
    step_seconds: float  # estimated; docs/speed_tables.md compares it with published figures
    tokens: int  # over all micro-batches and devices, including padding
    num_parameters: int
    timeline: list[tuple[float, dict[str, int]]] = field(repr=False)  # (seconds, bytes alive by label)
    planning_seconds: float = 0.0
    pinned_bytes: int = 0  # of host memory
    reserved_bytes: int = 0  # taken from the driver for the peak; on a CPU the peak
    machines: Machines = ONE_DEVICE
    sent_bytes: int = 0  # by each device, to devices of its machine
    sent_away_bytes: int = 0  # by each device, to other machines
    exchange_seconds: float = 0.0  # of communication that overlaps with computation
    tower_bytes: int = 0  # of the weights of vision towers
    in_batch: dict[str, int] = field(default_factory=dict)  # what kinds of columns count in a micro-batch
    remarks: list[str] = field(default_factory=list)  # lines about parts of the models
    ledger: dict[tuple[str, str], Launches] = field(default_factory=dict, repr=False)  # by module and operation
    slow_paths: list[str] = field(
        default_factory=list
    )  # operations without their kernels: which, why, and what would mend it
    model_files: list[str] = field(default_factory=list, repr=False)  # of configs and processors of all models

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def share_at_limit(self) -> float:
        """Time of all kernels at the device's published rates, as a share of the step."""
        return sum(launches.limit_seconds for launches in self.ledger.values()) / self.step_seconds

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes


class NotSimulatedError(RuntimeError):
    """A line of user code needs the values of tensors, which a plan does not have."""
