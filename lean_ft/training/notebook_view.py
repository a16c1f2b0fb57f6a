"""A progress bar and a live curve in a notebook, updated in place."""

import html
import math
import sys
import time
from pathlib import Path
from typing import Any

from lean_ft.system.log import say
from lean_ft.training.curves import live_picture

LEAST_SECONDS = 2.0  # between two updates
SHARE_OF_TIME = 0.02  # that updates take of the run, at most


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookView:
    """Shows a run's steps and its reward or loss. An error while drawing ends the view, never the run."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._displays: list[Any] = []  # the bar, and the curve if matplotlib is installed

    def show(self, step: int, total_steps: int, text: str) -> float:
        """Show the newest step. Return the least number of seconds until the next call."""
        started = time.perf_counter()
        bar = f'<progress value="{step}" max="{total_steps}"></progress> <code>{html.escape(text)}</code>'
        outputs: list[dict[str, Any]] = [{"text/plain": text, "text/html": bar}]
        try:
            if (picture := live_picture(self._directory)) is not None:
                outputs.append({"text/plain": f"curve of {step} steps", "image/png": picture})
            self._display(outputs)
        except Exception as error:
            say("notebook", f"the bar and the curve stop here: {type(error).__name__}: {error}")
            return math.inf
        return max(LEAST_SECONDS, (time.perf_counter() - started) / SHARE_OF_TIME)

    def _display(self, outputs: list[dict[str, Any]]) -> None:
        from IPython.display import display

        for shown, output in zip(self._displays, outputs, strict=False):
            shown.update(output, raw=True)
        for output in outputs[len(self._displays) :]:
            self._displays.append(display(output, raw=True, display_id=True))
