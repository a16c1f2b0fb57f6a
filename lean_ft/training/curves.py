"""Curves of runs, drawn by matplotlib, the `plots` extra; and the results and settings of runs, for tables.

There is a panel for each metric in metrics.jsonl: loss, held-out loss, the objective's own metrics (`rewards/margins`), learning
rate, memory, speed.
"""

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_ft.system.installation import install_command
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.units import GIB, gibibytes, number
from lean_ft.system.whole_files import write_whole
from lean_ft.training.loggers import as_text, is_number
from lean_ft.training.metrics import Row, has_diverged, parse_line
from lean_ft.training.run_directory import METRICS_FILE, RUN_FILE, read_starts

# Name in metrics.jsonl -> title of its panel. Other numbers come between these two groups.
_FIRST = {"loss": "loss", "eval_loss": "held-out loss"}
_LAST = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "memory": "memory at the peak, GiB",
    "tokens_per_second": "tokens a second",
}
_COUNTS = {"step", "epoch", "tokens", "target_tokens", "target_tokens_per_second", "step_seconds", "skipped"}
_COUNTS |= {"peak_memory_bytes", "rss_bytes", "rss_growth_bytes"}
_SMOOTHED_POINTS = 40  # a panel with a longer curve shows pale curves with running means on top
_WINDOWS = 20  # the longest run has so many windows of the running mean; all runs have the same window
_EXACT = ("lr", "memory")  # not smoothed
_COLUMNS = 2  # of panels


@dataclass(frozen=True)
class Curves:
    """A run's name, its lines of metrics.jsonl, and the settings of its last start."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]

    def points(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and finite values of a metric; `memory` in GiB."""
        if metric == "memory":
            found = [(row["step"], row["peak_memory_bytes"] / GIB) for row in self.rows if row.get("peak_memory_bytes")]
        else:
            found = [(row["step"], row[metric]) for row in self.rows if is_number(row.get(metric))]
        return [step for step, _ in found], [value for _, value in found]

    def results(self) -> dict[str, Any]:
        """Steps, losses, tokens, mean speed and peak memory; None if not measured."""
        steps = [row for row in self.rows if is_number(row.get("tokens"))]
        seconds = sum(row.get("step_seconds") or 0.0 for row in steps)
        tokens = sum(row["tokens"] for row in steps)
        losses, held_out = self.points("loss")[1], self.points("eval_loss")[1]
        return {
            "steps": max((row["step"] for row in self.rows), default=0),
            "loss": losses[-1] if losses else None,
            "diverged": not self.points("reward")[0] and bool(losses) and has_diverged(losses[0], losses),
            "eval_loss": held_out[-1] if held_out else None,
            "lowest_eval_loss": min(held_out, default=None),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else None,
            "peak_memory_bytes": max((row.get("peak_memory_bytes") or 0 for row in steps), default=0) or None,
        }

    def results_as_text(self) -> dict[str, str]:
        """`results` as text for a table."""
        written = {"steps": "{:,}", "tokens": "{:,}", "tokens_per_second": "{:,.0f}"}

        def text(name: str, value: Any) -> str:
            if name in written:
                return written[name].format(value)
            return gibibytes(value) if name == "peak_memory_bytes" else number(value)

        results = self.results()
        diverged = " diverged" if results.pop("diverged") else ""
        shown = {name: "-" if value is None else text(name, value) for name, value in results.items()}
        return {**shown, "loss": shown["loss"] + diverged}


def read_curves(runs: Sequence[Path]) -> list[Curves]:
    """Read run directories, and name them by the shortest paths that distinguish them.

    Raises ValueError if a directory has no metrics.jsonl, or the file has no line yet.
    """
    paths = [path.resolve() for path in runs]
    depth = 1
    while depth < 9 and len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    read = []
    for given, path in zip(runs, paths, strict=True):
        if not (path / METRICS_FILE).is_file():
            beside = path.parent.glob(f"*/{METRICS_FILE}") if path.parent.is_dir() else []
            near = did_you_mean(path.name, [other.parent.name for other in beside])
            raise ValueError(f"{given} has no {METRICS_FILE}. Expected the output_dir of a run.{near}")
        run = _read_run(path, "/".join(path.parts[-depth:]))
        if not run.rows:
            raise ValueError(
                f"{path / METRICS_FILE} has no line yet. Wait until the run has written its first steps (log_every)."
            )
        read.append(run)
    return read


def _read_run(folder: Path, name: str) -> Curves:
    """Read a run, which may have no line yet. Damaged or incomplete lines are skipped."""
    file = folder / METRICS_FILE
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    rows = [row for row in map(parse_line, lines) if row is not None]
    starts = read_starts(folder)
    return Curves(name, rows, starts[-1]["settings"] if starts else {})


def find_runs(folder: Path) -> list[Curves]:
    """The runs in `folder` and its subfolders, named by relative path. Raises ValueError for a damaged run.json."""
    found = []
    for place, folders, files in os.walk(folder):
        if RUN_FILE in files or METRICS_FILE in files:
            path = Path(place)
            found.append(_read_run(path, path.name if path == folder else path.relative_to(folder).as_posix()))
            folders.clear()  # a run has no runs inside
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def differing_settings(runs: Sequence[Curves]) -> list[str]:
    """Names of the settings that differ between the runs whose recipes have them, without `output_dir`.

    A group that is null in one run and set in another, such as `lora`, differs as a whole.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "output_dir")

    def differs(key: str) -> bool:
        values = {as_text(run.settings[key]) for run in runs if key in run.settings}
        return len(values) > 1 or any(name.startswith(f"{key}.") for name in keys)

    return [key for key in keys if differs(key)]


def figure_of(runs: Sequence[Path]) -> Any:
    """The curves as a matplotlib figure, which a notebook shows. Raises ValueError as `draw_curves`."""
    curves = read_curves(runs)
    figure = _figure(curves)

    def as_png() -> bytes:
        figure.savefig(drawn := io.BytesIO(), format="png", dpi=110)
        return drawn.getvalue()

    figure._repr_png_ = as_png  # IPython's protocol
    return figure


def draw_curves(runs: Sequence[Path], picture: Path) -> None:
    """Draw the runs into `picture`, a PNG.

    Raises ValueError if matplotlib is not installed, or a directory is not a run's.
    """
    figure = _figure(read_curves(runs))
    with write_whole(picture) as part:
        figure.savefig(part, format="png", dpi=150)


def _figure(curves: list[Curves]) -> Any:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError(f"pictures need matplotlib. Run {install_command('plots')}") from None

    metrics = _metrics(curves)
    num_rows = -(-len(metrics) // _COLUMNS)
    window = max(run.rows[-1]["step"] for run in curves) / _WINDOWS
    has_means = False
    figure = Figure(figsize=(5.5 * _COLUMNS, 2.9 * num_rows + 0.4 * len(curves)), layout="constrained")
    for place, (metric, title) in enumerate(metrics.items(), start=1):
        axes = figure.add_subplot(num_rows, _COLUMNS, place, sharex=figure.axes[0] if figure.axes else None)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        most_points = max(len(run.points(metric)[0]) for run in curves)
        is_smoothed = most_points > _SMOOTHED_POINTS and metric not in _EXACT
        has_means |= is_smoothed
        for number_of_run, run in enumerate(curves):
            steps, values = run.points(metric)
            color, label = f"C{number_of_run % 10}", run.name
            if is_smoothed:
                axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
                values = _smoothed(steps, values, window)
            marker = "o" if len(values) <= 12 else None
            axes.plot(steps, values, color=color, label=label, linewidth=1.6, marker=marker, markersize=3)
        if metric in ("memory", "tokens_per_second"):
            axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
        if place > len(metrics) - _COLUMNS:
            axes.set_xlabel("optimizer step")
    figure.axes[0].xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    means = f"pale: every step; bold: running mean over about {window:.0f} steps, the same for all runs"
    title = means if has_means else None
    figure.legend(handles, labels, loc="outside upper left", ncols=1, frameon=False, title=title, alignment="left")
    return figure


def _metrics(curves: list[Curves]) -> dict[str, str]:
    """Metric of any run -> title of its panel, in the order of the panels."""
    found = {name: None for run in curves for row in run.rows for name, value in row.items() if is_number(value)}
    own = [name for name in found if name not in _COUNTS and name not in _FIRST and name not in _LAST]
    # A held-out metric follows its training metric: rewards/margins, eval_rewards/margins.
    own.sort(key=lambda name: (name.removeprefix("eval_"), name.startswith("eval_")))
    titles = {name: f"held-out {name[5:]}" if name.startswith("eval_") else name for name in own}
    titles = {name: title.replace("_", " ") for name, title in titles.items()}
    return {
        name: title
        for name, title in {**_FIRST, **titles, **_LAST}.items()
        if any(run.points(name)[0] for run in curves)
    }


def _smoothed(steps: list[int], values: list[float], window: float) -> list[float]:
    """The exponential mean over `window` steps, corrected for the start."""
    mean, weight, before, smooth = 0.0, 0.0, steps[0] - 1 if steps else 0, []
    for step, value in zip(steps, values, strict=True):
        keep, before = math.exp(-(step - before) / window), step
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(mean / weight)
    return smooth
