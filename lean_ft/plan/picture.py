"""A picture of a planned step's memory over time (matplotlib, the `plots` extra)."""

from pathlib import Path

from lean_ft.plan.labels import LABELS
from lean_ft.plan.result import Rehearsal
from lean_ft.system.installation import install_command
from lean_ft.system.units import GIB, gibibytes

_SMALLEST_SHOWN = 0.002  # of the peak; a smaller label would have a legend entry and no visible area


def draw_timeline(rehearsal: Rehearsal, path: Path, planned: str, budget_bytes: int | None) -> None:
    """Draw the memory over the step's estimated time by label, with the peak and the budget, into `path`.

    `planned` names the model and device for the title. Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--png needs matplotlib. Run {install_command('plots')}") from None
    seconds, alive = zip(*rehearsal.timeline, strict=True)
    most = {label: max(moment.get(label, 0) for moment in alive) for label in {*LABELS, *alive[-1]}}
    # The longest-lived memory (weights, states) is lowest, so changes are visible above flat areas.
    shown = [
        label
        for label in [*LABELS, *(most.keys() - set(LABELS))]
        if most[label] > _SMALLEST_SHOWN * rehearsal.peak_bytes
    ]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(
        seconds,
        [[moment.get(label, 0) / GIB for moment in alive] for label in shown],
        labels=[f"{label}: {gibibytes(rehearsal.peak.bytes_by_label.get(label, 0))} at the peak" for label in shown],
        step="post",
    )
    axes.axhline(
        rehearsal.peak_bytes / GIB, linestyle=":", color="black", label=f"peak: {gibibytes(rehearsal.peak_bytes)}"
    )
    if budget_bytes is not None:
        axes.axhline(budget_bytes / GIB, linestyle="--", color="firebrick", label=f"budget: {gibibytes(budget_bytes)}")
    axes.set(
        xlabel="estimated seconds into the step",
        ylabel="GiB alive",
        ylim=(0, None),
        title=f"{planned}: peak in {rehearsal.peak.where}".replace("$", r"\$"),  # text, not mathematics
    )
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
