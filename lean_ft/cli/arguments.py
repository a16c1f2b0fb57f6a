"""The arguments that several verbs share, and what they come to: a recipe with the settings of a run."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from lean_ft import catalog
from lean_ft.settings_text import load_config, preset_fits, preset_recipe, preset_values


def _starting(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """For the shell's completion: the names that begin with what was typed."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


RECIPE: Any = typer.Argument(
    metavar="RECIPE",
    help="A recipe's name, or the path of a .py file; a preset may name it.",
    show_default=False,
    autocompletion=_starting(lambda: [*catalog.recipes(), *catalog.aliases()]),
)
Recipe = Annotated[str | None, RECIPE]
RecipeOrPreset = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|CONFIG",
        help="A name from `leanft ls`, or a path.",
        show_default=False,
        autocompletion=_starting(lambda: [*catalog.recipes(), *catalog.aliases(), *catalog.presets()]),
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME|PATH",
        help="A preset's name (tiny/full), or the path of a .yaml file.",
        autocompletion=_starting(catalog.presets),
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that overrule the preset: optimizer.lr=1e-5",
        show_default=False,
    ),
]
# `run_command_line` looks for it itself, since errors reach it from before a verb has its arguments.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def load_run(
    recipe: str | None, config: str | None, overrides: list[str] | None, *, writes: bool = True
) -> tuple[ModuleType, Any]:
    """The recipe that a command names, itself or by its preset, and its settings. A command that writes nothing need
    not be told an output_dir.

    Raises ValueError where one of them cannot be found or read, or the preset is another recipe's.
    """
    found, preset, overrides = find(recipe, config, overrides)
    module = catalog.load_recipe(found)
    own = preset_recipe(preset) if preset is not None else None
    if preset is not None and own is not None and not preset_fits(module.Config, preset):
        name = found.stem if not isinstance(found, catalog.Alias) else found.name
        if own not in (name, catalog.without_alias(name)):
            raise ValueError(
                f"the preset {config} is for the recipe {own}, and {name} does not know all of its settings. "
                f"Run `leanft run {own} --config {config}`."
            )
    if preset is not None:
        overrides = _without_held_out_rows_of_other_data(preset_values(preset), overrides)
    if not writes and "output_dir" in module.Config.model_fields:
        overrides = ["output_dir=unused", *overrides]
    return module, load_config(module.Config, preset, overrides)


def _without_held_out_rows_of_other_data(preset: dict[str, str], overrides: list[str]) -> list[str]:
    """The overrides, and what takes a preset's held-out rows back where they name another source than the preset."""
    given = {override.partition("=")[0] for override in overrides}
    dropped = {"data.validation_source": "null"}
    if "data.validation_fraction" not in given:
        dropped["eval_answers"] = "0"  # nothing is held out to ask about
    dropped = {key: off for key, off in dropped.items() if preset.get(key, off) != off and key not in given}
    if "data.source" not in given or "data.validation_source" not in dropped:
        return overrides
    typer.echo(
        f"note: {' and '.join(f'{key}={preset[key]}' for key in dropped)} of the preset left out, as data.source is another. To "
        "evaluate, give data.validation_source or data.validation_fraction.",
        err=True,
    )
    return [*overrides, *(f"{key}={off}" for key, off in dropped.items())]


def find(
    recipe: str | None, config: str | None, overrides: list[str] | None
) -> tuple[Path | catalog.Alias, Path | None, list[str]]:
    """The recipe, the preset's file, and the overrides: the first of them may have come in the recipe's place."""
    overrides = list(overrides or [])
    if recipe is not None and "=" in recipe and config is not None:
        recipe, overrides = None, [recipe, *overrides]
    preset = catalog.find_preset(config) if config is not None else None
    if recipe is None:
        recipe = preset_recipe(preset) if preset is not None else None
        if recipe is None:
            where = (
                f"{config} does not name its recipe (`recipe: NAME`)" if config else "there is no --config to name it"
            )
            raise ValueError(f"expected a RECIPE, as {where}. `leanft ls` lists recipes and presets.")
    return catalog.find_recipe(recipe), preset, overrides
