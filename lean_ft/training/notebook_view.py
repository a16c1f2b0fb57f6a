"""A progress bar and a live curve in a notebook, updated in place."""

import html
import io
import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lean_ft.system.log import say
from lean_ft.training.curves import read_curves

LEAST_SECONDS = 2.0  # between two updates
SHARE_OF_TIME = 0.02  # that updates take of the run, at most


class NotebookView:
    """Shows a run's steps and its reward or loss. An error while drawing ends the view, never the run."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._displays: list[Any] = []  # the bar, and the curve if matplotlib is installed
        self._next = 0.0  # infinity after an error
        self._newest: tuple[int, int, str] | None = None

    def update(self, step: int, total_steps: int, state: str) -> None:
        """Show the newest step, unless it is too soon."""
        started, self._newest = time.perf_counter(), (step, total_steps, state)
        if started < self._next:
            return
        text = f"{step}/{total_steps}  {state}"
        bar = f'<progress value="{step}" max="{total_steps}"></progress> <code>{html.escape(text)}</code>'
        outputs: list[dict[str, Any]] = [{"text/plain": text, "text/html": bar}]
        try:
            if find_spec("matplotlib") is not None:
                outputs.append({"text/plain": f"curve of {step} steps", "image/png": _curve(self._directory)})
            self._display(outputs)
            now = time.perf_counter()
            self._next = now + max(LEAST_SECONDS, (now - started) / SHARE_OF_TIME)
        except Exception as error:
            self._next = math.inf
            say("notebook", f"the bar and the curve stop here: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Show the last step, and an evaluation after it."""
        if self._newest is not None and self._next < math.inf:
            self._next = 0.0
            self.update(*self._newest)

    def _display(self, outputs: list[dict[str, Any]]) -> None:
        from IPython.display import display

        for shown, output in zip(self._displays, outputs, strict=False):
            shown.update(output, raw=True)
        for output in outputs[len(self._displays) :]:
            self._displays.append(display(output, raw=True, display_id=True))


def _curve(run: Path) -> bytes:
    """The reward or the loss until now, with its held-out values, as a PNG."""
    from matplotlib.figure import Figure

    (curves,) = read_curves([run])
    name = "reward" if curves.points("reward")[0] else "loss"
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot(title=name, xlabel="optimizer step")
    axes.plot(*curves.points(name), label="training")
    if (held_out := curves.points(f"eval_{name}"))[0]:
        axes.plot(*held_out, "o--", label="held-out")
        axes.legend(frameon=False)
    figure.savefig(drawn := io.BytesIO(), format="png", dpi=80)
    return drawn.getvalue()
