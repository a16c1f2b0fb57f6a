"""The user's functions as tools: their JSON schemas, and calls of many episodes side by side.

A call never ends the run. If it fails, the model gets a text that begins with `error:` as its result.
"""

import asyncio
import copy
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import torch

from lean_ft.settings import ToolsConfig
from lean_ft.system.log import say
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.tool_process import as_text, awaited, error_text
from lean_ft.system.unchanged_process import UnchangedProcess
from lean_ft.system.user_functions import PASSED, load_function, without_os_exit
from lean_ft.tools.calls import Call
from lean_ft.tools.schemas import json_schema

MOST_THREADS = 64  # functions that run at once; async ones are not counted
_REMEDY = "tools.process=true runs each call in a process that is killed then."
_ANSWER = "from lean_ft.system.tool_process import answer_a_call; answer_a_call()"


class Tools:
    """Functions that a model may call. `num_calls` and `num_errors` count the calls so far."""

    def __init__(self, settings: ToolsConfig, device: torch.device | None = None) -> None:
        """device: whose random generator the tools must not change, beside the CPU's.

        Raises ValueError for a function that cannot be loaded or described, and for two of one name.
        """
        self._settings, self._unchanged = settings, UnchangedProcess(device or torch.device("cpu"))
        self._functions: dict[str, tuple[str, Callable[..., Any]]] = {}  # with its text in the settings
        self.schemas: list[dict[str, Any]] = []
        self.num_calls = self.num_errors = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # one for the whole run, since tools keep their connections
        self._reported, self._processes = set[str](), set[subprocess.Popen[bytes]]()
        for text in settings.functions:
            try:
                function = load_function(text, _planned)
                schema = json_schema(function)
            except ValueError as error:
                raise ValueError(f"tools.functions: {error}") from error
            name = schema["function"]["name"]
            if name in self._functions and function is not _planned:
                raise ValueError(
                    f"tools.functions: {self._functions[name][0]} and {text} are both named {name}. Rename one."
                )
            if settings.process and text in PASSED:
                raise ValueError(
                    f"tools.process=true needs functions in files, and {name} was passed from Python. Name its file: "
                    f"tools.functions=[my_tools.py:{name}]."
                )
            self._functions[name] = text, function
            self.schemas.append(schema)

    def with_methods(self, methods: Sequence[Callable[..., Any]]) -> "Tools":
        """These tools and the methods of an environment, which always run in this process.

        Raises ValueError for a method that cannot be described, or has the name of another tool.
        """
        both, schemas = self.bound(methods), [json_schema(method) for method in methods]
        for schema in schemas:
            if (name := schema["function"]["name"]) in self._functions:
                raise ValueError(f"{self._functions[name][0]} has the name of a method of the environment. Rename it.")
        both.schemas = self.schemas + schemas
        return both

    def bound(self, methods: Sequence[Callable[..., Any]]) -> "Tools":
        """These tools with the methods of another environment of the same class."""
        if any(map(inspect.iscoroutinefunction, methods)):
            self._running_loop()  # one for all environments
        both = copy.copy(self)
        both._functions = self._functions | {method.__name__: ("", method) for method in methods}
        return both

    @contextmanager
    def unchanged_process(self, seed: int) -> Iterator[None]:
        """Context manager for `results` in several threads. It undoes what tools change in this process, and ends theirs."""
        with without_os_exit(), self._unchanged("", seed):
            try:
                yield
            finally:
                self._end_processes()

    def results(
        self,
        calls: Sequence[Call],
        known: Mapping[int, tuple[str, bool]],
        finished: Callable[[int, str, bool], None] = lambda *_: None,
    ) -> list[tuple[str, bool]]:
        """Run the calls of a turn side by side. Return each result, and whether the call failed.

        known: what this returned before for some of the calls, by their places; they are not made again. finished: called with the place of a call and its result, as soon as there is one. It may run in any thread.
        """
        refused = [self._refusal(call, i) for i, call in enumerate(calls)]
        places = [i for i, text in enumerate(refused) if not text and i not in known]
        jobs = [calls[i] for i in places]
        found = dict(zip(places, self._outcomes(jobs, lambda i, *result: finished(places[i], *result)), strict=True))
        return [{**known, **found}.get(i, (text, True)) for i, text in enumerate(refused)]

    def run(self, calls: Sequence[Sequence[Call]]) -> list[list[str]]:
        """Run the calls of each episode's turn, all side by side. Return their results in the same order.

        KeyboardInterrupt is raised. All other errors become results.
        """
        refused = [[self._refusal(call, i) for i, call in enumerate(turn)] for turn in calls]
        jobs = [
            call
            for turn, texts in zip(calls, refused, strict=True)
            for call, text in zip(turn, texts, strict=True)
            if not text
        ]
        names = ", ".join(sorted({call.name for call in jobs}))
        with without_os_exit(), self._unchanged(f"the tool {names}", zlib.crc32(repr(jobs).encode())):
            try:
                found = self._outcomes(jobs)
            finally:
                self._end_processes()
        self.num_calls += sum(map(len, calls))
        self.num_errors += sum(map(len, calls)) - len(jobs) + sum(failed for _, failed in found)
        texts = iter(text for text, _ in found)
        return [[text or next(texts) for text in turn] for turn in refused]

    def _end_processes(self) -> None:
        for process in tuple(self._processes):
            _kill(process)

    def _refusal(self, call: Call, place: int) -> str:
        """The error of a call that cannot run; empty if it can."""
        if call.error:
            return call.error
        if place >= self._settings.parallel:
            return f"error: this turn has too many tool calls. At most {self._settings.parallel} are made."
        if call.name not in self._functions:
            return f"error: unknown tool '{call.name}'.{did_you_mean(call.name, self._functions)} Tools: {', '.join(self._functions)}."
        parameters = inspect.signature(self._functions[call.name][1]).parameters
        for name in call.arguments:
            if name not in parameters:
                known = ", ".join(parameters) or "none"
                return f"error: {call.name} has no parameter '{name}'.{did_you_mean(name, parameters)} Parameters: {known}."
        required = [name for name, one in parameters.items() if one.default is one.empty]
        missing = [name for name in required if name not in call.arguments]
        return f"error: {call.name} needs the parameter {', '.join(missing)}." if missing else ""

    def _outcomes(
        self, jobs: Sequence[Call], finished: Callable[[int, str, bool], None] = lambda *_: None
    ) -> list[tuple[str, bool]]:
        """The text of each result, and whether the call failed."""
        settings, outcomes = self._settings, [("", False)] * len(jobs)
        # A process has its own limit, from its start on.
        patience = [inf if self._has_process(call) else settings.seconds for call in jobs]
        most = (os.cpu_count() or 1) + 1 if settings.process else MOST_THREADS
        waiting = deque(sorted(enumerate(jobs), key=lambda job: not self._is_async(job[1])))
        running = dict[Future[Any], tuple[int, float]]()
        while waiting or running:
            while waiting and (len(running) < most or self._is_async(waiting[0][1])):
                i, call = waiting.popleft()
                running[self._start(call)] = i, time.monotonic() + patience[i]
            left = min(until for _, until in running.values()) - time.monotonic()
            wait(running, None if left == inf else max(left, 0), FIRST_COMPLETED)
            for future, (i, until) in tuple(running.items()):
                if future.done():
                    outcomes[i] = self._outcome(future.result())
                elif time.monotonic() >= until:
                    outcomes[i] = self._left_behind(jobs[i], future)
                else:
                    continue
                finished(i, *outcomes[i])
                del running[future]
        return outcomes

    def _has_process(self, call: Call) -> bool:
        return self._settings.process and bool(self._functions[call.name][0])

    def _is_async(self, call: Call) -> bool:
        function = self._functions[call.name][1]
        return not self._has_process(call) and inspect.iscoroutinefunction(function)

    def _start(self, call: Call) -> Future[Any]:
        """Begin a call, in a daemon thread or on the loop. Its future gets the result's text or the error, and never raises."""
        text, function = self._functions[call.name]
        arguments, most = copy.deepcopy(call.arguments), self._settings.result_characters
        if self._is_async(call):

            async def settled() -> str | BaseException:
                try:
                    return as_text(await function(**arguments), most)
                except asyncio.CancelledError:
                    raise
                except BaseException as error:  # SystemExit too: it would end the loop
                    return error

            return asyncio.run_coroutine_threadsafe(settled(), self._running_loop())
        future = Future[Any]()

        def work() -> None:
            try:
                result = (
                    self._in_process(text, arguments)
                    if self._has_process(call)
                    else as_text(function(**arguments), most)
                )
            except BaseException as error:  # SystemExit too: it would end the thread without a result
                result = error
            future.set_result(result)

        threading.Thread(target=work, daemon=True).start()
        return future

    def _outcome(self, result: str | tuple[str, bool] | BaseException) -> tuple[str, bool]:
        if isinstance(result, KeyboardInterrupt):
            raise result
        if isinstance(result, BaseException):
            return error_text(result, self._settings.result_characters), True
        return (result, False) if isinstance(result, str) else result

    def _left_behind(self, call: Call, future: Future[Any]) -> tuple[str, bool]:
        """Stop waiting for a call that takes too long. An async function is cancelled. Python cannot end a thread, so other functions run on."""
        ends = self._is_async(call) and future.cancel()
        if ends and self._loop is not None:
            try:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(1)
            except TimeoutError:  # the function blocks the loop, so others get a new one
                self._loop, ends = None, False
        if not ends and call.name not in self._reported:
            self._reported.add(call.name)
            say("WARNING", f"a call of the tool {call.name} runs on after its {self._settings.seconds:g} s. {_REMEDY}")
        return self._too_long, True

    @property
    def _too_long(self) -> str:
        return f"error: the call took longer than {self._settings.seconds:g} s."

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop

    def awaited(self, value: Any) -> Any:
        """Return the value of an awaitable, from the loop of all async tools, and other values unchanged."""
        if not inspect.isawaitable(value):
            return value
        return asyncio.run_coroutine_threadsafe(awaited(value), self._running_loop()).result()

    def _in_process(self, function: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Run a call in a new process. `function`: FILE.py:FUNCTION."""
        asked = {"function": function, "arguments": arguments, "characters": self._settings.result_characters}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)}
        # A new session keeps a terminal's Ctrl-C for the run, and ends with the processes that the tool started.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _ANSWER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._processes.add(process)
        try:
            answer, _ = process.communicate(json.dumps(asked).encode(), timeout=self._settings.seconds)
            found = json.loads(answer)
            return found["text"], found["failed"]
        except subprocess.TimeoutExpired:
            return self._too_long, True
        except ValueError:
            code = process.returncode
            return (
                f"error: the tool ended its process with {f'signal {-code}' if code < 0 else f'exit code {code}'}.",
                True,
            )
        finally:
            _kill(process)
            self._processes.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _planned() -> None:
    """A tool.

    A plan runs no user code, so this function takes the place of each tool.
    """
