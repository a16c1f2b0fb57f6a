"""Parallel map over worker processes: results in order, with a bounded number of items in memory.

Workers are spawned, so threads and devices of the parent process are safe. Unlike `multiprocessing` workers, they do
not run the user's script again, and they ignore Ctrl-C.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import connection, parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from lean_ft.system.environment import without_current_folder
from lean_ft.system.user_functions import run_file

UNDER_WAY = 2  # items per process: one in progress, one queued

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item], num_processes: int) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order. `function` is pickled once per process.

    A ValueError of `function` is raised here at its item's position; any other failure in a process raises RuntimeError
    with its traceback. The processes always end with this generator.
    """
    context = _Context()
    with without_current_folder():  # its locks start a process
        pool = ProcessPoolExecutor(num_processes, context, _begin, (function,))
    under_way: deque[tuple[Item, Future[Result]]] = deque()

    def next_result() -> Result:
        item, future = under_way.popleft()
        try:
            return future.result()
        except ValueError as error:
            raise ValueError(str(error)) from None
        except RecursionError:  # the item is nested too deeply to be pickled
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
        # The pool terminates the remaining processes (SIGTERM).
        code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), -signal.SIGTERM)
        killed = (
            " (killed, perhaps for lack of memory; try a smaller data.num_processes)" if code == -signal.SIGKILL else ""
        )
        raise RuntimeError(f"a data preparation process ended with exit code {code}{killed}.") from None
    finally:  # also after an error, Ctrl-C, or if the caller stops early
        for process in filter(_Process.is_alive, context.processes):
            process.kill()
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class FromFiles:
    """A function with classes of user code, such as a recipe's file, which another process runs before it reads the
    function."""

    files: dict[str, str]
    """Module -> its file."""
    function: Callable[[Any], Any]

    def __call__(self, item: Any) -> Any:
        return self.function(item)

    def __reduce__(self) -> tuple[Any, ...]:
        return FromFiles, (_Files(self.files), self.function)  # arguments are read in order


class _Files(dict[str, str]):
    def __reduce__(self) -> tuple[Any, ...]:
        return _run_files, (dict(self),)


def _run_files(files: dict[str, str]) -> dict[str, str]:
    """Run the files that an import of their modules would not find, such as a recipe's."""
    with contextlib.redirect_stdout(sys.stderr):
        for name, file in files.items():
            spec = None
            with contextlib.suppress(ModuleNotFoundError):
                spec = find_spec(name)
            if spec is None or spec.origin != file:
                run_file(Path(file), name)
    return files


class _Process(SpawnProcess):
    def start(self) -> None:
        # Replace `__main__`, since the child would run it again. The child inherits the blocked SIGINT.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with without_current_folder():
                super().start()
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Context(SpawnContext):
    """Creates and records the pool's processes."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[_Process] = []

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # pyright: ignore[reportIncompatibleVariableOverride]
        process = _Process(*args, **kwargs)
        self.processes.append(process)
        return process


# Worker processes -----------------------------------------------------------------------------------------------------

_function: Callable[[Any], Any]


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    os.dup2(2, 1)  # keep libraries' prints out of the parent's stdout
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
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
        raise RuntimeError(f"a data preparation process failed:\n{traceback.format_exc()}") from None
