"""Handle Ctrl-C and a scheduler's signals: a run ends between steps, after saving, not in the middle of a step.

SIGINT, SIGTERM,   during training: finish the step, save, exit; otherwise: exit at once, since there is nothing to save
SIGHUP
SIGUSR1            during training: save after the step and continue; otherwise: print a message
a second signal    end the process at once; the newest complete checkpoint stays

A signal that was ignored before (`nohup`, a background job of a shell) stays ignored. Python allows handlers only in
the main thread; elsewhere none are installed. Forked processes inherit the handlers, but end as if they had none.
"""

import os
import signal
import stat
import sys
import threading
from abc import ABC, abstractmethod
from types import FrameType
from typing import NoReturn, Self

from lean_ft.system.redaction import redact

SHOW_CURSOR = "\x1b[?25h"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = signal.SIGUSR1


class Stopped(SystemExit):
    """A signal ends the program, unlike an exit that user code requests."""


class _Handlers(ABC):
    """Installs signal handlers while entered; subclasses define what the first stop and a save do."""

    def __init__(self) -> None:
        self._process = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (*STOPPING, SAVING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, action in self._previous.items():
            # None: a handler that C code installed, which Python cannot restore
            signal.signal(number, signal.SIG_DFL if action is None else action)  # pyright: ignore[reportArgumentType]
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if os.getpid() != self._process:  # a forked worker, which has nothing to save
            signal.signal(received, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif received == SAVING:
            self._save()
        else:
            # The default action for a second signal does not need Python, so it works during a long kernel too. A shell
            # then shows exit code 129, 130 or 143.
            for other in self._previous.keys() - {SAVING}:
                signal.signal(other, signal.SIG_DFL)
            self._stop(received)

    @abstractmethod
    def _save(self) -> None: ...
    @abstractmethod
    def _stop(self, received: signal.Signals) -> None: ...


class StopSignals(_Handlers):
    """While entered, stores the first signal to stop in `received`, and SIGUSR1 for `take_save_request`."""

    def __init__(self) -> None:
        super().__init__()
        self.received: signal.Signals | None = None
        self._save_requested = False

    def take_save_request(self) -> bool:
        """Whether SIGUSR1 came since the last call."""
        requested, self._save_requested = self._save_requested, False
        return requested

    def _save(self) -> None:
        self._save_requested = True
        _write("SIGUSR1: will save after this step and continue.")

    def _stop(self, received: signal.Signals) -> None:
        self.received = received
        _write(f"{received.name}: will save and stop after this step. Repeat to stop at once.")


class OutsideTraining(_Handlers):
    """While entered, a signal to stop raises SystemExit(129, 130 or 143) at once, with a message that nothing is lost.

    For the time before a run's first step and after its last; `StopSignals` is active in between.
    """

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command  # restarts the run

    def _save(self) -> None:
        _write("SIGUSR1: not in a training step, so there is nothing to save.")

    def _stop(self, received: signal.Signals) -> NoReturn:
        _write(
            f"{received.name}: stopped outside the training steps; there is nothing to save. "
            f"To restart, or resume from the newest checkpoint:\n            {self._command}"
        )
        raise Stopped(128 + received)


def _write(message: str) -> None:
    if os.environ.get("RANK", "0") != "0":  # a terminal sends Ctrl-C to all processes of a run
        return
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):  # the terminal was closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    # os.write, since the interrupted code may hold the lock of a stream or progress bar
    cursor = SHOW_CURSOR if sys.stdout.isatty() else ""
    os.write(2, f"{cursor}\n{redact(message)}\n".encode(errors="backslashreplace"))
