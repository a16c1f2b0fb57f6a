"""`leanft cp`: copy a recipe or a preset for editing."""

import shlex
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, RecipeOrPreset, found, run_command
from lean_ft.settings.text import preset_recipe, preset_values
from lean_ft.system import catalog


def cp(
    name: RecipeOrPreset,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A file or a folder.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite DEST.")] = False,
    debug: Debug = False,
) -> None:
    """Copy a recipe or a preset for editing."""
    source = found(catalog.find_either, name)
    copy = catalog.copy_to(source, destination, force=force)
    copied = source.file if isinstance(source, catalog.Alias) else source
    if copy.suffix != ".py":
        example = run_command(*([] if preset_recipe(copy) else ["RECIPE"]), "--config", copy, preset=copy)
    else:  # name a preset of the recipe, preferably for the embedded model `tiny`
        files = {n: file for n, file in catalog.presets().items() if preset_recipe(file) == copied.stem}

        def is_other(name: str) -> bool:
            return not name.startswith("tiny/") or preset_values(files[name]).get("model.path") != "tiny"

        preset = min(files, key=is_other, default=None)
        example = (
            run_command(copy, "--config", preset, preset=files[preset])
            if preset
            else shlex.join(["leanft", "ls", str(copy)])
        )
    typer.echo(f"copied {copied} to {copy}\nEdit it, then: {example}")
