"""Work shared out to processes: results in order, and no more items alive than are under way.

The processes are spawned, so threads and devices of this process are no danger to them. Unlike those that
`multiprocessing` spawns they do not run the user's script again, and Ctrl-C is not theirs to answer.
"""

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any, TypeVar

UNDER_WAY = 2  # items a process has: one that it works on, one that waits for it

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item], num_processes: int) -> Iterator[Result]:
    """What `function`, which is pickled once for each process, makes of `items`, in order.

    A ValueError of its is raised here, in its place in the order; whatever else goes wrong in a process is a
    RuntimeError with what it said. However this ends, the processes end with it.
    """
    context = _Context()
    pool = ProcessPoolExecutor(num_processes, context, _begin, (function,))
    under_way: deque[tuple[Item, Future[Result]]] = deque()

    def next_result() -> Result:
        item, future = under_way.popleft()
        try:
            return future.result()
        except ValueError as error:
            raise ValueError(str(error)) from None
        except RecursionError:  # an item that is nested too deeply to be sent
            return function(item)

    try:
        for item in items:
            if len(under_way) >= UNDER_WAY * num_processes:
                yield next_result()
            under_way.append((item, pool.submit(_work_on, item)))
        while under_way:
            yield next_result()
    except BrokenProcessPool:
        pool.shutdown()
        codes = [process.exitcode for process in context.processes]
        # The pool has ended those that were left.
        code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), -signal.SIGTERM)
        killed = " (killed: is memory full? Try a smaller data.num_processes)" if code == -signal.SIGKILL else ""
        raise RuntimeError(f"a process that prepares data ended with exit code {code}{killed}.") from None
    finally:  # all is done, an error, Ctrl-C, or a caller that has enough
        for process in filter(_Process.is_alive, context.processes):
            process.kill()
        pool.shutdown(cancel_futures=True)


class _Process(SpawnProcess):
    def start(self) -> None:
        # What the child would run again is the module that is `__main__` now; a blocked signal stays so in the child.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Context(SpawnContext):
    """Where a pool gets its processes from."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[_Process] = []

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # pyright: ignore[reportIncompatibleVariableOverride]
        process = _Process(*args, **kwargs)
        self.processes.append(process)
        return process


# In the processes ---------------------------------------------------------------------------------------------------------

_function: Callable[[Any], Any]


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    os.dup2(2, 1)  # what a library prints is not the parent's answer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work_on(item: Any) -> Any:
    try:
        return _function(item)
    except ValueError as error:
        raise ValueError(str(error)) from None
    except Exception:
        raise RuntimeError(f"a process that prepares data failed:\n{traceback.format_exc()}") from None
