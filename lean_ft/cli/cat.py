"""`leanft cat`: a preset, or every setting of a recipe."""

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from lean_ft.cli.arguments import Debug, RecipeOrPreset, found
from lean_ft.settings.describing import COMMON, commented_yaml, config_schema, describe, one_line_each
from lean_ft.system import catalog
from lean_ft.system.log import show
from lean_ft.system.whole_files import read_text


def cat(
    name: RecipeOrPreset,
    only: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GROUP|SETTING",
            help="For a recipe: print only this group or setting, such as optimizer or lora.rank.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="For a recipe: the JSON schema of its presets, for an editor.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print a preset, or a recipe's settings with defaults, units and meaning."""
    file = found(catalog.find_either, name)
    if isinstance(file, Path) and file.suffix != ".py":
        if schema or only:
            extra = "--schema" if schema else (only or [""])[0]
            raise ValueError(f"{extra} needs a recipe, and '{name}' is a preset. Remove {extra}.")
        show(read_text(file), end="")
        return
    config_class = catalog.load_recipe(file).Config
    if schema:
        typer.echo(json.dumps(config_schema(config_class), indent=2, ensure_ascii=False))
    else:
        name = file.stem if isinstance(file, Path) else file.name
        settings = commented_yaml(config_class, only=only or ())
        typer.echo(f"# {name}: {catalog.summary(file)}\n{'' if only else _first_read(config_class)}")
        typer.echo(settings, nl=False)


def _first_read(config_class: type[BaseModel]) -> str:
    """Return comment lines with the names of the required and the common settings."""
    is_required = {setting.key: setting.required for setting in describe(config_class)}
    required = [key for key in is_required if is_required[key]]
    common = [key for key in COMMON if is_required.get(key) is False]
    return f"# required: {', '.join(required) or 'none'}\n# often changed: {', '.join(common) or 'none'}\n"


def help_of_recipe(name: str) -> str:
    """Return the text of `leanft run RECIPE --help`: the settings, one per line."""
    recipe_file = found(catalog.find_recipe, name)
    return (
        f"leanft run {name} [--config NAME|PATH] [KEY=VALUE ...]\n\n{catalog.summary(recipe_file)}\n\n"
        f"{one_line_each(catalog.load_recipe(recipe_file).Config)}\n"
        f"`leanft cat {name}` explains the settings, `leanft run --help` the options."
    )
