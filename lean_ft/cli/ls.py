"""`leanft ls`: what there is to run."""

from pathlib import Path
from typing import Annotated

import typer

from lean_ft import catalog
from lean_ft.cli.arguments import Debug
from lean_ft.cli.output import print_rows, stdout
from lean_ft.settings_text import describe, preset_fits, preset_values


def ls(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A recipe's name, or the path of a .py file.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """List recipes and presets, or what one recipe needs."""
    if recipe is None:
        recipes = {**catalog.recipes(), **catalog.aliases()}
        print_rows("Recipes", {name: catalog.summary(file) for name, file in recipes.items()})
        print_rows("Presets", {name: _what_it_is(file) for name, file in catalog.presets().items()})
        return
    file = catalog.find_recipe(recipe)
    config_class = catalog.load_recipe(file).Config
    settings = describe(config_class)
    fitting = {n: f for n, f in catalog.presets().items() if preset_fits(config_class, f)}
    where = file.file if isinstance(file, catalog.Alias) else file
    stdout().print(f"{catalog.summary(file)}\n{where}\n", markup=False)
    print_rows("Presets that fit", {name: _what_it_is(preset) for name, preset in fitting.items()})
    print_rows("Settings it needs", {s.key: f"{s.description} ({s.type})" for s in settings if s.required})
    with_default = sum(not setting.required for setting in settings)
    stdout().print(f"{with_default} more have defaults: leanft cat {recipe}", markup=False)


def _what_it_is(preset: Path) -> str:
    """What a preset says of itself; its settings where it says nothing, or nothing that can be read."""
    try:
        values = preset_values(preset)
    except ValueError as error:  # a broken preset must not hide the others
        return str(error)
    return catalog.summary(preset) or " ".join(f"{key}={value}" for key, value in values.items())
