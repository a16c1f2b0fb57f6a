"""Arguments that several verbs share, and their conversion into a recipe and its settings."""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from lean_ft.cli.output import print_note
from lean_ft.hub.paths import free_directory
from lean_ft.settings import ParallelConfig, RecipeConfig
from lean_ft.settings.base import spelled_out
from lean_ft.settings.converted_config import refuse_other_tools
from lean_ft.settings.hints import hint_for_command
from lean_ft.settings.text import COMMAND_LINE, load_config, preset_fits, preset_recipe, preset_values
from lean_ft.system import catalog
from lean_ft.system.user_functions import is_function_path, use_family

# Settings whose files other commands than `run` execute.
CODE_OF_PLANS = "model.family", "optimizer.name"

Found = TypeVar("Found")


def _starting(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a shell completion function that lists the names with the typed prefix."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


RECIPE: Any = typer.Argument(
    metavar="RECIPE",
    help="Recipe name or path of a .py file. A preset can name its recipe.",
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
OwnFamily = Annotated[
    str | None,
    typer.Option(
        "--family",
        metavar="FILE.py:NAME",
        help="Your own row of the model's family, as model.family.",
        callback=lambda value: use_family(value, by_option=True),
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that override the preset: optimizer.lr=1e-5",
        show_default=False,
    ),
]
# `run_command_line` also searches for this flag, because errors can occur before a verb's arguments are parsed.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

# Given the Config of a recipe and the settings of preset and command line, returns a Config with other defaults, and
# settings to add.
Prepare = Callable[[type[BaseModel], Mapping[str, str]], tuple[type[BaseModel], list[str]]]


def run_command(*arguments: str | Path, preset: Path) -> str:
    """Return a `leanft run` command to print, with a new output_dir if an earlier run uses the preset's."""
    output_dir = preset_values(preset).get("output_dir")
    free = free_directory(output_dir) if output_dir else output_dir
    moved = [] if free == output_dir else [f"output_dir={free}"]
    return shlex.join(["leanft", "run", *map(str, arguments), *moved])


def load_run(
    recipe: str | None,
    config: str | None,
    overrides: list[str] | None,
    *,
    given_by: str = COMMAND_LINE,
    processes: int = 1,
    runs: bool = False,
    prepare: Prepare | None = None,
) -> tuple[ModuleType, Any]:
    """Return the recipe that a command or its preset names, and the settings for `processes` processes. `prepare` may
    change what is required.

    Raises ValueError if the recipe or the preset cannot be found or read, if the preset is for another recipe, or
    without `runs`, if it names a recipe's file, since loading the file runs it.
    """
    recipe_file, preset, overrides = find(recipe, config, overrides, runs)
    module = catalog.load_recipe(recipe_file)
    if "model" in module.Config.model_fields and not issubclass(module.Config, RecipeConfig):
        # recipes that run a model: generate, chat
        run = next((number for number, word in enumerate(overrides) if "=" not in word), None)
        if run is not None and not any(word.startswith("model.path=") for word in overrides):
            overrides[run] = f"model.path={overrides[run]}"
    preset_for = preset_recipe(preset) if preset is not None else None
    if preset is not None and preset_for is not None and not preset_fits(module.Config, preset):
        name = recipe_file.stem if not isinstance(recipe_file, catalog.Alias) else recipe_file.name
        if preset_for not in (name, catalog.without_alias(name)):
            raise ValueError(
                f"the preset {config} is for the recipe {preset_for}, and {name} does not have all of its settings. "
                f"Run `leanft run {shlex.quote(preset_for)} --config {shlex.quote(str(config))}`."
            )
    if preset is not None:
        overrides = _without_unfitting(preset_values(preset), overrides)
    config_class = module.Config
    if prepare is not None:
        given = ({} if preset is None else preset_values(preset)) | dict(_split(word) for word in overrides)
        config_class, more = prepare(config_class, given)
        overrides = [*more, *overrides]
    cfg = load_config(config_class, preset, overrides, given_by)
    settings_of_user = {_split(override)[0] for override in overrides}
    if preset is not None and preset not in catalog.presets().values():
        settings_of_user |= preset_values(preset).keys()
    if isinstance(cfg, RecipeConfig) and "gradient_accumulation_steps" not in settings_of_user:
        cfg = _with_enough_batches(cfg, processes)
    return module, cfg


def _with_enough_batches(cfg: RecipeConfig, processes: int) -> RecipeConfig:
    """Raise gradient_accumulation_steps so that each process, or group that shares a batch, has a micro-batch per step,
    and a round of sampled completions has all completions of each prompt."""
    parallel, number_set, whole = cfg.group(ParallelConfig), cfg.gradient_accumulation_steps, cfg.batches_of_a_round
    least = 1 if parallel is None else processes // (parallel.context * parallel.tensor)
    number = math.ceil(max(number_set, least) / whole) * whole
    if number == number_set:
        return cfg
    reason = (
        f"each of {processes} processes has a batch"
        if number_set < least
        else "a round has whole groups of completions"
    )
    print_note(
        f"gradient_accumulation_steps={number} instead of {number_set}, so that {reason}. To choose another "
        "number, set gradient_accumulation_steps; it counts the batches of all processes."
    )
    return cfg.model_copy(update={"gradient_accumulation_steps": number})


def batches_of(cfg: BaseModel, words: list[str]) -> list[str]:
    """Return gradient_accumulation_steps as an override for every process, unless the `words` set it."""
    is_given = any(word.startswith("gradient_accumulation_steps") for word in words)
    if is_given or not isinstance(cfg, RecipeConfig):
        return []
    return [f"gradient_accumulation_steps={cfg.gradient_accumulation_steps}"]


def _without_unfitting(preset: dict[str, str], overrides: list[str]) -> list[str]:
    """Append overrides that disable settings of the preset that do not fit the given ones, with a note for each
    reason."""
    values = dict(_split(override) for override in overrides)
    more = list[str]()

    def disable(settings: dict[str, str], reason: str) -> None:
        off = {key: value for key, value in settings.items() if preset.get(key, value) != value and key not in values}
        if next(iter(settings)) in off:
            ignored = " and ".join(f"{key}={preset[key]}" for key in off)
            print_note(f"ignoring {ignored} of the preset, because {reason}")
            more.extend(f"{key}={value}" for key, value in off.items())

    if "data.source" in values:
        held_out = {"data.validation_source": "null"}
        if "data.validation_fraction" not in values:
            held_out["eval_answers"] = "0"  # no held-out prompts to answer
        evaluate = "To evaluate, set data.validation_source or data.validation_fraction."
        disable(held_out, f"data.source is set. {evaluate}")
    if (dtype := spelled_out(values.get("model.dtype", "bfloat16"))) != "bfloat16":
        disable({"optimizer.stochastic_rounding": "false"}, f"model.dtype={dtype} is not bfloat16.")
    return [*overrides, *more]


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _joined(words: list[str]) -> list[str]:
    """Join the words of `key = value`, which a shell splits at spaces, into `key=value`."""
    joined = list[str]()
    for word in words:
        before = joined[-1] if joined else "="
        if (word.startswith("=") and "=" not in before) or (re.fullmatch(r"[\w.]+=", before) and "=" not in word):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def find(
    recipe: str | None, config: str | None, overrides: list[str] | None, runs: bool = False
) -> tuple[Path | catalog.Alias, Path | None, list[str]]:
    """Return the recipe, the preset's file and the overrides. `recipe` may hold a preset or
    the first override instead of a recipe."""
    words = _joined([*([] if recipe is None else [recipe]), *(overrides or [])])
    is_named = recipe is not None and ("=" not in words[0] or config is None)
    recipe, overrides = (words[0], words[1:]) if is_named else (None, words)
    if recipe is not None and config is None and (recipe in catalog.presets() or recipe.endswith((".yaml", ".yml"))):
        recipe, config = None, recipe
    preset = catalog.find_preset(config) if config is not None else None
    if preset is not None:
        refuse_other_tools(preset)
        values = preset_values(preset)
        for name in CODE_OF_PLANS if not runs else ():
            file = values.get(name)
            if is_function_path(file) and not any(word.startswith(f"{name}=") for word in overrides):
                raise ValueError(
                    f"{config} has {name}={file}, a file whose code this command would run. Read the file, and if you "
                    f"trust it, name it too: --config {shlex.quote(str(config))} {shlex.quote(f'{name}={file}')}"
                )
    if recipe is None:
        recipe = preset_recipe(preset) if preset is not None else None
        if recipe is None:
            reason = f"{config} does not name one (`recipe: NAME`)" if config else "there is no --config that names one"
            how = f" Name it: leanft run RECIPE --config {shlex.quote(config)}." if config else ""
            raise ValueError(f"expected a RECIPE: {reason}.{how} `leanft ls` lists recipes and presets.")
        if recipe.endswith(".py") and not runs:
            raise ValueError(
                f"{config} names the recipe {recipe}, whose code this command would run. Read the file, and if you "
                f"trust it, name it too: {shlex.quote(recipe)} --config {shlex.quote(str(config))}"
            )
    return found(catalog.find_recipe, recipe), preset, overrides


def found(find: Callable[[str], Found], name: str) -> Found:
    """Return what `find` finds by its name. The error for another tool's name says what lean_ft has instead."""
    try:
        return find(name)
    except ValueError as error:
        hint = hint_for_command(name)
        raise ValueError(f"no recipe is called '{name}'.{hint}" if hint else str(error)) from None
