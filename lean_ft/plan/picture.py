"""The step's memory over time, as a picture (matplotlib, the `plots` extra)."""

from pathlib import Path

from lean_ft.plan.rehearsal import Rehearsal
from lean_ft.units import GIB, gibibytes


def draw_timeline(rehearsal: Rehearsal, path: Path) -> None:
    """Draws bytes alive over the step's estimated time, with its peak marked, into `path`.

    Raises ValueError where matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--png needs matplotlib; install it with: pip install 'lean-ft[plots]'") from None
    seconds = [moment[0] for moment in rehearsal.timeline]
    alive = [moment[1] / GIB for moment in rehearsal.timeline]
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(seconds, alive, linewidth=1, drawstyle="steps-post")
    axes.fill_between(seconds, alive, step="post", alpha=0.25)
    axes.axhline(rehearsal.peak_bytes / GIB, linestyle=":", color="black", linewidth=1)
    axes.set(
        xlabel="estimated seconds into the step",
        ylabel="GiB alive",
        ylim=(0, None),
        title=f"peak {gibibytes(rehearsal.peak_bytes)}, {rehearsal.peak.where}",
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
