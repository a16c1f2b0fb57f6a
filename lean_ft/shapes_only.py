"""Shapes only: the mode in which a recipe takes one step on tensors without contents, for a planner that watches it.

Inside it tensors are fake: they have shapes, types and lifetimes, and what is read from one is 1 or True. Nearly all of
the library need not know. What would touch a disk, a device or a clock asks `stage()`, which is None in a real run:
`start`, `load_model`, `load_tokenizer`, the batches, `Run`, the optimizer's update and the link to host memory. What repeats
itself goes through `repeated`, so that a few rounds stand for all; and what a planner tells apart says so by `counted_as`.

A recipe, also a copied and edited one, is thus planned as it is written, as long as it calls the library.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class StepTaken(BaseException):
    """The step has been taken; nothing after it matters to a planner."""


class Stage(Protocol):
    """What a planner gives the library to work with; `lean_ft.plan` has the one there is."""

    device_type: str
    """Of the device that is planned for: `cuda` or `cpu`. Tensors are on the CPU all the same."""
    memory_bytes: int | None
    """Of that device."""
    num_ranks: int
    """Such devices that train together, of which this is the first."""

    def counted_as(self, label: str, where: str) -> AbstractContextManager[None]:
        """What is made inside carries the label; where: how far the step is, in words."""
        ...

    def outside(self) -> AbstractContextManager[None]:
        """Inside, tensors are real and nobody watches."""
        ...

    def repeated(self, parts: Sequence[T], shown: int) -> Iterator[T]:
        """The first `shown` parts; the last of them takes the time of all that follow."""
        ...

    def batches(self, longest: Callable[[], Any]) -> Any:
        """Training batches as `lean_ft.data.Batches`, each what `longest` makes."""
        ...

    def watch(self, model: Any) -> None:
        """Tells what follows its forward pass apart."""
        ...

    def watch_optimizer(self, named_parameters: Iterable[tuple[str, Any]], state_bytes: int, *, streamed: bool) -> None:
        """Tells gradients apart as they are completed, before the optimizer's own hooks come to them."""
        ...

    def update(self, states: Sequence[Any], update: Callable[[Sequence[Any]], None]) -> None:
        """In place of `update(states)`."""
        ...

    def open_link(self) -> Any:
        """A link to the host's memory that copies nothing."""
        ...

    def begin_step(self) -> None:
        """What came before is not of the step."""
        ...

    def begin_backward(self) -> None:
        """What comes now is the backward pass."""
        ...


_stage: ContextVar[Stage | None] = ContextVar("stage", default=None)


def stage() -> Stage | None:
    """The planner's stage where shapes alone are computed; None in a real run."""
    return _stage.get()


@contextmanager
def shapes_only(stage: Stage) -> Iterator[None]:
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
