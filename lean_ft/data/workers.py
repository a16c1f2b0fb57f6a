"""A function over many items in processes of its own kind, results in order, no more items alive than are under way.

Each worker is a plain `python -m lean_ft.data.workers` that reads pickles from a pipe and answers on another. It is no
fork, so threads and devices of this process are no danger to it, and it does not run the user's script again, as
`multiprocessing` does where it cannot fork. It imports no torch, so it starts in half a second and stays small. Pickles
go through pipes between our own processes alone, never into a file.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

UNDER_WAY = 2  # items a worker has: one that it works on, one that waits for it


def usable_cores() -> int:
    """Cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item], num_processes: int) -> Iterator[Result]:
    """`function` of every item, in order. Both, and the results, are pickled.

    A ValueError of `function` is raised here, in its place in the order; whatever else goes wrong in a worker is a
    RuntimeError with what it said.
    """
    workers: list[_Worker] = []
    of_thread = threading.local()

    def begin() -> None:
        of_thread.worker = _Worker(payload)
        workers.append(of_thread.worker)

    def call(item: Item) -> Result:
        return of_thread.worker.call(item)

    payload = pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
    under_way: deque[Future[Result]] = deque()
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


class _Worker:
    """One process; used by one thread, which waits for its answers."""

    def __init__(self, function: bytes):
        package_parent = str(Path(__file__).parents[2])
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")])),
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lean_ft.data.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._function: bytes | None = function

    def call(self, item: Any) -> Any:
        try:
            if self._function is not None:
                self._to.write(self._function)
                self._function = None
            pickle.dump(item, self._to, protocol=pickle.HIGHEST_PROTOCOL)
            self._to.flush()
            kind, answer = pickle.load(self._from)
        except (BrokenPipeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            killed = " (killed: is memory full? Try a smaller data.num_processes)" if code == -signal.SIGKILL else ""
            raise RuntimeError(f"a process that prepares data ended with exit code {code}{killed}.") from error
        if kind == "value error":
            raise ValueError(answer)
        if kind == "error":
            raise RuntimeError(f"a process that prepares data failed:\n{answer}")
        return answer

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()


def _work() -> None:
    """The worker: a function, then items until the pipe is closed; answers are (kind, value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    read = os.fdopen(os.dup(0), "rb")
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    # Where the parent was killed, its pipes end in the middle of anything: nobody is left to be told.
    with contextlib.suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):
        function = pickle.load(read)
        while True:
            item = pickle.load(read)
            try:
                result = "done", function(item)
            except ValueError as error:
                result = "value error", str(error)
            except Exception:
                result = "error", traceback.format_exc()
            pickle.dump(result, answer, protocol=pickle.HIGHEST_PROTOCOL)
            answer.flush()


if __name__ == "__main__":
    _work()
