"""How a run ended, or that it is under way, for tables and programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lean_ft.training.metrics import Row
from lean_ft.training.records import is_locked

_IN_WORDS = {"NonFinite": "not finite", "OutOfMemoryError": "out of memory", "MemoryError": "out of memory"}


@dataclass(frozen=True)
class RunState:
    """The state of a run: `stopped` by a signal or its own loop, `failed` with an error, or `killed` without a
    record; `unfinished` for the last three in early versions.

    Its text has the last step in metrics.jsonl: `done`, `stopped at 55 of 100`, `failed at 55 of 100: out of memory`.
    """

    name: Literal["done", "stopped", "failed", "killed", "unfinished", "running"]
    step: int
    total_steps: int | None = None
    """None for a run of an early version."""
    error: str | None = None
    """The name of a failed run's error, and its message."""

    def __str__(self) -> str:
        if self.name == "done":
            return "done"
        steps = f"{self.step:,}" if self.total_steps is None else f"{self.step:,} of {self.total_steps:,}"
        if self.error is None:
            return f"{self.name} at {steps}"
        error = self.error.partition(":")[0]
        return f"{self.name} at {steps}: {_IN_WORDS.get(error, error)}"


def state_of(directory: Path, starts: Sequence[dict[str, Any]], rows: Sequence[Row]) -> RunState | None:
    """The state of the run in `directory`; None if it has no run.json. starts: of run.json; rows: of metrics.jsonl."""
    if not starts:
        return None
    last, step = starts[-1], max((row["step"] for row in rows), default=0)
    total_steps, error = last.get("total_steps"), last.get("error")
    name = "unfinished" if total_steps is None else "killed"
    if "ended" in last:
        name = "done"
    elif is_locked(directory):
        name = "running"
    elif "failed" in last:
        name = "failed"
    elif "stopped" in last:
        name = "stopped"
    return RunState(
        name,
        step,
        total_steps if isinstance(total_steps, int) else None,
        error if isinstance(error, str) and name == "failed" else None,
    )
