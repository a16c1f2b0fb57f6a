"""Looks for the fastest settings that fit a budget of memory, by rehearsing one step with each.

Only what leaves the training the same is varied: how activations, gradients and the loss are kept, and the split of a
step's rows into micro-batches. The one exception is the precision of AdamW's moments, 8 bits for 16 or 32, which
changes rounding; it is offered after what does not.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from lean_ft.plan.devices import Device
from lean_ft.plan.rehearsal import Rehearsal, rehearse

# Each group from the fastest to the leanest; the numbers of a group are tried with those of all others.
_CHECKPOINTING = ("none", "every_n", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """Settings that differ from the user's by `overrides`, and what a step with them takes."""

    overrides: dict[str, Any]
    rehearsal: Rehearsal

    @property
    def peak_bytes(self) -> int:
        return self.rehearsal.peak_bytes

    @property
    def tokens_per_second(self) -> float:
        """Estimated; good for comparing candidates."""
        return self.rehearsal.tokens / self.rehearsal.step_seconds

    @property
    def command_line(self) -> str:
        """The overrides as `leanft run` takes them."""
        return " ".join(f"{key}={str(value).lower()}" for key, value in self.overrides.items())


@dataclass(frozen=True)
class Search:
    """What was tried: those that fit from the fastest on, and the others from the smallest on."""

    fitting: list[Candidate]
    too_large: list[Candidate]
    refused: dict[str, str]  # overrides -> why the recipe refuses them


def search(
    recipe: ModuleType,
    cfg: Any,
    device: Device,
    budget_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Search:
    """Rehearses the settings that `cfg` can be varied to and ranks them against `budget_bytes`."""
    variants = list(_variants(cfg))
    found: list[Candidate] = []
    refused: dict[str, str] = {}
    for i, overrides in enumerate(variants):
        progress(i, len(variants))
        try:
            found.append(Candidate(overrides, rehearse(recipe, with_overrides(cfg, overrides), device)))
        except ValueError as error:
            refused[str(overrides)] = str(error)
    progress(len(variants), len(variants))
    if not any(candidate.peak_bytes <= budget_bytes for candidate in found) and cfg.batch_size > 1:
        # Nothing fits: take the leanest and go through smaller batches.
        leanest = min(found, key=lambda candidate: candidate.peak_bytes)
        for batch in _smaller_batches(cfg):
            overrides = leanest.overrides | batch
            found.append(Candidate(overrides, rehearse(recipe, with_overrides(cfg, overrides), device)))
            if found[-1].peak_bytes <= budget_bytes:
                break
    fitting = [candidate for candidate in found if candidate.peak_bytes <= budget_bytes]
    too_large = [candidate for candidate in found if candidate.peak_bytes > budget_bytes]
    return Search(
        sorted(fitting, key=lambda candidate: (-candidate.tokens_per_second, candidate.peak_bytes)),
        sorted(too_large, key=lambda candidate: candidate.peak_bytes),
        refused,
    )


def with_overrides(cfg: Any, overrides: dict[str, Any]) -> Any:
    """The settings with `group.name` keys replaced."""
    updates: dict[str, Any] = {}
    for key, value in overrides.items():
        group, _, name = key.rpartition(".")
        if not group:
            updates[name] = value
        else:
            current: BaseModel = updates.get(group, getattr(cfg, group))
            updates[group] = current.model_copy(update={name: value})
    return cfg.model_copy(update=updates)


def _variants(cfg: Any) -> Iterator[dict[str, Any]]:
    """Overrides to try, without what `cfg` says already."""
    for checkpointing in _CHECKPOINTING:
        for optimizer in _optimizers(cfg):
            for loss in ({}, {"memory.loss_accumulation_dtype": "weight", "memory.loss_chunk_tokens": 512}):
                wanted = {"memory.activation_checkpointing": checkpointing, **optimizer, **loss}
                yield {key: value for key, value in wanted.items() if _current(cfg, key) != value}


def _optimizers(cfg: Any) -> Iterable[dict[str, Any]]:
    optimizer = cfg.optimizer
    in_backward = {} if cfg.clip_grad_norm is not None else {"optimizer.in_backward": True}
    yield in_backward
    if optimizer.name == "adamw":
        yield {**in_backward, "optimizer.name": "adamw_8bit"}


def _smaller_batches(cfg: Any) -> Iterator[dict[str, Any]]:
    """The same rows a step in more micro-batches."""
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    for batch_size in range(cfg.batch_size // 2, 0, -1):
        if rows % batch_size == 0 and math.log2(batch_size).is_integer():
            yield {"batch_size": batch_size, "gradient_accumulation_steps": rows // batch_size}


def _current(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg
