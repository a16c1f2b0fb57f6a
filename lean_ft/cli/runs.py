"""`leanft runs`: print a table of runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug
from lean_ft.cli.output import print_table, stdout

_NARROW_COLUMNS = 100  # narrower terminals omit speed and memory
_SHOWN_CHARACTERS = 40  # of a setting's value


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with runs, in subfolders of any depth.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with all digits.")] = False,
    debug: Debug = False,
) -> None:
    """List runs: settings that differ between them, steps, losses, peak memory and speed.

    Runs under way are included. `leanft plot RUN...` draws their curves.
    """
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}. Pass the folder that holds your runs: leanft runs DIR.")

    # Imported here because it imports torch.
    from lean_ft.training.curves import differing_settings, find_runs
    from lean_ft.training.loggers import as_text

    found = find_runs(folder)
    keys = differing_settings(found)
    if as_json:
        listed = [
            {"run": run.name, "settings": {key: run.settings.get(key) for key in keys}, **run.results()}
            for run in found
        ]
        typer.echo(json.dumps(listed, indent=1))
        return
    if not found:
        typer.echo(f"no runs in {folder}")
        return
    rows = []
    for run in found:
        settings = [f"{key}={as_text(run.settings[key])[:_SHOWN_CHARACTERS]}" for key in keys if key in run.settings]
        told = run.results_as_text()
        del told["tokens"]
        rows.append([run.name, " ".join(settings), *told.values()])
    columns = ("run", "settings", ">steps", ">loss", ">held-out", ">lowest", ">tokens/s", ">peak")
    shown = len(columns) - 2 * (stdout().width < _NARROW_COLUMNS)
    print_table(columns[:shown], [row[:shown] for row in rows])
