import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lean_ft.settings.text import load_config
from recipes import full_finetune_single_device as real_recipe
from tests.data.conftest import bytes_tokenizer
from tests.training import toy_recipe
from tests.training.toy_runs import QWEN


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    return folder


@pytest.fixture(scope="session")
def recipe() -> ModuleType:
    return toy_recipe


@pytest.fixture(scope="session")
def overrides(model_folder: Path) -> Callable[..., list[str]]:
    """`key=value` arguments of a toy run: 12 steps of 2 x 2 rows, 2 steps per epoch."""

    def build(output_dir: Path, **settings: Any) -> list[str]:
        given = {"model.path": model_folder, "model.random_init": "true", "model.dtype": "float32", "device": "cpu"}
        given |= {"gradient_accumulation_steps": 2, "epochs": 6, "save_every": 0, "output_dir": output_dir}
        given |= {name.replace("__", "."): value for name, value in settings.items()}
        return [f"{name}={value}" for name, value in given.items()]

    return build


@pytest.fixture(scope="session")
def config(recipe: ModuleType, overrides: Callable[..., list[str]]) -> Callable[..., Any]:
    return lambda output_dir, **settings: load_config(recipe.Config, None, overrides(output_dir, **settings))


@pytest.fixture(scope="session")
def train(recipe: ModuleType, config: Callable[..., Any]) -> Callable[..., Path]:
    """Run the toy recipe and return its directory."""

    def run(output_dir: Path, **settings: Any) -> Path:
        recipe.main(config(output_dir, **settings))
        return output_dir

    return run


@pytest.fixture(scope="session")
def stopped_run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("stopped") / "run", max_steps=4, save_every=2)


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of a run stopped at step 4 of 12, with checkpoints at 2 and 4."""
    return shutil.copytree(stopped_run, tmp_path / "run")


@pytest.fixture
def interrupted(recipe: ModuleType, config: Callable[..., Any], monkeypatch) -> Callable[..., Path]:
    """Run the toy recipe until the body of a step fails, and return its directory. With `killed`, nothing is saved."""

    def run(output_dir: Path, step: int, *, killed: bool = True, **settings: Any) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "FAILING_STEP", step)
            if killed:
                patch.setattr(recipe.Run, "_save_complete_steps", lambda self: None)
            with pytest.raises(KeyError):
                recipe.main(config(output_dir, **settings))
        return output_dir

    return run


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Inputs of the real recipe: a model with a byte tokenizer, and 13 rows of prompts and completions."""
    folder = tmp_path_factory.mktemp("inputs")
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "config.json").write_text(json.dumps({**QWEN, "vocab_size": 264, "num_hidden_layers": 1}))
    rows = [{"prompt": f"{n} times {n} is ", "completion": str(n * n)[: 1 + n % 3] * (1 + n % 4)} for n in range(13)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def train_real(inputs):
    """Run the real recipe and return its directory. An epoch has 4 steps of 2 x 2 rows; the last step has one row."""

    def run(output_dir, *settings):
        arguments = [f"model.path={inputs}", "model.random_init=true", "model.dtype=float32", "device=cpu"]
        arguments += [f"data.source={inputs / 'rows.jsonl'}", "data.max_length=48", "gradient_accumulation_steps=2"]
        arguments += [
            "optimizer.lr=0.01",
            "schedule.name=constant",
            "epochs=3",
            "save_every=0",
            f"output_dir={output_dir}",
        ]
        real_recipe.main(load_config(real_recipe.Config, None, [*arguments, *settings]))
        return output_dir

    return run
