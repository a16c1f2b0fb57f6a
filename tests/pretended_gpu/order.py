"""The order of work on the pretended GPU's streams: as late as it may come, and checked for races.

A program is right if its waits allow no order in which it computes something else. `late_streams` tries one order that is
as bad as it can be: what is queued on a side stream happens only when someone waits for it. `watched_for_races` tries
none, and finds what lacks an order: two accesses to the same memory from different streams, a write among them, without a
chain of waits from one to the other.
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
    """Side streams do what they are asked for as late as the waits for their events allow."""
    library = ctypes.CDLL("libcuda.so.1")
    library.pretended_be_late(1)
    try:
        yield
    finally:
        library.pretended_be_late(0)


@contextmanager
def watched_for_races() -> Iterator[list[str]]:
    """Gives a list that afterwards says each race between streams, once."""
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
    """Says that the host reads or writes memory that the GPU reaches too: a race, if it has not waited for the GPU."""
    start, num_bytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    ctypes.CDLL("libcuda.so.1").pretended_host_access(start, num_bytes, int(writes))


# What puts work in an order: all that a stream or the host can wait by, and the records that they wait for.
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
    """Gives the list of places in Python files of `folder` that order streams, and has the one called `missing` do nothing.

    A place is called by what is called and the functions that led there, such as `HostLink.fetch > HostLink._wait:
    wait_event`: a function that waits for several others is a place for each of them. A record that is left out gives an
    event for which nobody waits.
    """
    places: list[str] = []
    inside = False

    def intercepted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # wait_stream is made of record_event and wait_event
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
    """What calls `name` is two frames above this one; of its file's functions those count that follow one another."""
    callers = inspect.stack(context=0)[2:]
    file = callers[0].filename
    if folder not in Path(file).parents:
        return None
    chain = [each.frame.f_code.co_qualname for each in itertools.takewhile(lambda each: each.filename == file, callers)]
    return " > ".join(reversed(chain)) + f": {name}"
