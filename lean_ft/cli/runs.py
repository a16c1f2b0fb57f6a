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
            {"run": run.name, "settings": {k: run.settings[k] for k in keys if k in run.settings}, **run.results()}
            for run in found
        ]
        typer.echo(json.dumps(listed, indent=1))
        return
    if not found:
        typer.echo(f"no runs in {folder}")
        return
    rows = []
    for run in found:
        results = run.results_as_text()
        del results["tokens"]
        settings = [f"{key}={as_text(run.settings[key])[:_SHOWN_CHARACTERS]}" for key in keys if key in run.settings]
        rows.append([run.name, *results.values(), " ".join(settings)])
    columns = ("run", ">steps", ">loss", ">held-out", ">lowest", ">tokens/s", ">peak", "settings")
    shown = [
        i for i, name in enumerate(columns) if stdout().width >= _NARROW_COLUMNS or name not in (">tokens/s", ">peak")
    ]
    print_table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])
