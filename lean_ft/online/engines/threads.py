"""Threads that do not delay the end of the process."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin `work` in a thread. An interrupted process does not wait for it."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
