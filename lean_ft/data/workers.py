"""Work shared out to processes: answers in order, and no more items alive than are under way.

Each worker is a plain `python -m MODULE` that reads messages from a pipe and answers on another. It is no fork, so
threads and devices of this process are no danger to it, and it does not run the user's script again, as
`multiprocessing` does where it cannot fork. A message is a JSON value and arrays: nothing that goes through a pipe can
run.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

UNDER_WAY = 2  # items a worker has: one that it works on, one that waits for it
_SIZE = struct.Struct("<Q")


class Answer(NamedTuple):
    """What a worker makes of an item."""

    value: Any
    """Of JSON."""
    arrays: list[np.ndarray]


def usable_cores() -> int:
    """Cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(module: str, setup: Any, items: Iterable[Any], num_processes: int) -> Iterator[Answer]:
    """The answers of `module` to the JSON values `items`, in order.

    The module calls `serve` with a function that makes, of the JSON value `setup`, the one that answers. A ValueError of
    either is raised here, in its place in the order; whatever else goes wrong in a worker is a RuntimeError with what it
    said.
    """
    workers: list[_Worker] = []
    of_thread = threading.local()

    def begin() -> None:
        of_thread.worker = _Worker(module, setup)
        workers.append(of_thread.worker)

    def call(item: Any) -> Answer:
        return of_thread.worker.call(item)

    under_way: deque[Future[Answer]] = deque()
    threads = ThreadPoolExecutor(num_processes, thread_name_prefix="data", initializer=begin)
    try:
        for item in items:
            if len(under_way) >= UNDER_WAY * num_processes:
                yield under_way.popleft().result()
            under_way.append(threads.submit(call, item))
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
        for worker in workers:
            worker.stop()
        threads.shutdown()


def serve(begin: Callable[[Any], Callable[[Any], Answer]]) -> None:
    """The worker: answers items with what `begin(setup)` returns, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    read = os.fdopen(os.dup(0), "rb")
    write = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    answer: Callable[[Any], Answer] | None = None
    # Where the parent was killed, its pipes end in the middle of anything: nobody is left to be told.
    with contextlib.suppress(EOFError, BrokenPipeError):
        setup, _ = _receive(read)
        while True:
            item, _ = _receive(read)
            try:
                answer = answer or begin(setup)
                value, arrays = answer(item)
                message = Answer(["done", value], arrays)
            except ValueError as error:
                message = Answer(["value error", str(error)], [])
            except Exception:
                message = Answer(["error", traceback.format_exc()], [])
            _send(write, message)


class _Worker:
    """One process; used by one thread, which waits for its answers."""

    def __init__(self, module: str, setup: Any):
        package_parent = str(Path(__file__).parents[2])
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")])),
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._setup: list[Any] = [setup]

    def call(self, item: Any) -> Answer:
        try:
            while self._setup:
                _send(self._to, Answer(self._setup.pop(), []))
            _send(self._to, Answer(item, []))
            (kind, value), arrays = _receive(self._from)
        # ValueError: the pipe was closed in another thread.
        except (BrokenPipeError, EOFError, ValueError) as error:
            code = self._process.wait()
            killed = " (killed: is memory full? Try a smaller data.num_processes)" if code == -signal.SIGKILL else ""
            raise RuntimeError(f"a process that prepares data ended with exit code {code}{killed}.") from error
        if kind == "value error":
            raise ValueError(value)
        if kind == "error":
            raise RuntimeError(f"a process that prepares data failed:\n{value}")
        return Answer(value, arrays)

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()


def _send(pipe: BinaryIO | Any, message: Answer) -> None:
    """Sizes, JSON, and the arrays' bytes, one after another."""
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    head = json.dumps([message.value, [[array.dtype.str, len(array)] for array in arrays]]).encode()
    pipe.write(_SIZE.pack(len(head)) + head)
    for array in arrays:
        pipe.write(array.data)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> Answer:
    value, kinds = json.loads(_exactly(pipe, _SIZE.unpack(_exactly(pipe, _SIZE.size))[0]))
    arrays = [np.empty(length, dtype) for dtype, length in kinds]
    for array in arrays:
        array.data.cast("B")[:] = _exactly(pipe, array.nbytes)
    return Answer(value, arrays)


def _exactly(pipe: BinaryIO | Any, size: int) -> bytes:
    """`size` bytes; EOFError where the pipe ends before."""
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content
