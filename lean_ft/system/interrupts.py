"""Let Ctrl-C and a scheduler's signals end a run where everything is saved, not in the middle of a step.

SIGINT, SIGTERM   in training: finish the step, save, exit; elsewhere: exit at once, as there is nothing to save
SIGUSR1           in training: save when the step is done and go on; elsewhere: only a word
a second one      ends the process at once; the newest whole checkpoint stays

A signal that was ignored on entry (`nohup`, a shell's background job) stays ignored. Off the main thread, where Python
allows no handlers, nothing is installed. Processes forked meanwhile inherit handlers, and end as if they had none.
"""

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from types import FrameType
from typing import NoReturn, Self

SHOW_CURSOR = "\x1b[?25h"
STOPPING = (signal.SIGINT, signal.SIGTERM)
SAVING = signal.SIGUSR1


class _Handlers(ABC):
    """Handlers that hold while entered; what they do for a first stop and for a save, those below say."""

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
            # None: it was installed by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if action is None else action)  # pyright: ignore[reportArgumentType]
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if os.getpid() != self._process:  # a worker forked from the run, which has nothing to save
            signal.signal(received, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif received == SAVING:
            self._save()
        else:
            # The second signal needs no help from Python, so it works in the middle of a long kernel too. The process
            # then ends as killed by that signal (a shell shows 130 or 143).
            for other in self._previous.keys() - {SAVING}:
                signal.signal(other, signal.SIG_DFL)
            self._stop(received)

    @abstractmethod
    def _save(self) -> None: ...
    @abstractmethod
    def _stop(self, received: signal.Signals) -> None: ...


class StopSignals(_Handlers):
    """While entered, notes the first SIGINT or SIGTERM in `received`, and SIGUSR1 for `take_save_request`."""

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
        _write("SIGUSR1: will save when this step is done, and go on.")

    def _stop(self, received: signal.Signals) -> None:
        self.received = received
        _write(f"{received.name}: will save and stop when this step is done; once more ends at once.")


class OutsideTraining(_Handlers):
    """While entered, SIGINT and SIGTERM raise SystemExit(130 or 143) at once, with a line that says why that is safe.

    For all that a run does before its first step and after its last; `StopSignals` takes over in between.
    """

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command  # that starts the run again

    def _save(self) -> None:
        _write("SIGUSR1: no step is under way, so there is nothing to save.")

    def _stop(self, received: signal.Signals) -> NoReturn:
        _write(
            f"{received.name}: stopped outside the training steps, where there is nothing to save. "
            f"To start again, or go on from the newest checkpoint:\n            {self._command}"
        )
        raise SystemExit(128 + received)


def _write(message: str) -> None:
    # os.write, as the interrupted code may hold the lock of a stream or of the progress bar.
    cursor = SHOW_CURSOR if sys.stdout.isatty() else ""
    os.write(2, f"{cursor}\n{message}\n".encode())
