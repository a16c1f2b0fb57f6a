"""Runs of a recipe on the embedded model. A test module gives its RECIPE and SETTINGS; `own_settings` adds what takes a folder."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe

Lines = list[dict[str, Any]]
OWN_CACHE = ("dpo", "lora_dpo_single_device", "kto", "reward")  # a test counts what is found there


@cache
def recipe_module(name: str) -> ModuleType:
    return load_recipe(find_recipe(name))


def run_recipe(name: str, folder: Path, *settings: str) -> Lines:
    """Runs a recipe with settings alone, and returns the lines of its metrics."""
    module = recipe_module(name)
    module.main(load_config(module.Config, None, [*settings, f"output_dir={folder}"]))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def own_settings() -> tuple[str, ...]:
    return ()


@pytest.fixture
def train(tmp_path: Path, request: pytest.FixtureRequest, own_settings: tuple[str, ...]) -> Callable[..., Lines]:
    """Runs the module's recipe with its settings and more; TMP in them is the test's folder. Returns the lines of its metrics."""

    def run(*settings: str, output: str = "run", name: str = request.module.RECIPE) -> Lines:
        own = [f"data.cache_dir={tmp_path / 'cache'}"] if name in OWN_CACHE else []
        given = [
            one.replace("TMP", str(tmp_path)) for one in (*own, *request.module.SETTINGS, *own_settings, *settings)
        ]
        return run_recipe(name, tmp_path / output, *given)

    return run
