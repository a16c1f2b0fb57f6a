"""`leanft cat`: a preset, or every setting of a recipe."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lean_ft import catalog
from lean_ft.cli.arguments import Debug, RecipeOrPreset
from lean_ft.settings_text import commented_yaml, config_schema


def cat(
    name: RecipeOrPreset,
    schema: Annotated[
        bool, typer.Option("--schema", help="For a recipe: the JSON schema of its presets, for an editor.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print a preset, or a recipe's settings with defaults, units and meaning."""
    file = catalog.find_either(name)
    if isinstance(file, Path) and file.suffix != ".py":
        if schema:
            raise ValueError(f"--schema is for a recipe, and '{name}' is a preset.")
        typer.echo(file.read_text(encoding="utf-8"), nl=False)
        return
    config_class = catalog.load_recipe(file).Config
    if schema:
        typer.echo(json.dumps(config_schema(config_class), indent=2, ensure_ascii=False))
    else:
        typer.echo(
            f"# {file.stem if isinstance(file, Path) else file.name}: {catalog.summary(file)}\n\n{commented_yaml(config_class)}",
            nl=False,
        )
