"""metrics.jsonl: one JSON line per optimizer step and per evaluation.

Losses and norms stay on the device until the lines are written (every `log_every` steps), so the host waits for the
device only then. A step's time runs from its start to `record`: batch, forward, backward and update, without
evaluations and checkpoints.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from lean_ft.data import Batch
from lean_ft.system.log import say
from lean_ft.system.redaction import redact_values
from lean_ft.system.run_directory import Row, lines_until
from lean_ft.system.whole_files import open_in_place, sync, write_whole
from lean_ft.training.process_memory import own_rss_bytes, peak_memory_bytes, rss_bytes

if TYPE_CHECKING:
    from lean_ft.training.loggers import Loggers

EXACT_MATCH = "eval_exact_match"  # share of held-out questions that the model answers right
# Metrics that show an objective's progress -> short name, in the order of the summary and the plot.
HEADLINES = {
    "reward": "reward",
    "reward_std": "reward std",
    "completion_length": "length",
    "kl": "kl",
    "rewards/accuracies": "right pairs",
    "rewards/margins": "margin",
    "value_loss": "value loss",
    "loss": "loss",
    EXACT_MATCH: "exact match",
}
DIVERGED_STEPS = 10  # last steps, whose median loss is compared with the first loss
DIVERGED_RATIO = 1.5
SETTLED_STEPS = 10  # after so many steps nothing happens for the first time, and a run's memory should stop growing


Mark = float | torch.cuda.Event  # seconds of the host's clock, or an event of a GPU


@dataclass
class _Pending:
    """A step whose values may still be on the device."""

    row: Row
    scalars: dict[str, Tensor]
    started: Mark
    ended: Mark


class _Clock:
    """Takes times: CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"

    def mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks. Waits for the device to reach the second mark."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1000
        assert isinstance(start, float) and isinstance(end, float)
        return end - start


class Metrics:
    """Writes a run's metrics.jsonl. With `writes=False`, lines are computed but not written."""

    def __init__(self, path: Path, device: torch.device, steps_per_epoch: int, *, writes: bool = True):
        self.path, self._writes = path, writes
        self._device = device
        self._steps_per_epoch = steps_per_epoch
        self._clock = _Clock(device)
        self._pending: list[_Pending] = []
        self._started: Mark | None = None
        self._num_steps = 0  # recorded since this start
        self._settled_bytes: int | None = None  # own resident size after SETTLED_STEPS
        self.further: dict[str, list[float]] = {}  # values for the next line, which has their means
        self.loggers: Loggers | None = None  # which get the same lines

    def begin_step(self) -> None:
        self._started = self._clock.mark()

    def record(
        self,
        step: int,
        *,
        lr: float,
        values: Mapping[str, Tensor | float | None],
        micro_batches: Sequence[Batch],
        skipped: bool = False,
    ) -> None:
        """Record optimizer step number `step` (from 1), which ends now. Copies the tensors without waiting.

        `values` are `loss` and `grad_norm`, which every line has, and further values, left out if None. Without a
        target, means
        over targets are left out: the loss, and further tensors. `skipped`: the update was not made.
        """
        assert self._started is not None
        ended = self._clock.mark()
        row = {
            "step": step,
            "epoch": step / self._steps_per_epoch,
            "loss": None,
            "lr": lr,
            "grad_norm": None,
            "tokens": sum(batch.num_tokens for batch in micro_batches),
            "target_tokens": sum(batch.num_targets for batch in micro_batches),
            "tokens_per_second": None,
            "target_tokens_per_second": None,
            "step_seconds": None,
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "rss_bytes": rss_bytes(),
            "rss_growth_bytes": self._growth_bytes(),
        }
        for name in getattr(micro_batches[0], "counted", ()):  # a recipe's own batches may count nothing
            row[name] = sum(batch.counted[name] for batch in micro_batches)
        if skipped:
            row["skipped"] = True
        values = {**values, **self._take_further({*row, *values})}
        if not row["target_tokens"]:
            means = {name for name, value in values.items() if isinstance(value, Tensor)} - {"grad_norm"} | {"loss"}
            values |= dict.fromkeys(means)
        scalars = {name: _copy(value) for name, value in values.items() if value is not None}
        self._pending.append(_Pending(row, scalars, self._started, ended))
        self._started = None

    def _take_further(self, taken: Collection[str], prefix: str = "") -> dict[str, float]:
        """The means of `further`, after `extra/` where the line has another field of that name."""
        means = {prefix + name: statistics.fmean(values) for name, values in self.further.items()}
        self.further.clear()
        return {f"extra/{name}" if name in taken else name: mean for name, mean in means.items()}

    def _growth_bytes(self) -> int | None:
        """Growth of the resident size since step 10 of this start; None before."""
        self._num_steps += 1
        resident_bytes = own_rss_bytes()
        if self._num_steps == SETTLED_STEPS:
            self._settled_bytes = resident_bytes
        return None if resident_bytes is None or self._settled_bytes is None else resident_bytes - self._settled_bytes

    def take_highest_peaks(self, highest: Callable[..., list[int]]) -> None:
        """Set the peaks in the lines since the last flush to the highest of all ranks."""
        if self._pending:
            peaks = highest(*(pending.row["peak_memory_bytes"] for pending in self._pending))
            for pending, peak in zip(self._pending, peaks, strict=True):
                pending.row["peak_memory_bytes"] = peak

    def flush(self) -> list[Row]:
        """Write the steps recorded since the last flush, and return their lines."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        # One transfer: each .item() would wait for the device.
        scalars = [scalar for p in pending for scalar in p.scalars.values()]
        values = iter(torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist())
        for p in pending:
            seconds = self._clock.seconds(p.started, p.ended)
            p.row["step_seconds"] = seconds
            p.row["tokens_per_second"] = p.row["tokens"] / seconds
            p.row["target_tokens_per_second"] = p.row["target_tokens"] / seconds
            for name in p.scalars:
                _put(p.row, name, next(values))
        rows = [p.row for p in pending]
        self._append(rows)
        return rows

    def write_line(self, step: int, fields: dict[str, Any]) -> Row:
        """Write a line of evaluation results after `step` steps."""
        row: Row = {"step": step, "epoch": step / self._steps_per_epoch}
        for name, value in (fields | self._take_further(fields, "eval_")).items():
            _put(row, name, value.item() if isinstance(value, Tensor) else value)
        self._append([row])
        return row

    def _append(self, rows: list[Row]) -> None:
        if not self._writes:
            return
        with open_in_place(self.path, "a") as file:
            file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in map(redact_values, rows)))
        if self.loggers is not None:
            self.loggers.write(rows)

    def sync_to_disk(self) -> None:
        """Make the lines written so far survive a power cut, because a checkpoint must not outlive its metrics."""
        if self._writes and self.path.exists():
            sync(self.path)


def _copy(value: Tensor | float) -> Tensor:
    """A float32 copy: the caller may reuse the tensor."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32, copy=True).reshape(())
    return torch.tensor(value, dtype=torch.float32)


def _put(row: Row, name: str, value: object) -> None:
    """Set a field. JSON has no NaN, so a value that is not finite becomes null and is listed in `non_finite`."""
    if isinstance(value, float) and not math.isfinite(value):
        row.setdefault("non_finite", {})[name] = str(value)
        value = None
    row[name] = value


def has_diverged(first_loss: float | None, losses: Sequence[float]) -> bool:
    """Whether the median loss of the last steps is far above the first loss."""
    last = list(losses)[-DIVERGED_STEPS:]
    return bool(last) and first_loss is not None and statistics.median(last) > DIVERGED_RATIO * first_loss > 0


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def trim_metrics(path: Path, step: int, *, has_every_step: bool = True) -> None:
    """Cut metrics.jsonl back to the lines of the first `step` steps.

    The first unreadable line and all lines after it are removed. If the file should have every step and steps are lost
    (a power cut can leave zeros), the damaged file is kept under another name and a warning is logged.
    """
    if not path.exists():
        return
    with open_in_place(path, "rb+") as file:
        rows, kept_bytes = lines_until(path, step)
        reached = rows[-1]["step"] if rows else 0
        if has_every_step and reached < step:
            damaged = path.with_stem("metrics.damaged")
            with write_whole(damaged) as copy:
                shutil.copyfile(path, copy)
            say(
                "WARNING",
                f"{path} lost the lines of steps {reached + 1} to {step}: line {len(rows) + 1} is damaged or missing. "
                f"The run continues, without these steps in its curves. The damaged file is kept as {damaged}.",
            )
        file.truncate(kept_bytes)


def set_metrics_aside(path: Path) -> None:
    """Rename the metrics file of an earlier start in this directory that never reached a checkpoint."""
    if path.exists() and path.stat().st_size:
        aside = path.with_stem("metrics.previous")
        path.replace(aside)
        say("starting", f"from step 0: an earlier attempt saved no checkpoint. Its metrics are now in {aside}")
