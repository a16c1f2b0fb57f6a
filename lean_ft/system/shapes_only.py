"""Shapes only: the mode in which a recipe takes one step on tensors without contents, for a planner that watches it.

Inside it tensors are fake: they have shapes, types and lifetimes, and what is read from one is 1 or True. Nearly all of
the library need not know. What would touch a disk, a device or a clock asks `stage()`, which is None in a real run:
`start`, `load_model`, `load_tokenizer`, the batches, `Run`, the optimizer's update and the link to host memory. What repeats
itself goes through `repeated`, so that a few rounds stand for all; and what a planner tells apart says so by `counted_as`.

A recipe, also a copied and edited one, is thus planned as it is written, as long as it calls the library.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class StepTaken(BaseException):
    """The step has been taken; nothing after it matters to a planner."""


_stage: ContextVar[Any] = ContextVar("stage", default=None)


def stage() -> Any:
    """The planner's stage where shapes alone are computed, `lean_ft.plan.rehearsal.WatchedStage`; None in a real run."""
    return _stage.get()


@contextmanager
def shapes_only(stage: Any) -> Iterator[None]:
    """Turns the mode on; the caller brings the fake tensors."""
    token = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(token)


@contextmanager
def counted_as(label: str, where: str = "") -> Iterator[None]:
    """What is made inside is counted under `label` by a planner; `where` is how far the step is. Also a decorator."""
    watcher = stage()
    with nullcontext() if watcher is None else watcher.counted_as(label, where):
        yield


def outside() -> AbstractContextManager[None]:
    """Inside, tensors are real even where shapes alone are computed, and no planner counts them."""
    watcher = stage()
    return nullcontext() if watcher is None else watcher.outside()


def repeated(parts: Sequence[T], shown: int = 1) -> Iterable[T]:
    """The parts of one piece of work, all alike but for the first `shown`; to a planner that many stand for all."""
    watcher = stage()
    return parts if watcher is None else watcher.repeated(parts, shown)


def device_type(device: Any) -> str:
    """The type of a tensor's device; that of the device which is planned for, where shapes alone are computed."""
    watcher = stage()
    return device.type if watcher is None else watcher.device_type
