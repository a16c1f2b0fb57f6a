"""`leanft cp`: copy a recipe or a preset for editing."""

import shlex
from typing import Annotated

import typer

from lean_ft.cli.arguments import Debug, RecipeOrPreset, run_command
from lean_ft.settings.text import preset_recipe
from lean_ft.system import catalog


def cp(
    name: RecipeOrPreset,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A file or a folder.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite DEST.")] = False,
    debug: Debug = False,
) -> None:
    """Copy a recipe or a preset for editing."""
    source = catalog.find_either(name)
    copy = catalog.copy_to(source, destination, force=force)
    copied = source.file if isinstance(source, catalog.Alias) else source
    if copy.suffix != ".py":
        example = run_command(*([] if preset_recipe(copy) else ["RECIPE"]), "--config", copy, preset=copy)
    else:  # name a preset of the recipe, preferably for the embedded model, and of texts
        presets_of_recipe = {n: file for n, file in catalog.presets().items() if preset_recipe(file) == copied.stem}
        preset = min(presets_of_recipe, key=lambda name: (not name.startswith("tiny/"), "images" in name), default=None)
        example = (
            run_command(copy, "--config", preset, preset=presets_of_recipe[preset])
            if preset
            else shlex.join(["leanft", "ls", str(copy)])
        )
    typer.echo(f"copied {copied} to {copy}\nEdit it, then: {example}")
