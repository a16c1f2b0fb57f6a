"""The arguments that several verbs share, and what those of a run name."""

from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import typer

from lean_ft.catalog import find_preset, find_recipe, load_recipe
from lean_ft.config import load_config

RECIPE: Any = typer.Argument(metavar="RECIPE", help="A recipe's name, or the path of a .py file.", show_default=False)
Recipe = Annotated[str, RECIPE]
RecipeOrPreset = Annotated[
    str, typer.Argument(metavar="RECIPE|CONFIG", help="A name from `leanft ls`, or a path.", show_default=False)
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", metavar="NAME|PATH", help="A preset's name (tiny/full), or the path of a .yaml file."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings that overrule the preset: optimizer.lr=1e-5", show_default=False
    ),
]
# `run_command_line` looks for it itself, since errors reach it from before a verb has its arguments.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def load_run(
    recipe: str, preset: str | None, overrides: list[str] | None, unused: Sequence[str] = ()
) -> tuple[ModuleType, Any]:
    """The recipe and the settings of a run; settings that are `unused` need not be given.

    Both names are looked up before the recipe's file is run, which brings torch.
    """
    recipe_file = find_recipe(recipe)
    preset_file = find_preset(preset) if preset is not None else None
    module = load_recipe(recipe_file)
    placeholders = [f"{name}=unused" for name in unused if name in module.Config.model_fields]
    return module, load_config(module.Config, preset_file, [*placeholders, *(overrides or [])])
