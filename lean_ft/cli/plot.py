"""`leanft plot`: draw the curves of runs."""

from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug
from lean_ft.cli.output import layout_columns, stdout
from lean_ft.system.run_directory import METRICS_FILE


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or a folder of runs. Runs may still be in progress.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.png",
            help="File to write. Default: curves.png in the run; a new name in the current folder for several runs.",
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the curves in the terminal instead. Needs no matplotlib.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the file of --output.")] = False,
    debug: Debug = False,
) -> None:
    """Draw loss, held-out loss, learning rate, memory, speed and the other metrics of runs as a PNG, or as text.

    `leanft runs` prints their results and the settings that differ.
    """
    if text:
        if output is not None:
            raise ValueError("--text prints the curves, and --output writes a PNG. Pass one of them.")
        from lean_ft.training.text_curves import text_of

        console = stdout()
        has_colors = console.color_system is not None and not console.no_color
        console.print(text_of(runs, layout_columns(console), console.encoding, has_colors), soft_wrap=True)
        return
    from lean_ft.training.curves import draw_curves

    runs = [run for given in runs for run in _runs_in(given) or [given]]
    picture = output or (runs[0] / "curves.png" if len(runs) == 1 else Path("curves.png"))
    if picture.suffix != ".png":
        picture = picture.with_name(picture.name + ".png")
    if output is None:
        attempt = 1
        while len(runs) > 1 and picture.exists():
            picture = Path(f"curves_{(attempt := attempt + 1)}.png")
    elif not picture.parent.is_dir():
        raise ValueError(
            f"--output {output}: no such folder: {picture.parent}. Pass a file name in a folder that exists."
        )
    elif picture.exists() and not force:
        raise ValueError(f"{picture} exists already. Choose another name, or overwrite it with --force.")
    replaced = " (replaced)" if picture.exists() else ""
    draw_curves(runs, picture)
    typer.echo(f"{picture}{replaced}")


def _runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, by name; none if it is a run itself."""
    is_run = (folder / METRICS_FILE).is_file()
    return [] if is_run else sorted(file.parent for file in folder.glob(f"*/{METRICS_FILE}"))
