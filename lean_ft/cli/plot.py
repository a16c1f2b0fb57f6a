"""`leanft plot`: draw the curves of runs."""

from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories. Runs may still be in progress.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="NAME",
            help="Write NAME.png and NAME.html. Default: curves.* in the run; a new name in the current folder for several runs.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the files of --output.")] = False,
    debug: Debug = False,
) -> None:
    """Draw loss, held-out loss, learning rate, memory, speed and the other metrics of runs as a PNG and an HTML page.

    The page is a single file and needs no network.
    """
    from lean_ft.training.curves import draw_curves

    base = output or (runs[0] / "curves" if len(runs) == 1 else Path("curves"))
    base = base.with_suffix("") if base.suffix in (".png", ".html") else base
    if base.is_dir() or not base.parent.is_dir():
        place = "a folder" if base.is_dir() else f"a name in {base.parent}, which is no folder"
        if output is not None:
            raise ValueError(f"--output {output} is {place}; expected the files' name, in a folder that exists.")

    def files_of(base: Path) -> list[Path]:
        return [base.with_name(base.name + ending) for ending in (".png", ".html")]

    files, attempt = files_of(base), 1
    while output is None and len(runs) > 1 and any(file.exists() for file in files):
        files = files_of(base.with_name(f"{base.name}_{(attempt := attempt + 1)}"))
    there = [file for file in files if file.exists()]
    if there and output is not None and not force:
        raise ValueError(f"{there[0]} exists already; choose another name, or overwrite it with --force.")
    draw_curves(runs, *files)
    for file in files:
        typer.echo(f"{file}{' (replaced)' if file in there else ''}")
