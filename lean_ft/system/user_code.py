"""Call code of the user: tools, environments, rewards, and formats of rows. All of it has one contract.

- **In**: copies (`copied`), one for each call. What the code changes reaches no other call, no later epoch and no file.
- **Time**: a `Caller` waits for at most `seconds`. Python cannot end a thread, so a late call runs on, without effect.
- **Awaitables**: all are awaited on one event loop, so that connections stay open between functions and runs.
- **Out**: `as_text` and `as_json`: valid text, or JSON types, in copies and within a size.
- **Errors**: everything that the code raises is a `Failed`, also SystemExit, but not a signal that ends the run.
- **Process**: the current folder is restored when no user code runs. A forked process that returns from the call ends,
  because it would continue as a second run. Buffered lines are written before a fork, which would write them again.
- **End**: `closing` closes the objects that were made in a run.

It imports no torch, because each process of a tool imports it.
"""

import asyncio
import atexit
import copy
import dataclasses
import inspect
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import date, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from lean_ft.system.foreign_values import plain, valid_text
from lean_ft.system.interrupts import Stopped

P = ParamSpec("P")
Result = TypeVar("Result")
_ATOMS = frozenset((str, int, float, bool, bytes, type(None)))
_HAVE_A_TEXT = (date, time_of_day, timedelta, Decimal, Fraction, UUID, PurePath)


class Failed(Exception):
    """User code raised `error`. As text: `KeyError: 'a'`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error

    def __str__(self) -> str:
        try:
            return valid_text(f"{type(self.error).__name__}: {self.error}")
        except Exception:  # of its own __str__
            return f"{type(self.error).__name__}: <exception str() failed>"


class TookTooLong(Failed):
    """A call did not return in time. runs_on: whether it could not be ended."""

    def __init__(self, seconds: float, runs_on: bool) -> None:
        super().__init__(TimeoutError())
        self.seconds, self.runs_on = seconds, runs_on

    def __str__(self) -> str:
        return f"it took longer than tools.seconds={self.seconds:g}. Raise the setting if it needs more time"


# Calls --------------------------------------------------------------------------------------------------------------


class CallThread:
    """A daemon thread that makes calls one after another. After a late call, a new thread takes its place."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] | None = None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), daemon=True).start()
        future = Future[Any]()
        self._calls.put((future, work))
        return future

    def end(self) -> None:
        """Let the thread end after its calls."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


@dataclasses.dataclass(frozen=True)
class Caller:
    """Calls user code with copies of its arguments. Without `seconds` and `thread`, the code runs in this thread."""

    what: str
    """Name of the code in messages."""
    seconds: float | None = None
    """The longest time of a call."""
    thread: CallThread | None = None
    """The thread in which all calls of an object run."""

    def call(self, function: Callable[P, Any], /, *arguments: P.args, **named: P.kwargs) -> Any:
        """Call a function, and wait for its result. Raises Failed, and TookTooLong."""
        (result,) = settle([self.begin(function, *arguments, **named)], [self.what], self.seconds)
        if isinstance(result, Failed):
            raise result from result.error
        return result

    def begin(self, function: Callable[P, Any], /, *arguments: P.args, **named: P.kwargs) -> Any:
        """Call a function. Return its result, which may be awaitable, or a Failed."""
        taken = [copied(value) for value in arguments], {name: copied(value) for name, value in named.items()}
        started = _Started(self.what)
        if (self.thread is None and self.seconds is None) or inspect.iscoroutinefunction(function):
            return started.make(function, *taken)
        thread = self.thread or CallThread()
        try:
            return thread.submit(partial(started.make, function, *taken)).result(self.seconds)
        except TimeoutError:
            thread.end()  # it is still busy, so later calls of the object get another thread
            started.leave()
            return TookTooLong(self.seconds or 0.0, runs_on=True)
        finally:
            if self.thread is None:
                thread.end()


def settle(
    results: Sequence[Any],
    names: Sequence[str],
    seconds: float | None = None,
    around: Callable[[], Any] | None = None,
) -> list[Any]:
    """Wait for the results that are awaitable, which run concurrently. An error is a Failed in their place.

    around: makes a context manager that the loop enters for them.
    """
    if not any(map(inspect.isawaitable, results)):
        return list(results)

    started = [_Started(name) for name in names]

    async def together() -> list[Any]:
        with nullcontext() if around is None else around():
            return await asyncio.gather(*(call.await_(value) for call, value in zip(started, results, strict=True)))

    try:
        return _loop.run(together(), seconds)
    except TookTooLong as late:
        for call in started:
            call.leave()
        return [late for _ in results]


def copied(value: object) -> Any:
    """Return a deep copy without shared parts, also if a list has the same row twice. Functions are not copied."""
    if type(value) is dict:
        return {copied(name): copied(inner) for name, inner in value.items()}
    if type(value) is list:
        return list(value) if _ATOMS.issuperset(map(type, value)) else [copied(inner) for inner in value]
    return value if type(value) in _ATOMS or inspect.isroutine(value) else copy.deepcopy(value)


class _Started:
    """A call of user code in this process. The current folder is restored when the last one ends or is left."""

    _lock, _running, _folder, _names, _warned = threading.Lock(), set["_Started"](), "", dict[str, None](), set[str]()

    def __init__(self, what: str) -> None:
        self._what, self._process = what, os.getpid()

    def make(self, function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the function's result, or a Failed."""
        self._enter()
        try:
            return function(*arguments, **named)
        except BaseException as error:
            return self._failed(error)
        finally:
            self.leave()
            self._end_a_fork(0)

    async def await_(self, value: object) -> Any:
        if not inspect.isawaitable(value):
            return value
        self._enter()
        try:
            return await value
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return self._failed(error)
        except BaseException as error:
            return self._failed(error)
        finally:
            self.leave()
            self._end_a_fork(0)

    def _failed(self, error: BaseException) -> Failed:
        if os.getpid() != self._process:
            if not isinstance(error, SystemExit):
                traceback.print_exception(error)
            status = error.code if isinstance(error, SystemExit) else 1
            self._end_a_fork(status if isinstance(status, int) else int(status is not None))
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(error, KeyboardInterrupt | Stopped):
            raise error
        return Failed(error)

    def _end_a_fork(self, status: int) -> None:
        if os.getpid() != self._process:
            _flush()
            os._exit(status)

    def _enter(self) -> None:
        with self._lock:
            if not self._running:
                _Started._folder = _folder_now()
                self._names.clear()
            self._running.add(self)
            self._names[self._what] = None

    def leave(self) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            if self not in self._running:  # left before; the program may be in another folder now
                return
            self._running.discard(self)
            if self._running or _folder_now() == self._folder:
                return
            with suppress(OSError):  # it is gone
                os.chdir(self._folder)
            names = " or ".join(self._names)
            is_new, _ = names not in self._warned, self._warned.add(names)
        if is_new:
            _warn(f"{names} changes the current folder, which is undone after each call.")


def _folder_now() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def _serve(calls: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while (call := calls.get()) is not None:
        future, work = call
        future.set_result(work())
        del call, future, work


class _Loop:
    """The event loop, in its own thread. If a function blocks it, later calls get a new loop."""

    def __init__(self) -> None:
        self._lock, self._loop = threading.Lock(), None

    def run(self, coroutine: Coroutine[Any, Any, Result], seconds: float | None) -> Result:
        """Raises TookTooLong. The coroutine itself raises nothing."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        try:
            return future.result(seconds)
        except TimeoutError:
            raise TookTooLong(seconds or 0.0, runs_on=not (future.cancel() and self._answers())) from None
        except BaseException:  # a signal
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop

    def _answers(self) -> bool:
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._running()).result(1)
        except TimeoutError:
            self._loop = None
            return False
        return True


_loop = _Loop()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or None
            stream.flush()


def _after_fork() -> None:
    """A forked process has no other threads, so it needs a new loop and a free lock."""
    global _loop
    _loop, _Started._lock = _Loop(), threading.Lock()
    _Started._running.clear()


os.register_at_fork(before=_flush, after_in_child=_after_fork)


def _warn(text: str) -> None:
    from lean_ft.system.log import say  # here, because processes of tools do not need it

    say("WARNING", text)


# Results ------------------------------------------------------------------------------------------------------------


def as_text(value: object, what: str, most_characters: int) -> str:
    """Return a result as valid text: a text as it is, any other value as JSON. Longer text is cut, with a note.

    what: the function's name in messages. Raises ValueError that names the function and the type for any other object.
    """
    if not isinstance(value, str):
        made = as_json(value, what)
        value = made if isinstance(made, str) else json.dumps(made, ensure_ascii=False)
    return cut(str.__str__(value), most_characters)  # of an enum too


def as_json(value: object, what: str, otherwise: Callable[[Any], str] | None = None) -> Any:
    """Return a copy of a result as JSON types with valid text. Numbers that are not finite become texts.

    Sets become sorted lists; arrays, dataclasses, enums and models of pydantic become their values; dates, paths,
    decimal numbers and UUIDs become texts. otherwise: returns the text of other objects. Raises ValueError as
    `as_text`.
    """

    def unpack(item: object) -> Any:
        with suppress(Exception):
            return _unpacked(item)
        if otherwise is not None:
            return otherwise(item)
        holder = "" if item is value else f"a {_type_name(value)} with "
        raise ValueError(f"{what} returned {holder}a {_type_name(item)}, which is neither text nor JSON")

    made = plain(value, f"the result of {what}", unpack, repair=True)
    try:
        json.dumps(made, allow_nan=False)
    except ValueError:
        made = json.loads(json.dumps(made), parse_constant=str)
    return made


def _unpacked(value: Any) -> Any:
    if isinstance(value, type):
        raise TypeError
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, _HAVE_A_TEXT):
        return str(value)
    return value.model_dump() if hasattr(value, "model_dump") else value.tolist()


def _type_name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def error_text(error: BaseException, most_characters: int) -> str:
    """Return the text of an error in place of a result."""
    return cut(f"error: {traceback.format_exception_only(error)[-1].strip()}", most_characters)


def cut(text: str, most_characters: int) -> str:
    """Return valid text of at most so many characters, and a note if there were more."""
    if len(text) <= most_characters:
        return valid_text(text)
    return f"{valid_text(text[:most_characters])}\n[cut after {most_characters:,} of {len(text):,} characters]"


def finite_number(value: Any) -> float | None:
    """Return a number of Python, NumPy or torch, or None. Raises ValueError for anything else, NaN and infinity."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # a tensor with several values, or 10**400
        value = value.item() if hasattr(value, "item") else value
        if value is None:
            return None
        if not isinstance(value, str | bytes) and abs(number := float(value)) < float("inf"):
            return number
    raise ValueError(f"{valid_text(str(value))[:80]}; expected a finite number or None")


# The end ------------------------------------------------------------------------------------------------------------

_to_close: list[Callable[[], None]] = []


def close_later(close: Callable[[], None]) -> None:
    """Call `close` when the run ends, or without a run when the program ends."""
    if not _to_close:
        atexit.register(_close_down_to, 0)
    _to_close.append(close)


@contextmanager
def closing() -> Iterator[None]:
    """Context manager that calls what its block gave to `close_later`, also after an error or a signal."""
    before = len(_to_close)
    try:
        yield
    finally:
        _close_down_to(before)


def _close_down_to(number: int) -> None:
    while len(_to_close) > number:
        _to_close.pop()()


def close_objects(objects: Sequence[tuple[Any, CallThread]], what: str, seconds: float) -> None:
    """Call `close` of the objects that have it, each in its thread, for `seconds` in all. Errors are warnings."""
    limit = time.monotonic() + seconds
    closed = [
        (item.close, thread, _Started(what)) for item, thread in objects if callable(getattr(item, "close", None))
    ]
    futures = [thread.submit(partial(started.make, close, (), {})) for close, thread, started in closed]
    problems = dict[str, None]()
    for future, (_, _, started) in zip(futures, closed, strict=True):
        try:
            (result,) = settle([future.result(max(0.0, limit - time.monotonic()))], [what], seconds)
        except TimeoutError:
            started.leave()
            result = TookTooLong(seconds, runs_on=True)
        if isinstance(result, Failed):
            problems[str(result)] = None
    for _, thread in objects:
        thread.end()
    for problem in problems:
        _warn(f"{what} failed in close: {problem}")
