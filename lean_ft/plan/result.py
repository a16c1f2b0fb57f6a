"""A plan's result: memory and time of one step. Imports no torch."""

import math
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
class EngineRound:
    """A round of completions that a server samples on one device of the planned kind.

    Every completion has the most tokens that the settings allow. Not counted: rewards, tools, the server's activations
    and CUDA graphs.
    """

    completions: int
    rows: int  # completions at a time; 0 if the server's memory is too small for one
    new_tokens: int  # of a completion
    weight_bytes: int
    cache_bytes: int  # keys and values of `rows` completions, or of one that does not fit
    memory_bytes: int | None  # that the server may take; None if unknown
    shares_device: bool  # with the training
    prompt_seconds: float  # of the different prompts
    token_seconds: float  # of a token of each of `rows` completions
    way: str  # of the weights to the server: adapter, merged or nccl
    published_bytes: int  # of weights, once per round
    publication_seconds: float
    steps: int  # optimizer steps per round
    is_ahead: bool  # whether a round is sampled while the round before it trains

    @property
    def sampling_seconds(self) -> float:
        return self.prompt_seconds + self.token_seconds * self.new_tokens * math.ceil(
            self.completions / max(1, self.rows)
        )

    def seconds(self, step_seconds: float, is_ahead: bool) -> float:
        """Time of a round with its training, whose steps take `step_seconds` each. Two programs on one device take
        turns."""
        training = step_seconds * self.steps
        together = max if is_ahead and not self.shares_device else lambda *parts: sum(parts)
        return self.publication_seconds + together(self.sampling_seconds, training)


@dataclass(frozen=True)
class Rehearsal:
    """Memory and time of one optimizer step, on each device."""

    peak: Peak
    step_seconds: float  # estimated, without an `engine`; docs/speed_tables.md compares it with published figures
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
    engine: EngineRound | None = None  # what a server samples for the step

    @property
    def whole_step_seconds(self) -> float:
        """Time of a step with its part of a round that a server samples, if the server has memory for one
        completion."""
        if self.engine is None or not self.engine.rows:
            return self.step_seconds
        return self.engine.seconds(self.step_seconds, self.engine.is_ahead) / self.engine.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.whole_step_seconds

    @property
    def engine_bytes(self) -> int:
        """Memory of the training device that a server takes."""
        return 0 if self.engine is None or not self.engine.shares_device else self.engine.memory_bytes or 0

    @property
    def share_at_limit(self) -> float:
        """Time of all kernels at the device's published rates, as a share of the step."""
        return sum(launches.limit_seconds for launches in self.ledger.values()) / self.step_seconds

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes


class NotSimulatedError(RuntimeError):
    """A line of user code needs the values of tensors, which a plan does not have."""
