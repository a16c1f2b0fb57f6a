"""The user's functions as tools: their JSON schemas, and their calls, side by side.

A call never ends the run. If it fails, the model gets a text that begins with `error:` as its result.
"""

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import torch

from lean_ft.settings import ToolsConfig
from lean_ft.system.foreign_values import plain
from lean_ft.system.log import say
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.tool_process import outcome_of
from lean_ft.system.unchanged_process import UnchangedProcess
from lean_ft.system.user_code import Caller, CallThread, TookTooLong, error_text
from lean_ft.system.user_functions import PASSED, load_function, without_os_exit
from lean_ft.tools.calls import Call
from lean_ft.tools.schemas import json_schema

MOST_AT_ONCE = 64  # calls; further ones wait for their turn
PROCESSES_A_CORE = 4  # with tools.process
Outcome = tuple[str, bool]
"""The result of a call, and whether the call failed."""
_ANSWER = "from lean_ft.system.tool_process import answer_a_call; answer_a_call()"


class Tools:
    """Functions that a model may call, with their JSON schemas."""

    def __init__(self, settings: ToolsConfig, methods: Sequence[Callable[..., Any]] = ()) -> None:
        """methods: of an environment. They always run in this process.

        Raises ValueError for a function that cannot be loaded or described, and for two of one name.
        """
        self._settings, self._unchanged = settings, UnchangedProcess(torch.device("cpu"))
        self._functions: dict[str, tuple[str, Callable[..., Any]]] = {}  # with its text in the settings
        self.schemas: list[dict[str, Any]] = []
        for text, method in [*((text, None) for text in settings.functions), *(("", method) for method in methods)]:
            try:
                self._add(text, method or load_function(text))
            except ValueError as error:
                raise ValueError(f"{'environment' if method else 'tools.functions'}: {error}") from error
        most = (os.cpu_count() or 1) * PROCESSES_A_CORE if settings.process else MOST_AT_ONCE
        self._slots, self._reported = Semaphore(most), set[str]()
        self._processes = set[subprocess.Popen[bytes]]()
        atexit.register(self._end_processes)
        self._folder = Path.cwd()  # a call may change it

    def _add(self, text: str, function: Callable[..., Any]) -> None:
        schema = json_schema(function)
        name = schema["function"]["name"]
        plain(schema, f"the schema of {name}")
        if name in self._functions:
            other = text or "a method of the environment"
            raise ValueError(f"{self._functions[name][0]} and {other} are both named {name}. Rename one.")
        if self._settings.process and text in PASSED:
            raise ValueError(
                f"tools.process=true needs functions in files, and {name} was passed from Python. Name its file: "
                f"tools=my_tools.py:{name}."
            )
        self._functions[name] = text, function
        self.schemas.append(schema)

    @contextmanager
    def unchanged_process(self, seed: int) -> Iterator[None]:
        """Context manager for `results`. It undoes what tools change in this process, and ends theirs."""
        with without_os_exit(), self._unchanged("", seed):
            try:
                yield
            finally:
                self._end_processes()

    def _end_processes(self) -> None:
        for process in tuple(self._processes):
            _kill(process)

    def results(
        self,
        calls: Sequence[Call],
        known: Mapping[int, Outcome] = {},
        finished: Callable[[int, str, bool], None] = lambda *_: None,
        methods: Sequence[Callable[..., Any]] = (),
        thread: CallThread | None = None,
    ) -> list[Outcome]:
        """Run the calls of a turn side by side, each in a thread.

        known: outcomes of earlier times, by the places of calls, which are not made again. finished: called with the
        place of a call and its outcome, as soon as there is one. methods: of the environment of this turn, which run
        one after another in its `thread`, because they share its state.
        """
        by_name = {method.__name__: method for method in methods}
        outcomes, done = dict(known), queue.SimpleQueue[tuple[int, Outcome]]()

        def make(places: Sequence[int]) -> None:
            for i in places:
                try:
                    done.put((i, self._outcome(calls[i], by_name.get(calls[i].name), thread)))
                except BaseException as error:  # such as too many processes
                    done.put((i, (error_text(error, self._settings.result_characters), True)))

        made = list[int]()
        for i, call in enumerate(calls):
            if i not in outcomes and (refusal := self._refusal(call, i)):
                outcomes[i] = refusal, True
            elif i not in outcomes:
                made.append(i)
        in_order = [i for i in made if calls[i].name in by_name]
        for places in filter(None, [in_order, *([i] for i in made if i not in in_order)]):
            Thread(target=make, args=(places,), daemon=True).start()
        while len(outcomes) < len(calls):
            i, outcome = done.get()
            outcomes[i] = outcome
            finished(i, *outcome)
        return [outcomes[i] for i in range(len(calls))]

    def _refusal(self, call: Call, place: int) -> str:
        """The error of a call that cannot run; empty if it can."""
        if call.error:
            return call.error
        if place >= self._settings.parallel:
            return f"error: this turn has too many tool calls. At most {self._settings.parallel} are made."
        if call.name not in self._functions:
            return (
                f"error: unknown tool '{call.name}'.{did_you_mean(call.name, self._functions)} Tools: "
                f"{', '.join(self._functions)}."
            )
        return ""

    def _outcome(self, call: Call, method: Callable[..., Any] | None, thread: CallThread | None) -> Outcome:
        """Make a call: in a process, on the event loop, or in a thread."""
        seconds, most = self._settings.seconds, self._settings.result_characters
        text, function = self._functions[call.name]
        with self._slots:
            if self._settings.process and text:
                return self._in_process(text, call.arguments)
            caller = Caller(f"the tool {call.name}", seconds, None if method is None else thread)
            try:
                return outcome_of(caller, method or function, call.arguments, most)
            except TookTooLong as late:
                if late.runs_on and call.name not in self._reported:
                    self._reported.add(call.name)
                    remedy = "tools.process=true runs each call in a process that is killed then."
                    say("WARNING", f"a call of the tool {call.name} runs on after its {seconds:g} s. {remedy}")
                return self._too_long

    @property
    def _too_long(self) -> Outcome:
        return f"error: the call took longer than {self._settings.seconds:g} s.", True

    def _in_process(self, function: str, arguments: dict[str, Any]) -> Outcome:
        """Run a call in a new process. `function`: FILE.py:FUNCTION."""
        path = [str(self._folder / folder) for folder in sys.path]
        command, pipe = [sys.executable, "-P", "-c", _ANSWER], subprocess.PIPE
        theirs, ours = os.pipe()  # the process ends when this one does, which closes `ours`
        request = {"function": function, "arguments": arguments, "pipe": theirs}
        request["characters"] = self._settings.result_characters
        try:
            # A new session keeps a terminal's Ctrl-C for the run, and ends with the processes that the tool started.
            process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                cwd=self._folder,
                start_new_session=True,
                pass_fds=[theirs],
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        with process:
            self._processes.add(process)
            try:
                answer, _ = process.communicate(json.dumps(request).encode(), timeout=self._settings.seconds)
                text, failed = json.loads(answer)
                return text, failed
            except subprocess.TimeoutExpired:
                return self._too_long
            except ValueError:
                code = process.returncode
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"error: the tool ended its process with {how}.", True
            finally:
                _kill(process)
                os.close(ours)
                self._processes.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
