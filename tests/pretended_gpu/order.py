"""Test the order of work on the simulated GPU's streams: run side streams as late as possible, and look for races.

A program is correct if every order that its waits allow gives the same results. `late_streams` runs the worst order:
work queued on a side stream runs only when something waits for it. `watched_for_races` finds accesses without an order:
two accesses to the same memory from different streams, at least one of them a write, without a chain of waits between
them.
"""

import ctypes
import inspect
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.pretended_gpu import device_values


@contextmanager
def late_streams() -> Iterator[None]:
    """Run work on side streams as late as the waits for their events allow."""
    library = ctypes.CDLL("libcuda.so.1")
    library.pretended_be_late(1)
    try:
        yield
    finally:
        library.pretended_be_late(0)


@contextmanager
def watched_for_races() -> Iterator[list[str]]:
    """Yield a list that holds a message for each race between streams afterwards."""
    library, found = ctypes.CDLL("libcuda.so.1"), []
    library.pretended_watch_races(1)
    device_values.watch_accesses(True)
    try:
        yield found
        with tempfile.NamedTemporaryFile() as file:
            library.pretended_write_races(file.name.encode())
            found += Path(file.name).read_text().splitlines()
    finally:
        device_values.watch_accesses(False)
        library.pretended_watch_races(0)


def host_uses(tensor: Tensor, *, writes: bool) -> None:
    """Report that the host reads or writes memory that the GPU uses too. It is a race unless the host waited for the
    GPU."""
    start, num_bytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    ctypes.CDLL("libcuda.so.1").pretended_host_access(start, num_bytes, int(writes))


# Everything that orders work: the functions by which a stream or the host waits, and the records that they wait for.
_ORDERING = (
    (torch.cuda.Stream, "wait_stream"),
    (torch.cuda.Stream, "wait_event"),
    (torch.cuda.Stream, "record_event"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "record"),
    (torch.cuda.Event, "wait"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda, "synchronize"),
)


@contextmanager
def without(missing: str | None, folder: Path) -> Iterator[list[str]]:
    """Yield the places in Python files of `folder` that order streams, and disable the place named `missing`.

    A place is named by its callers and the function called, such as `HostLink.fetch > HostLink._wait: wait_event`. A
    disabled record returns an event that nothing waits for.
    """
    places: list[str] = []
    inside = False

    def intercepted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # wait_stream calls record_event and wait_event
                return original(*args, **kwargs)
            place = _place(name, folder)
            if place is not None:
                if place not in places:
                    places.append(place)
                if place == missing:
                    return torch.cuda.Event() if name == "record_event" else None
            inside = True
            try:
                return original(*args, **kwargs)
            finally:
                inside = False

        return call

    with ExitStack() as stack:
        for owner, name in _ORDERING:
            stack.enter_context(mock.patch.object(owner, name, intercepted(name, getattr(owner, name))))
        yield places


def _place(name: str, folder: Path) -> str | None:
    """Name the place that calls `name`, two frames above this one, by the consecutive functions of its file."""
    callers = inspect.stack(context=0)[2:]
    file = callers[0].filename
    if folder not in Path(file).parents:
        return None
    chain = [each.frame.f_code.co_qualname for each in itertools.takewhile(lambda each: each.filename == file, callers)]
    return " > ".join(reversed(chain)) + f": {name}"
