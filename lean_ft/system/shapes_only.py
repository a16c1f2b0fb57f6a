"""Shapes-only mode: a recipe takes one step on tensors without contents, while the planner counts memory and time.

Tensors are fake in this mode: they have shapes, dtypes and lifetimes, and every value read from them is 1 or True. Most of
the library is unaware of the mode. Code that reads a disk, a device or a clock asks for `stage()`, which is None in a real
run. Code that repeats the same work loops through `repeated`, so that a few iterations stand for all. The planner finds out
by itself which function allocates (`lean_ft.plan.labels`), and it replaces the methods of `Run`, `Optimizer` and `Ranks`
that behave differently in a plan.

A recipe, also a copied and edited one, is planned as it is written, as long as it calls the library.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class StepTaken(BaseException):
    """Raised after the planned step, to end the recipe."""


_stage: ContextVar[Any] = ContextVar("stage", default=None)


def stage() -> Any:
    """The planner's `lean_ft.plan.rehearsal.WatchedStage` in shapes-only mode; None in a real run."""
    return _stage.get()


@contextmanager
def shapes_only(stage: Any) -> Iterator[None]:
    """Turn the mode on. The caller provides the fake tensor mode."""
    token = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(token)


def outside() -> AbstractContextManager[None]:
    """Context manager in which tensors are real and uncounted, also in shapes-only mode."""
    watcher = stage()
    return nullcontext() if watcher is None else watcher.outside()


def repeated(parts: Sequence[T], shown: int = 1) -> Iterable[T]:
    """The parts of a loop that all do the same work after the first `shown`. A plan runs `shown` of them."""
    watcher = stage()
    return parts if watcher is None else watcher.repeated(parts, shown)


def device_type(device: Any) -> str:
    """The type of a tensor's device; in shapes-only mode, the type of the planned device."""
    watcher = stage()
    return device.type if watcher is None else watcher.device_type
