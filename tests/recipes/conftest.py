"""Run a recipe on the embedded model. A test module sets RECIPE and SETTINGS; `own_settings` adds settings that need a folder."""

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
OWN_CACHE = ("dpo", "lora_dpo_single_device", "kto", "reward")  # their tests count cache hits


@cache
def recipe_module(name: str) -> ModuleType:
    return load_recipe(find_recipe(name))


def run_recipe(name: str, folder: Path, *settings: str) -> Lines:
    """Run a recipe with these settings and no preset; return the lines of metrics.jsonl."""
    module = recipe_module(name)
    module.main(load_config(module.Config, None, [*settings, f"output_dir={folder}"]))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def own_settings() -> tuple[str, ...]:
    return ()


@pytest.fixture
def train(tmp_path: Path, request: pytest.FixtureRequest, own_settings: tuple[str, ...]) -> Callable[..., Lines]:
    """Run the module's recipe with its settings and more. TMP in a setting is the test's folder. Return the lines of metrics.jsonl."""

    def run(*settings: str, output: str = "run", name: str = request.module.RECIPE) -> Lines:
        own = [f"data.cache_dir={tmp_path / 'cache'}"] if name in OWN_CACHE else []
        given = [
            one.replace("TMP", str(tmp_path)) for one in (*own, *request.module.SETTINGS, *own_settings, *settings)
        ]
        return run_recipe(name, tmp_path / output, *given)

    return run
