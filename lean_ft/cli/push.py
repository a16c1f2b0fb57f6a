"""`leanft push`: upload a run's model to the Hugging Face Hub."""

from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug


def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run (its newest checkpoint), a checkpoint, or any model's or adapter's folder.",
            show_default=False,
        ),
    ],
    repo: Annotated[
        str,
        typer.Argument(metavar="ORG/NAME", help="Repository. It is created if it does not exist.", show_default=False),
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Create a public repository. Without it, a new repository is private.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Upload a model or an adapter to the Hugging Face Hub with a card: data, losses, curves, settings and versions.

    Needs a token with write access: run `hf auth login` or set the variable HF_TOKEN.
    """
    from lean_ft.hub.upload import push as upload

    typer.echo(f"pushed  {upload(source, repo, public=public)}")
