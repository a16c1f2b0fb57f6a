"""`leanft run`: trains."""

import contextlib
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from lean_ft.before_torch import prepare_torch
from lean_ft.catalog import is_shipped
from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, load_run
from lean_ft.cli.errors import add_place, is_out_of_memory
from lean_ft.interrupts import OutsideTraining
from lean_ft.paths import repository_name
from lean_ft.settings import ModelConfig, RecipeConfig

_TORCHRUN_FLAGS = (
    *("--nproc-per-node", "--nproc_per_node", "--nnodes", "--node-rank", "--node_rank", "--standalone"),
    *("--master-addr", "--master_addr", "--master-port", "--master_port", "--max-restarts"),
    *("--rdzv-backend", "--rdzv_backend", "--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-id", "--rdzv_id"),
)


def _refuse_torchrun(value: str | None) -> None:
    if value is not None:
        raise ValueError(
            "torchrun's flags start several processes, and no recipe uses more than one yet. "
            "Leave them out: leanft run RECIPE --config NAME."
        )


def run(
    recipe: Recipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    torchrun: Annotated[str | None, typer.Option(*_TORCHRUN_FLAGS, hidden=True, callback=_refuse_torchrun)] = None,
    debug: Debug = False,
) -> None:
    """Run a recipe.

    RECIPE is a name from `leanft ls`, or your own file. Settings come from its defaults, then the preset, then
    KEY=VALUE. `leanft cat RECIPE` prints them all.
    """
    with OutsideTraining(shlex.join(["leanft", *sys.argv[1:]])):  # before torch is imported, which takes seconds
        prepare_torch()
        run_recipe(*load_run(recipe, config, overrides))


def run_recipe(recipe: ModuleType, cfg: Any) -> None:
    """Runs a recipe with its settings, models of the hub held to a commit, and tells beforehand what it takes."""
    if names_repository(cfg):
        from lean_ft.training.model_commits import hold_models_to_commits  # here, as it brings torch

        cfg = hold_models_to_commits(cfg)
    if isinstance(cfg, RecipeConfig) and plans_itself(recipe, cfg):
        _tell_outlook(recipe, cfg)
    try:
        recipe.main(cfg)
    except BrokenPipeError as error:
        raise RuntimeError("whatever read the output has gone, and the run stopped with it.") from error
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(memory_advice(recipe, cfg))
        add_place(error, Path(recipe.__file__ or ""), is_shipped(recipe), getattr(cfg, "output_dir", None))
        raise


def plans_itself(recipe: ModuleType, cfg: RecipeConfig) -> bool:
    """Whether a run is rehearsed before it begins: a user's own file, which may do anything, is not run twice unasked."""
    return is_shipped(recipe) if cfg.plan == "auto" else cfg.plan


def _tell_outlook(recipe: ModuleType, cfg: RecipeConfig) -> None:
    """Says what the run is going to take, before it loads weights."""
    from lean_ft.log import say
    from lean_ft.plan.beforehand import foresee
    from lean_ft.training.device import resolve_device

    resolve_device(cfg.device)  # one that is not there is said before anything else

    try:
        outlook = foresee(recipe, cfg)
    except RuntimeError as error:
        say("plan", f"none, as the rehearsal of a step failed: {error}")
        return
    if outlook is not None:
        say("plan", str(outlook))
        if not outlook.fits:
            say("plan", "WARNING: that does not fit. The same arguments after `leanft plan` name settings that do.")


def names_repository(cfg: Any) -> bool:
    """Whether a model comes from the Hugging Face hub."""
    models = [group for _, group in cfg if isinstance(group, ModelConfig)]
    return any(repository_name(model.path) for model in models)


def memory_advice(recipe: ModuleType, cfg: Any) -> str:
    """What to do about a run that was out of memory: settings that take less, with what each leaves."""
    advice = "A smaller batch_size or a shorter data.max_length takes less."
    if isinstance(cfg, RecipeConfig) and not plans_itself(recipe, cfg):
        advice += " The same arguments after `leanft plan` name settings that fit."
    elif isinstance(cfg, RecipeConfig):
        from lean_ft.plan.beforehand import what_takes_less

        with contextlib.suppress(RuntimeError):  # a recipe that cannot be rehearsed: say what holds for all
            advice = what_takes_less(recipe, cfg) or advice
    if isinstance(cfg, RecipeConfig) and cfg.batch_size > 1:
        advice += "\nA smaller batch_size with as many more gradient_accumulation_steps goes on with this run."
    return f"Out of memory. {advice}"
