"""Run a recipe on the embedded model. A test module sets RECIPE; `own_settings` adds settings that need a folder."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lean_ft.frozen.teacher_cache import keep_teacher
from lean_ft.hub.paths import resolve_data_path
from lean_ft.plan.devices import Machines, choose_device
from lean_ft.plan.rehearsal import Rehearsal, rehearse
from lean_ft.settings import KeepTeacherConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.recipes.cases import OWN_CACHE, REWARDS, SETTINGS, Run
from tests.recipes.cases import PAIRS as PAIRS
from tests.recipes.cases import PROBLEMS as PROBLEMS
from tests.recipes.cases import TINY as TINY

Lines = list[dict[str, Any]]
Train = Callable[..., Lines]


@cache
def recipe_module(name: str) -> ModuleType:
    return load_recipe(find_recipe(name))


def config_of(name: str, *settings: str, folder: Path | str = "unused") -> Any:
    """Return the configuration of a recipe without a preset. `folder` is the output directory of a recipe that has
    one."""
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


def first_rows(source: str, count: int, folder: Path, name: str = "few.jsonl") -> str:
    """Write the first rows of embedded data to a file; return the setting that names the file."""
    file = folder / name
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
    """Run the module's recipe with the recipe's settings and more. TMP in a setting is the test's folder. Return the
    lines of metrics.jsonl."""

    def run(*settings: str, output: str = "run", name: str = request.module.RECIPE) -> Lines:
        own = [f"data.cache_dir={tmp_path / 'cache'}"] if name in OWN_CACHE else []
        given = [*own, *SETTINGS[request.module.RECIPE], *own_settings, *settings]
        return run_recipe(name, tmp_path / output, *(one.replace("TMP", str(tmp_path)) for one in given))

    return run


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Run], Path]:
    """Return the folder of a run of `tests.recipes.cases`, made once for all tests."""
    made: dict[object, Path] = {}

    def of(recipe: str, run: Run) -> Path:
        key = recipe, run.settings
        if key not in made:
            folder = tmp_path_factory.mktemp("whole")
            prepare(folder, run.settings)
            made[key] = run_of(recipe, run.settings, folder / "run")
        return made[key]

    return of


def prepare(folder: Path, settings: tuple[str, ...]) -> None:
    """Write the files that settings of `tests.recipes.cases` name."""
    (folder / "mine.py").write_text(REWARDS)
    first_rows("tiny/validation.jsonl", 6, folder, "texts.jsonl")
    first_rows("tiny/pairs_validation.jsonl", 6, folder, "pairs.jsonl")
    first_rows("tiny/notes_validation.jsonl", 6, folder, "notes.jsonl")
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    contexts = [rows[i - 1]["messages"] if i % 2 else rows[i - 1]["messages"][1]["content"] for i in range(len(rows))]
    with_contexts = [json.dumps(row | {"context": context}) for row, context in zip(rows, contexts, strict=True)]
    (folder / "contexts.jsonl").write_text("\n".join(with_contexts))
    if any("TMP/kept" in one for one in settings):
        kept = ("model.path=tiny", "data.source=tiny/validation.jsonl", "data.max_length=64", "top_k=16", "device=cpu")
        keep_teacher(load_config(KeepTeacherConfig, None, [*kept, f"destination={folder / 'kept'}"]))


def run_of(recipe: str, settings: tuple[str, ...], folder: Path) -> Path:
    """Run a recipe with its short settings and more, where TMP is the parent of this folder; return the folder."""
    run_recipe(recipe, folder, *(one.replace("TMP", str(folder.parent)) for one in (*SETTINGS[recipe], *settings)))
    return folder
