import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lean_ft.config import load_config
from tests.training import toy_recipe
from tests.training.toy_runs import QWEN


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    return folder


@pytest.fixture(scope="session")
def recipe() -> ModuleType:
    return toy_recipe


@pytest.fixture
def overrides(model_folder: Path) -> Callable[..., list[str]]:
    """`key=value` arguments of a toy run: 12 steps of 2 x 2 rows, 2 steps an epoch."""

    def build(output_dir: Path, **settings: Any) -> list[str]:
        given = {
            "model.path": model_folder,
            "model.random_init": "true",
            "model.dtype": "float32",
            "gradient_accumulation_steps": 2,
            "epochs": 6,
            "device": "cpu",
            "output_dir": output_dir,
        } | {name.replace("__", "."): value for name, value in settings.items()}
        return [f"{name}={value}" for name, value in given.items()]

    return build


@pytest.fixture
def config(recipe: ModuleType, overrides: Callable[..., list[str]]) -> Callable[..., Any]:
    def build(output_dir: Path, **settings: Any) -> Any:
        return load_config(recipe.Config, None, overrides(output_dir, **settings))

    return build


@pytest.fixture
def train(recipe: ModuleType, config: Callable[..., Any]) -> Callable[..., Path]:
    """Run the toy recipe to its end and return its directory."""

    def run(output_dir: Path, **settings: Any) -> Path:
        recipe.main(config(output_dir, **settings))
        return output_dir

    return run
