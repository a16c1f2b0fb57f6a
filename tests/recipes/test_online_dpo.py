"""online_dpo on the embedded model: its pairs, its initial values, and that it learns."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.training.toy_runs import metrics

RECIPE = "online_dpo"
SETTINGS = (
    "model.path=tiny",
    "model.dtype=float32",
    "data.source=tiny/problems_train.jsonl",
    "data.chat=false",
    "data.max_prompt_length=32",
    "rewards=[length]",
    "generation.max_new_tokens=8",
    "generation.num_answers=3",
    "optimizer.lr=1e-4",
    "batch_size=2",
    "gradient_accumulation_steps=2",
    "max_steps=3",
    "device=cpu",
    "plan=false",
)
Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run the recipe with settings; return its folder."""

    def run(*settings: str, output: str = "run") -> Path:
        module = load_recipe(find_recipe("online_dpo"))
        module.main(load_config(module.Config, None, [*SETTINGS, f"output_dir={tmp_path / output}", *settings]))
        return tmp_path / output

    return run


@pytest.mark.parametrize("settings", [(), ("lora.rank=4",), ("loss.name=ipo",)], ids=str)
def test_margins_start_at_0(train: Train, settings: tuple[str, ...]) -> None:
    first, *_ = metrics(train(*settings, "max_steps=1"))
    assert first["rewards/margins"] == 0
    assert first["loss"] == pytest.approx(25 if "loss.name=ipo" in settings else math.log(2), rel=1e-6)


def test_the_best_and_worst_completions_form_a_pair_unless_equal(train: Train, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def f(prompts, completions):\n"
        "    worth = [1.0, None, 3.0, 0.0, 0.0, None, None, 2.0, None, 5.0, 4.0, 4.5]\n"
        "    return [value for value, _ in zip(worth, completions, strict=True)]\n"
        "def even(completions):\n    return [1.0] * len(completions)\n"
    )
    folder = train(
        f"rewards=['{rewards}:f']", "generation.passes=2", "save_every=1", "max_steps=1", "optimizer.name=sgd"
    )
    path = folder / "step_00000001" / "training_state" / "training_state.json"
    ids = [answer["ids"] for answer in json.loads(path.read_text())["batches"]["answers"]]
    pairs = [(2, 0), (9, 10)]  # the completions of the 2nd and 3rd prompt have equal rewards
    (line,) = metrics(folder)
    assert line["target_tokens"] == sum(len(ids[i]) for pair in pairs for i in pair)
    assert line["rewards/margins"] == 0
    nothing = train(f"rewards=['{rewards}:even']", "optimizer.name=sgd", "optimizer.weight_decay=0", output="even")
    assert [line["target_tokens"] for line in metrics(nothing)] == [0, 0, 0]
    (kept,), (tiny,) = nothing.glob("step_00000003/*.safetensors"), [find_tiny()]
    assert all(torch.equal(value, load_file(tiny)[name].float()) for name, value in load_file(kept).items())


def find_tiny() -> Path:
    import lean_ft

    return Path(lean_ft.__file__).parent / "assets" / "tiny" / "model" / "model.safetensors"


def test_it_learns(train: Train) -> None:
    """On held-out problems, sampled as in training."""
    settings = (
        "rewards=[exact_answer]",
        "data.validation_source=tiny/problems_validation.jsonl",
        "generation.num_answers=8",
    )
    given = ("batch_size=16", "gradient_accumulation_steps=1", "max_steps=12", "optimizer.lr=3e-4")
    (evaluation,) = [line["eval_reward"] for line in metrics(train(*settings, *given)) if "eval_reward" in line]
    assert evaluation > 0.4  # from 0.22


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("generation.num_answers=1",), "makes no pair"),
        (("reference.kind=cached",), "completions are sampled anew"),
        (("loss.name=simpo", "reference.kind=model"), "with loss.name=simpo nothing reads a reference"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(train: Train, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(*settings)
