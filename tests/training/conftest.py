import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lean_ft.config import load_config

RECIPE = Path(__file__).with_name("toy_recipe.py")
QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    return folder


@pytest.fixture(scope="session")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("toy_recipe", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_recipe"] = module
    spec.loader.exec_module(module)
    return module


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


TIMES = {"tokens_per_second", "target_tokens_per_second", "step_seconds", "peak_memory_bytes", "rss_bytes"}


def metrics(directory: Path, *, timed: bool = True) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return rows if timed else [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def digests(checkpoint: Path) -> dict[str, str]:
    """A checkpoint's files by name, each with its content's hash, except those that name their own run."""
    return {
        path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "training_state.json")
    }
