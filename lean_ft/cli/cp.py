"""`leanft cp`: a recipe or preset of your own, to change."""

from typing import Annotated

import typer

from lean_ft import catalog
from lean_ft.cli.arguments import Debug, RecipeOrPreset


def cp(
    name: RecipeOrPreset,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A file or a folder.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite DEST.")] = False,
    debug: Debug = False,
) -> None:
    """Copy a recipe or a preset, to edit it."""
    source = catalog.find_either(name)
    copy = catalog.copy_to(source, destination, force=force)
    example = f"leanft run {copy} --config NAME" if copy.suffix == ".py" else f"leanft run RECIPE --config {copy}"
    copied = source.file if isinstance(source, catalog.Alias) else source
    typer.echo(f"copied {copied} to {copy}\nEdit it, then: {example}")
