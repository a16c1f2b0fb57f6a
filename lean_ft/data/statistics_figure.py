"""The distribution of lengths as a picture. Needs the `plots` extra."""

from pathlib import Path

from lean_ft.data.statistics import Statistics, quantiles

NUM_BARS = 60


def save_figure(statistics: Statistics, max_length: int, path: Path) -> None:
    """Draws how many sequences have which length, with their quantiles and `max_length`, into the picture `path`.

    Raises ValueError where matplotlib is not installed or does not know the file's ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'lean-ft[plots]'.") from None
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{path}: expected a file ending in one of {', '.join(sorted(known))}.")
    axes = figure.add_subplot()
    axes.hist(statistics.lengths, bins=NUM_BARS, color="#4c78a8")
    for share, length in zip((0.5, 0.95), quantiles(statistics.lengths, [0.5, 0.95]), strict=True):
        axes.axvline(length, color="#54a24b", linestyle=":", label=f"{share:.0%} have at most {length:,} tokens")
    if max_length < 1.5 * statistics.lengths.max():  # further off it would squeeze what there is to see
        axes.axvline(max_length, color="#e45756", label=f"max_length {max_length:,}")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("sequences")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
