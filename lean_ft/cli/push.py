"""`leanft push`: upload a run's model to the Hugging Face Hub."""

from shlex import quote
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug
from lean_ft.cli.output import print_lines, print_table
from lean_ft.hub.paths import repository_name
from lean_ft.system.log import show
from lean_ft.system.units import gibibytes


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
    license: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="License for the card, such as apache-2.0 or llama3.2."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and the card, upload nothing, and use no network.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Upload a model or an adapter to the Hugging Face Hub with a card: data, losses, curves, settings and versions.

    Needs a token with write access: run `hf auth login` or set the variable HF_TOKEN.
    """
    from lean_ft.export.places import CARD
    from lean_ft.export.upload import prepare
    from lean_ft.export.upload import push as upload

    if not dry_run:
        typer.echo(f"pushed  {upload(source, repo, public=public, license=license)}")
        return
    if repository_name(source) is not None:
        raise ValueError(
            f"{source} is not a folder here, and --dry-run uses no network. Run `leanft download {quote(source)}` "
            "first."
        )
    folder, files, remarks = prepare(source, repo, license)
    sizes = {path: len(file) if isinstance(file, bytes) else file.stat().st_size for path, file in files.items()}
    access = "public" if public else "private"
    typer.echo(f"from  {folder}")
    to = f"{repo}, created as a {access} repository if it does not exist. One commit adds or replaces:"
    print_lines(to, before="to    ")
    typer.echo()
    total = (f"{len(sizes)} files", gibibytes(sum(sizes.values())))
    print_table(("", ">"), [*((path, gibibytes(size)) for path, size in sizes.items()), total])
    show(f"\n{CARD}:\n\n{files[CARD].decode()}")
    for remark in remarks:
        print_lines(f"note: {remark}")
    typer.echo("dry run: nothing was uploaded.")
