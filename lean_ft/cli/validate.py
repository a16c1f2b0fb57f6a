"""`leanft validate`: would this run start?"""

from collections.abc import Iterator
from typing import Any

import typer

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, load_run
from lean_ft.hub import find_cached
from lean_ft.paths import repository_name, resolve_model_path
from lean_ft.settings_text import dump


def validate(recipe: Recipe = None, overrides: Overrides = None, config: Preset = None, debug: Debug = False) -> None:
    """Check a run's settings and the files they name, without running it.

    Prints every setting as it would be used.
    """
    _, cfg = load_run(recipe, config, overrides)
    if problems := list(_missing_files(cfg)):
        raise ValueError("\n".join(problems))
    typer.echo(f"{dump(cfg)}{_fetched_later(cfg)}# ok: the settings are valid, and the files they name are there.")


def _fetched_later(cfg: Any) -> str:
    """A line on a model that is neither on this disk nor looked for on the hub: validating needs no network."""
    model = getattr(cfg, "model", None)
    name = None if model is None else repository_name(model.path)
    if model is None or name is None or find_cached(name, weights=not model.random_init) is not None:
        return ""
    return f"# {name} is no folder here and not downloaded: the run gets it from the Hugging Face hub, or leanft download.\n"


def _missing_files(cfg: Any) -> Iterator[str]:
    """What the settings name and is not there, for the groups that the recipe has; a data file's first row is read."""
    from lean_ft.data.sources import read_rows  # here, because it brings torch, which the other verbs must not wait for

    model, data = getattr(cfg, "model", None), getattr(cfg, "data", None)
    if model is not None and not repository_name(model.path):
        try:
            folder = resolve_model_path(model.path)
            if not (folder / "config.json").is_file():
                yield f"model path {model.path!r} has no config.json; expected a Hugging Face model folder."
        except ValueError as error:
            yield str(error)
    for name in ("source", "validation_source"):
        value = getattr(data, name, None)
        for source in [value] if isinstance(value, str) else value or []:
            try:
                row = next(read_rows([source], None, data), None)
                if row is not None and row.problem is not None:
                    yield f"data.{name}: {row.place}: {row.problem}."
            except ValueError as error:
                yield f"data.{name}: {error}"
