"""`leanft ls`: list recipes and presets."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.text import Text

from lean_ft.cli.arguments import Debug, found
from lean_ft.cli.output import print_rows, print_table, stdout
from lean_ft.settings.describing import describe
from lean_ft.settings.text import preset_fits, preset_recipe, preset_values
from lean_ft.system import catalog


def ls(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A recipe's name, or the path of a .py file.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """List recipes and presets, or the presets and required settings of one recipe."""
    if recipe is None:
        recipes = {**catalog.recipes(), **catalog.aliases()}
        summaries = {name: catalog.summary(file) for name, file in recipes.items()}
        uses = {name: summaries.pop(name) for name in catalog.TRAIN_NOTHING if name in summaries}
        print_rows("Recipes", summaries)
        if uses:
            print_rows("With a trained model", uses)
        _print_presets("Presets", catalog.presets())
        return
    file = found(catalog.find_recipe, recipe)
    module = catalog.load_recipe(file)
    settings = describe(module.Config)
    presets = {name: preset for name, preset in catalog.presets().items() if _is_of(preset, recipe, module)}
    where = file.file if isinstance(file, catalog.Alias) else file
    stdout().print(f"{catalog.summary(file)}\n{where}\n", markup=False)
    _print_presets("Presets", presets)
    print_rows("Settings it needs", {s.key: f"{s.description} ({s.type})" for s in settings if s.required})
    with_default = sum(not setting.required for setting in settings)
    stdout().print(f"{with_default} more have defaults: leanft cat {recipe}", markup=False)


def _is_of(preset: Path, recipe: str, module: ModuleType) -> bool:
    """Whether a preset names the recipe. For a user's recipe, or a preset without a name, whether its settings fit."""
    try:
        recipe_of_preset = preset_recipe(preset)
    except ValueError:  # a broken preset belongs to no recipe
        return False
    if recipe_of_preset is not None and catalog.is_shipped(module):
        return recipe_of_preset == catalog.without_alias(recipe)
    return preset_fits(module.Config, preset)


def _print_presets(title: str, presets: Mapping[str, Path]) -> None:
    rows = [("  " + name, *_columns(file)) for name, file in presets.items()]
    if not rows:
        print_rows(title, {})
        return
    stdout().print(Text(title, style="bold"))
    columns = ("  preset", "recipe", ">params", ">card", ">reserved", "")
    shown = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    print_table(columns[:shown], [row[:shown] for row in rows])
    stdout().print()
    if gated := [name for name, file in presets.items() if "(gated)" in catalog.summary(file)]:
        stdout().print(Text(f"Accept the license on the Hub first: {', '.join(gated)}\n"))


def _columns(preset: Path) -> tuple[str, str, str, str, str]:
    """Return the preset's recipe and, from its comment, the number of parameters, the smallest card and the peak memory
    on it. The last column is for presets without these numbers: their comment, their settings, or the error."""
    try:
        recipe, values = preset_recipe(preset) or "-", preset_values(preset)
    except ValueError as error:  # a broken preset must not hide the others
        return "-", "-", "-", "-", str(error)
    said = catalog.summary(preset)
    parameters = re.search(r"([\d.]+ [MB]) parameters", said)
    peak = re.search(r"on a GPU with (\d+ GB): ([\d.]+ GiB) at the peak", said)
    card, at_peak = peak.groups() if peak else ("-", "-")
    about = "" if parameters else said or " ".join(f"{key}={value}" for key, value in values.items())
    return recipe, parameters[1] if parameters else "-", card, at_peak, about
