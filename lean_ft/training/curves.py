"""Curves of runs, drawn by matplotlib, the `plots` extra (as text: text_curves.py); and the results and settings of
runs, for tables.

There is a panel for each metric in metrics.jsonl, with its held-out values: the objective's progress first (rewards, or
the loss), then its other metrics, learning rate, memory and speed. A metric with a single value becomes a line of text.
"""

import io
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lean_ft.system.installation import install_command
from lean_ft.system.redaction import on_one_line
from lean_ft.system.run_directory import METRICS_FILE, RUN_FILE, read_rows, read_starts
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.units import GIB, gibibytes, number
from lean_ft.system.whole_files import write_whole
from lean_ft.training.by_source import last_losses, shown_losses, title_of, undrawn
from lean_ft.training.loggers import as_text
from lean_ft.training.metrics import EXACT_MATCH, HEADLINES, Row, has_diverged, is_number
from lean_ft.training.state import RunState, state_of

# Name in metrics.jsonl -> title of its panel. The objective's headlines come first, other numbers before these.
_LAST = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "memory": "memory at the peak, GiB",
    "tokens_per_second": "tokens a second",
}
_COUNTS = {"step", "epoch", "tokens", "target_tokens", "target_tokens_per_second", "step_seconds", "skipped"}
_COUNTS |= {"peak_memory_bytes", "rss_bytes", "rss_growth_bytes", "eval_questions"}
_SMOOTHED_POINTS = 40  # a panel with a longer curve shows pale curves with means on top
_SIDE = 1 / 40  # of the longest run: a mean is over the steps that are at most so far away, in all runs
_MOST_MEANS = 500  # points of a bold curve
_TITLES = {EXACT_MATCH: "held-out questions right"}  # instead of the short name
# Shares of right answers, labels, pairs, passages of a query, or passages of a row.
_RIGHT = (EXACT_MATCH, "eval_accuracy", "eval_rewards/accuracies", "eval_recall@1", "eval_accuracy@1")
_EXACT = ("lr", "memory")  # not smoothed
MAX_COLUMNS = 3  # of panels
_HELD_OUT: dict[str, Any] = {"linestyle": "--", "marker": "o", "markersize": 5, "markerfacecolor": "white"}

Points = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Curves:
    """A run's name, its lines of metrics.jsonl, and the recipe and settings of its last start."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]
    state: RunState | None = None
    """None without a run.json."""

    def points(self, metric: str) -> Points:
        """Steps and finite values of a metric; `memory` in GiB."""
        if metric == "memory":
            points = [
                (row["step"], row["peak_memory_bytes"] / GIB) for row in self.rows if row.get("peak_memory_bytes")
            ]
        else:
            points = [(row["step"], row[metric]) for row in self.rows if is_number(row.get(metric))]
        return [step for step, _ in points], [value for _, value in points]

    def results(self) -> dict[str, Any]:
        """State, losses, rewards, shares of right answers, tokens, mean speed and peak memory; None if not measured."""
        steps = [row for row in self.rows if is_number(row.get("tokens"))]
        seconds = sum(row.get("step_seconds") or 0.0 for row in steps)
        tokens = sum(row["tokens"] for row in steps)
        losses, held_out = self.points("loss")[1], self.points("eval_loss")[1]
        asked, right = next((points for name in _RIGHT if (points := self.points(name))[1]), ([], []))
        rewards, held_out_rewards = self.points("reward")[1], self.points("eval_reward")[1]
        return {
            "state": self.state and self.state.name,
            "error": self.state and self.state.error,
            "steps": max((row["step"] for row in self.rows), default=0),
            "total_steps": self.state and self.state.total_steps,
            "loss": losses[-1] if losses else None,
            "diverged": not rewards and bool(losses) and has_diverged(losses[0], losses),
            "eval_loss": held_out[-1] if held_out else None,
            "lowest_eval_loss": min(held_out, default=None),
            "right": right[-1] if right and asked[-1] > 0 else None,  # not before training
            "first_right": right[0] if right else None,
            "reward": rewards[-1] if rewards else None,
            "eval_reward": held_out_rewards[-1] if held_out_rewards else None,
            "highest_eval_reward": max(held_out_rewards, default=None),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else None,
            "peak_memory_bytes": max((row.get("peak_memory_bytes") or 0 for row in steps), default=0) or None,
            **({"eval_loss_by_source": of_sources} if (of_sources := last_losses(self.rows)) else {}),
        }

    def results_as_text(self) -> dict[str, str]:
        """`results` by column of a table: the reward of a run that has rewards, and the loss of other runs."""
        results = self.results()
        of_sources = results.get("eval_loss_by_source")
        is_online = results["reward"] is not None
        names = (
            ("reward", "eval_reward", "highest_eval_reward") if is_online else ("loss", "eval_loss", "lowest_eval_loss")
        )
        last, held_out, best = ("-" if results[name] is None else number(results[name]) for name in names)
        metric_name, speed, peak = (
            f"{names[0]} " if last != "-" else "",
            results["tokens_per_second"],
            results["peak_memory_bytes"],
        )
        return {
            "state": "-" if self.state is None else str(self.state),
            "steps": f"{results['steps']:,}",
            "result": f"{metric_name}{last}{' diverged' if results['diverged'] else ''}",
            "right": "-" if results["right"] is None else f"{results['right']:.1%}",
            "held-out": held_out,
            "best": best,
            "peak": "-" if peak is None else gibibytes(peak),
            "tokens/s": "-" if speed is None else f"{speed:,.0f}",
            **({"held-out by source": shown_losses(of_sources)} if of_sources else {}),
        }


def read_curves(runs: Sequence[Path]) -> list[Curves]:
    """Read run directories, and name them by the shortest paths that distinguish them.

    Raises ValueError if a directory has no metrics.jsonl, or the file has no line yet.
    """
    paths = [path.resolve() for path in runs]
    depth = 1
    while depth < 9 and len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    read = []
    for directory, path in zip(runs, paths, strict=True):
        if not (path / METRICS_FILE).is_file():
            beside = path.parent.glob(f"*/{METRICS_FILE}") if path.parent.is_dir() else []
            near = did_you_mean(path.name, [other.parent.name for other in beside])
            raise ValueError(f"{directory} has no {METRICS_FILE}. Expected the output_dir of a run.{near}")
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
    rows = read_rows(file) if file.is_file() else []
    starts = read_starts(folder)
    recipe = {"recipe": starts[-1]["recipe"]} if starts and "recipe" in starts[-1] else {}
    settings = recipe | starts[-1]["settings"] if starts else {}
    return Curves(name, rows, settings, state_of(folder, starts, rows))


def find_runs(folder: Path) -> list[Curves]:
    """The runs in `folder` and its subfolders, named by relative path. Raises ValueError for a damaged run.json."""
    curves = []
    for place, folders, files in os.walk(folder):
        if RUN_FILE in files or METRICS_FILE in files:
            path = Path(place)
            curves.append(_read_run(path, path.name if path == folder else path.relative_to(folder).as_posix()))
            folders.clear()  # a run has no runs inside
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return curves


def differing_settings(runs: Sequence[Curves]) -> list[str]:
    """Names of the settings that differ between the runs whose recipes have them, without `output_dir`.

    A group that is null in one run and set in another, such as `lora`, differs as a whole.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "output_dir")

    def differs(key: str) -> bool:
        values = {as_text(run.settings[key]) for run in runs if key in run.settings}
        return len(values) > 1 or any(name.startswith(f"{key}.") for name in keys)

    return [key for key in keys if differs(key)]


class RunInPanel(NamedTuple):
    """One run's values of a metric, each as steps and values."""

    every_step: Points
    curve: Points
    """Means of `every_step` if the panel is smoothed, otherwise the same."""
    held_out: Points


@dataclass(frozen=True)
class Panel:
    """A metric of all runs."""

    title: str
    runs: list[RunInPanel]
    is_smoothed: bool
    limits: tuple[float, float] | None
    """Lowest and highest value of the axis; None: those of the values."""
    is_logarithmic: bool = False
    """Values below the axis are not visible."""

    def scaled(self, value: float) -> float:
        """The place of a value on the axis; minus infinity for 0 on a logarithmic axis."""
        if not self.is_logarithmic:
            return value
        return math.log10(value) if value > 0 else -math.inf


@dataclass(frozen=True)
class Drawing:
    """What a picture of runs shows, and the same as text."""

    panels: list[Panel]
    lines: list[str]
    """The metrics that have a line of text instead of a panel."""
    means: str | None
    """What the curves of smoothed panels are; None if there are no such panels."""

    @property
    def has_held_out(self) -> bool:
        return any(run.held_out[0] for panel in self.panels for run in panel.runs)


def drawing_of(curves: list[Curves]) -> Drawing:
    """The panels of runs, in order, and the lines of text below them."""
    metrics, side = _metrics(curves), max(3, round(_SIDE * max(run.rows[-1]["step"] for run in curves)))
    lines = {name: line for name in metrics if (line := _as_text(curves, name, metrics[name])) is not None}
    panels = [_panel(curves, name, title, side) for name, title in metrics.items() if name not in lines]
    for whole, left in _undrawn(curves).items():
        lines[whole] = f"{title_of(whole)}: {len(left)} more sources, with lower values, are in {METRICS_FILE}"
    means = f"mean of the {2 * side + 1} steps around each, of fewer near the ends"
    return Drawing(panels, list(lines.values()), means if any(panel.is_smoothed for panel in panels) else None)


def _panel(curves: list[Curves], metric: str, title: str, side: int) -> Panel:
    measured = [run.points(metric) for run in curves]
    is_smoothed = max(len(steps) for steps, _ in measured) > _SMOOTHED_POINTS and metric not in _EXACT
    runs = [
        RunInPanel(points, _smoothed(*points, side) if is_smoothed else points, run.points(f"eval_{metric}"))
        for run, points in zip(curves, measured, strict=True)
    ]
    limits = (0.0, 1.0) if metric == EXACT_MATCH else None
    if metric in ("memory", "tokens_per_second"):
        limits = 0.0, max(value for _, values in measured for value in values)
    highest = [max(values) for _, values in measured if values]
    if metric == "lr" and max(highest) >= 10 * min(highest) > 0:  # a linear axis would show the smallest as 0
        return Panel(f"{title}, logarithmic", runs, is_smoothed, (min(highest) / 10, max(highest)), is_logarithmic=True)
    return Panel(title, runs, is_smoothed, limits)


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
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError(
            f"pictures need matplotlib. Run {install_command('plots')}\n"
            "`leanft plot RUN --text` prints the curves without it."
        ) from None

    drawn = drawing_of(curves)
    num_rows = -(-len(drawn.panels) // MAX_COLUMNS)
    height = 2.7 * num_rows + 0.2 * (len(curves) + len(drawn.lines)) + 0.6
    figure = Figure(figsize=(4.4 * MAX_COLUMNS, height), layout="constrained")
    legend = [Line2D([], [], color=f"C{i % 10}", label=_literal(run.name)) for i, run in enumerate(curves)]
    for place, panel in enumerate(drawn.panels, start=1):
        axes = figure.add_subplot(num_rows, MAX_COLUMNS, place, sharex=figure.axes[0] if figure.axes else None)
        axes.set_title(_literal(panel.title), fontsize="medium", loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for i, (every_step, curve, held_out) in enumerate(panel.runs):
            color = f"C{i % 10}"
            if panel.is_smoothed:
                axes.plot(*every_step, color=color, alpha=0.25, linewidth=0.8)
            marker = "o" if len(curve[0]) <= 12 else None
            axes.plot(*curve, color=color, linewidth=1.6, marker=marker, markersize=3)
            axes.plot(*held_out, color=color, **_HELD_OUT)
        if panel.limits is not None:
            low, high = panel.limits
            margin = 0.03 * (high - low)
            if panel.is_logarithmic:
                axes.set(yscale="log", ylim=(low, 1.3 * high))
            else:
                axes.set_ylim(low - margin, high + margin)
        if place > len(drawn.panels) - MAX_COLUMNS:
            axes.set_xlabel("optimizer step")
    if figure.axes:
        figure.axes[0].xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if drawn.has_held_out:
        legend.append(Line2D([], [], color="gray", label="held-out", **_HELD_OUT))
    title = f"pale: every step; bold: {drawn.means}" if drawn.means else None
    figure.legend(handles=legend, loc="outside upper left", frameon=False, title=title, alignment="left")
    figure.supxlabel("\n".join(map(_literal, drawn.lines)), x=0.01, ha="left", fontsize="medium")
    return figure


def _literal(text: str) -> str:
    """Foreign text for matplotlib, which reads text between dollar signs as mathematics."""
    return on_one_line(text).replace("$", r"\$")


def _metrics(curves: list[Curves]) -> dict[str, str]:
    """Metric of any run -> title of its panel, in the order of the panels. A held-out metric is in the panel of its
    training metric, unless there is none: eval_macro_f1."""
    from lean_ft.data.parts import COUNTS  # here, since it loads torch

    logged = {name: None for run in curves for row in run.rows for name, value in row.items() if is_number(value)}
    logged |= dict.fromkeys(["memory"] if "peak_memory_bytes" in logged else [])
    alone = [name for name in logged if not (name.startswith("eval_") and name[5:] in logged)]
    titles_of_known = HEADLINES | _TITLES | _LAST
    order = [*HEADLINES, *sorted(set(alone) - titles_of_known.keys() - {*_COUNTS, *COUNTS}), *_LAST]
    titles = {name: titles_of_known.get(name, title_of(name, logged)) for name in order}
    left = {name for some in _undrawn(curves).values() for name in some}
    return {name: title for name, title in titles.items() if name in alone and name not in left}


def _undrawn(curves: list[Curves]) -> dict[str, list[str]]:
    rows = [row for run in curves for row in run.rows]
    return undrawn({name for row in rows for name in row}, rows)


def _as_text(curves: list[Curves], metric: str, title: str) -> str | None:
    """A line instead of a panel, for a metric that has one value, or equal ones, in each run."""
    sentences = []
    for run in curves:
        for name, prefix in ((metric, ""), (f"eval_{metric}", "held-out ")):
            steps, values = run.points(name)
            if len(set(values)) > 1:
                return None
            place = f" in {run.name}" if len(curves) > 1 else ""
            when = f"at step {steps[0]:,}" if len(steps) == 1 else "throughout"
            sentences += [f"{prefix}{number(values[0])} {when}{place}"] if values else []
    return f"{title}: {', '.join(sentences)}"


def _smoothed(steps: list[int], values: list[float], side: int) -> Points:
    """Centered means: of a point and as many points before as after it, at most `side` steps away.

    So the curve does not lag. It leaves out points that have less than half of the neighbors, where it would follow the
    noise: at the ends and next to gaps. A long curve has means at some of its points.
    """
    reaches = [
        min(i - bisect_left(steps, step - side), bisect_right(steps, step + side) - 1 - i)
        for i, step in enumerate(steps)
    ]
    least = max(reaches, default=0) / 2
    places = [i for i, reach in enumerate(reaches) if reach >= least]
    places = places[:: max(1, len(places) // _MOST_MEANS)]
    return [steps[i] for i in places], [fmean(values[i - reaches[i] : i + reaches[i] + 1]) for i in places]
