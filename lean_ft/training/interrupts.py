"""Let Ctrl-C and a scheduler's SIGTERM end a run at a step's end, with a checkpoint, not in the middle of one."""

import os
import signal
import sys
import threading
from types import FrameType

SHOW_CURSOR = "\x1b[?25h"


class StopSignals:
    """While entered, notes the first SIGINT or SIGTERM in `received`; the second one ends the process at once.

    After the first, both signals have their default action again, so the second needs no help from Python and works
    in the middle of a long kernel too. The process then ends as killed by that signal (a shell shows 130 or 143).
    A signal that was ignored on entry (`nohup`, a shell's background job) stays ignored. Off the main thread, where
    Python allows no handlers, nothing is installed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, action in self._previous.items():
            # None: it was installed by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if action is None else action)  # pyright: ignore[reportArgumentType]
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)
        # os.write, as the interrupted code may hold the lock of a stream or of the progress bar.
        cursor = SHOW_CURSOR if sys.stdout.isatty() else ""
        message = f"{self.received.name}: will save and stop when this step is done; once more ends at once."
        os.write(2, f"{cursor}\n{message}\n".encode())
