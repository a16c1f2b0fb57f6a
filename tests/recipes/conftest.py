"""Run a recipe on the embedded model. A test module sets RECIPE and SETTINGS; `own_settings` adds settings that need a folder."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lean_ft.hub.paths import resolve_data_path
from lean_ft.plan.devices import Machines, choose_device
from lean_ft.plan.rehearsal import Rehearsal, rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe

Lines = list[dict[str, Any]]
Train = Callable[..., Lines]
# Settings of most modules.
TINY = ("model.path=tiny", "model.dtype=float32", "device=cpu", "plan=false")
PAIRS = (*TINY, "data.source=tiny/pairs_validation.jsonl", "data.max_length=96", "batch_size=4", "max_steps=6")
PAIRS += ("schedule.name=constant",)
PROBLEMS = (*TINY, "data.source=tiny/problems_train.jsonl", "data.chat=false", "data.max_prompt_length=32")
PROBLEMS += ("generation.max_new_tokens=8", "gradient_accumulation_steps=2")
OWN_CACHE = ("dpo", "lora_dpo_single_device", "kto", "reward")  # their tests count cache hits


@cache
def recipe_module(name: str) -> ModuleType:
    return load_recipe(find_recipe(name))


def config_of(name: str, *settings: str, folder: Path | str = "unused") -> Any:
    """Return the configuration of a recipe without a preset. `folder` is the output directory of a recipe that has one."""
    schema = recipe_module(name).Config
    own = [f"output_dir={folder}"] if "output_dir" in schema.model_fields else []
    return load_config(schema, None, [*settings, *own])


def run_recipe(name: str, folder: Path, *settings: str) -> Lines:
    """Run a recipe with these settings and no preset; return the lines of metrics.jsonl."""
    recipe_module(name).main(config_of(name, *settings, folder=folder))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@cache
def planned(name: str, *settings: str, device: str | None = "A100 80GB", processes: int = 1) -> Rehearsal:
    """Return the plan of a run, made once: on a card, or on a CPU if `device` is None."""
    chosen = choose_device(device, "cuda" if device else "cpu")
    return rehearse(recipe_module(name), config_of(name, *settings), chosen, Machines(processes))


def first_rows(source: str, count: int, folder: Path) -> str:
    """Write the first rows of embedded data to a file; return the setting that names the file."""
    file = folder / "few.jsonl"
    file.write_text("\n".join(resolve_data_path(source).read_text().splitlines()[:count]))
    return f"data.source={file}"


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """A step of a training loop by hand. Return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def own_settings() -> tuple[str, ...]:
    return ()


@pytest.fixture
def train(tmp_path: Path, request: pytest.FixtureRequest, own_settings: tuple[str, ...]) -> Train:
    """Run the module's recipe with its settings and more. TMP in a setting is the test's folder. Return the lines of metrics.jsonl."""

    def run(*settings: str, output: str = "run", name: str = request.module.RECIPE) -> Lines:
        own = [f"data.cache_dir={tmp_path / 'cache'}"] if name in OWN_CACHE else []
        given = [
            one.replace("TMP", str(tmp_path)) for one in (*own, *request.module.SETTINGS, *own_settings, *settings)
        ]
        return run_recipe(name, tmp_path / output, *given)

    return run


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a run of a test module's recipe with these settings, made once.

    TMP in a setting is the run's parent folder, where `prepare(folder)` may put files."""
    made: dict[object, Path] = {}

    def of(module: ModuleType, settings: tuple[str, ...], prepare: Callable[[Path], Any] | None = None) -> Path:
        key = module, settings
        if key not in made:
            folder = tmp_path_factory.mktemp("whole")
            if prepare is not None:
                prepare(folder)
            made[key] = folder / "run"
            run_of(module, settings, made[key])
        return made[key]

    return of


def run_of(module: ModuleType, settings: tuple[str, ...], folder: Path) -> Path:
    """Run the recipe of a test module with the module's settings and more; return its folder."""
    given = (one.replace("TMP", str(folder.parent)) for one in (*module.SETTINGS, *settings))
    run_recipe(module.RECIPE, folder, *given)
    return folder
