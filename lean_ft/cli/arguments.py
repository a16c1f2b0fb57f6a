"""The arguments that several verbs share."""

from typing import Annotated

import typer

Recipe = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe's name, or the path of a .py file.", show_default=False),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME|PATH",
        help="A preset's name (tiny/full), or the path of a .yaml file.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that overrule the preset: optimizer.lr=1e-5",
        show_default=False,
    ),
]
# `run_command_line` looks for it itself, since errors reach it from before a verb has its arguments.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
