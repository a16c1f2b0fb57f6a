"""`leanft runs`: print a table of runs."""

import json
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug
from lean_ft.cli.output import layout_columns, print_table, stdout
from lean_ft.system.log import wrapped

_LR = "optimizer.lr"  # always shown
_RUN_CHARACTERS, _SETTING_CHARACTERS = 40, 24  # of a run's name (its end) and of a setting's value (its start)


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with runs, in subfolders of any depth.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with all digits.")] = False,
    debug: Debug = False,
) -> None:
    """List runs: state, learning rate and the other settings that differ, losses or rewards, right answers, memory and
    speed.

    Columns that fit are printed, settings with the most values first. Runs under way are included. `leanft plot RUN...`
    draws their curves.
    """
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}. Pass the folder that holds your runs: leanft runs DIR.")

    # Imported here because it imports torch.
    from lean_ft.training.curves import differing_settings, find_runs
    from lean_ft.training.loggers import as_text

    curves = find_runs(folder)
    keys = differing_settings(curves)
    if _LR not in keys and any(_LR in run.settings for run in curves):
        keys.append(_LR)
    if as_json:
        listed = [
            {"run": run.name, "settings": {k: run.settings[k] for k in keys if k in run.settings}, **run.results()}
            for run in curves
        ]
        typer.echo(json.dumps(listed, indent=1))
        return
    if not curves:
        typer.echo(f"no runs in {folder}")
        return
    width = layout_columns(stdout())
    results = [run.results_as_text() for run in curves]
    settings = {
        key: [_shortened(as_text(run.settings.get(key, "-")), _SETTING_CHARACTERS) for run in curves] for key in keys
    }
    columns = {"run": [_shortened(run.name[::-1], _RUN_CHARACTERS)[::-1] for run in curves], **settings}
    names = dict.fromkeys(name for result in results for name in result)
    columns |= {_aligned(name): [result.get(name, "-") for result in results] for name in names}
    if set(columns[">right"]) == {"-"}:
        del columns[">right"]
    most_values = sorted((key for key in settings if key != _LR), key=lambda key: -len(set(settings[key])))
    results_first = ["run", "state", _LR, ">right", ">result", ">held-out", ">held-out by source"]
    results_first += [*most_values[:2], ">steps", ">best", ">peak", ">tokens/s"]
    shown, left = set(), width
    for name in [name for name in (*results_first, *most_values[2:]) if name in columns]:
        needed = 2 + max(map(len, [name.removeprefix(">"), *columns[name]]))
        if needed <= left:
            shown, left = {*shown, name}, left - needed
    order = [name for name in columns if name in shown]
    print_table(order, list(zip(*(columns[name] for name in order), strict=True)))
    if left_out := [name.removeprefix(">") for name in columns if name not in shown]:
        names = ", ".join(left_out[:5])
        if len(left_out) > 5:
            names += f" and {len(left_out) - 5} more"
        command = f"leanft runs {quote(str(folder))} --json"
        note = f"not shown, to fit {width} characters: {names}. For all columns, run `{command}`"
        typer.echo(wrapped(note, width), err=True)


def _aligned(result: str) -> str:
    """A column's name for `print_table`: numbers are on the right."""
    return result if result == "state" else f">{result}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
