"""`leanft score`: what a reward model says of the rows of a file."""

from pathlib import Path
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug
from lean_ft.settings import DataConfig, Settings


class _Rows(Settings):
    data: DataConfig


def score(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A reward model: a run, a checkpoint, a folder.", show_default=False),
    ],
    file: Annotated[str, typer.Argument(metavar="FILE", help="Rows, as data.source takes them.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DEST] [KEY=VALUE]",
            help="A new JSONL file, the terminal where left out; and settings of the rows: data.columns.completion=answer",
            show_default=False,
        ),
    ] = None,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Tell the score at each token of an answer, too.")
    ] = False,
    device: Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu|mps", help="Where to compute.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="bfloat16|float32", help="Type of the arithmetic; as stored by default."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite DEST.")] = False,
    debug: Debug = False,
) -> None:
    """Score the rows of a file by a reward model: the same rows as JSON, a line each, with their `score`.

    A pair of answers has a `chosen_score` and a `rejected_score`. Rows are whole, whatever their length.
    """
    from lean_ft.scoring import open_reward_model, score_lines
    from lean_ft.settings_text import load_config
    from lean_ft.whole_files import write_whole

    overrides = [argument for argument in arguments or [] if "=" in argument]
    destinations = [Path(argument).expanduser() for argument in arguments or [] if "=" not in argument]
    if len(destinations) > 1:
        raise ValueError(f"expected one DEST and settings key=value, came {', '.join(map(str, destinations))}.")
    destination = destinations[0] if destinations else None
    data = load_config(_Rows, None, [f"data.source={file}", *overrides]).data
    if destination is not None and destination.exists() and not force:
        raise ValueError(f"{destination} is there already; choose another name, or overwrite it with --force.")
    opened = open_reward_model(model, device, dtype, data.chat_template)
    lines = score_lines(*opened, data, per_token)
    if destination is None:
        for line in lines:
            typer.echo(line)
        return
    with write_whole(destination) as temporary, temporary.open("w", encoding="utf-8") as out:
        count = sum(1 for line in lines if out.write(line + "\n"))
    typer.echo(f"scored {count:,} rows: {destination}")
