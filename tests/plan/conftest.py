"""A model whose plans take little time. `planned` of tests/recipes/conftest.py makes each plan once for all files."""

import json
import shutil
from pathlib import Path

import pytest

from lean_ft.hub.paths import resolve_model_path


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with two layers, without its weights."""
    folder, tiny = tmp_path_factory.mktemp("small") / "model", resolve_model_path("tiny")
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return folder
