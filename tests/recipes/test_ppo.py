"""ppo on the embedded model: its initial values, that it learns, and the value model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lean_ft import load_model
from lean_ft.plan.devices import Machines, choose_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.training.toy_runs import metrics

RECIPE = "ppo"
SETTINGS = (
    "model.path=tiny",
    "model.dtype=float32",
    "data.source=tiny/problems_train.jsonl",
    "data.chat=false",
    "data.max_prompt_length=32",
    "rewards=[length]",
    "generation.max_new_tokens=8",
    "generation.passes=2",
    "optimizer.lr=1e-4",
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "max_steps=3",
    "device=cpu",
    "plan=false",
)
Train = Callable[..., Path]


def config(folder: Path, *settings: str) -> Any:
    module = load_recipe(find_recipe("ppo"))
    return load_config(module.Config, None, [*SETTINGS, f"output_dir={folder}", *settings])


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run the recipe with settings; return its folder."""

    def run(*settings: str, output: str = "run") -> Path:
        load_recipe(find_recipe("ppo")).main(config(tmp_path / output, *settings))
        return tmp_path / output

    return run


def state(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"step_{step:08d}" / "training_state" / "training_state.json").read_text())["batches"]


@pytest.mark.parametrize("settings", [(), ("lora.rank=4", "loss.gae_lambda=0.5")], ids=["full", "adapter"])
def test_ratios_start_at_1_and_values_at_0(train: Train, settings: tuple[str, ...]) -> None:
    folder = train(*settings, "save_every=1", "max_steps=2")
    answers, first, *_ = state(folder, 1)["answers"], *metrics(folder)
    assert first["kl"] == first["clip_share"] == 0
    assert all(value == 0 for answer in answers for value in answer["values"])
    decay = 0.5 if settings else 0.95
    returns = [
        [decay ** (len(answer["ids"]) - 1 - t) * answer["reward"] for t in range(len(answer["ids"]))]
        for answer in answers
    ]
    for answer, expected in zip(answers, returns, strict=True):
        assert answer["returns"] == pytest.approx(expected, rel=1e-5)
    flat = torch.tensor([value for row in returns for value in row], dtype=torch.float64)
    assert first["value_loss"] == pytest.approx(flat.square().mean().item() / 2, rel=1e-5)
    above = [value for answer in answers for value in answer["advantages"]]
    assert above == pytest.approx(((flat - flat.mean()) / flat.std()).tolist(), rel=1e-4, abs=1e-6)
    assert first["policy_loss"] == pytest.approx(0, abs=1e-6)  # ratios of 1 times advantages of mean 0
    beside = load_file(folder / "step_00000002" / "training_state" / "beside.safetensors")
    assert (sum(tensor.numel() for tensor in beside.values()) > 800_000) == (
        not settings
    )  # with an adapter, only an output layer
    assert (beside["score.weight" if settings else "own.score.weight"] != 0).all()


@pytest.mark.parametrize("settings", [(), ("lora.rank=4",)], ids=["full", "adapter"])
def test_shared_prompts_change_no_number(train: Train, settings: tuple[str, ...]) -> None:
    given = (*settings, "generation.num_answers=4", "max_steps=2", "generation.passes=2")
    shared, repeated = (
        metrics(train(*given, f"data.shared_prompt={value}", output=value)) for value in ("true", "false")
    )
    for line, expected in zip(shared, repeated, strict=True):
        assert line["tokens"] < 0.7 * expected["tokens"]
        for name in ("loss", "value_loss", "policy_loss", "grad_norm", "kl", "entropy", "reward"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_muon_leaves_both_output_layers_to_adamw(train: Train) -> None:
    (state,) = train("optimizer.name=muon", "max_steps=1").glob("step_00000001/training_state/optimizer.safetensors")
    kept: dict[str, set[str]] = {}
    for name in load_file(state):
        parameter, _, what = name.rpartition(".")
        kept.setdefault(parameter, set()).add(what)
    matrix, embedding = "value.own.model.layers.0.mlp.up_proj.weight", "policy.model.embed_tokens.weight"
    assert kept["value.own.score.weight"] == kept[embedding] != kept[matrix]


@pytest.mark.long
def test_it_learns(train: Train) -> None:
    """On held-out problems, sampled as in training."""
    settings = (
        "rewards=[exact_answer]",
        "data.validation_source=tiny/problems_validation.jsonl",
        "generation.passes=4",
    )
    folder = train(*settings, "batch_size=64", "gradient_accumulation_steps=1", "max_steps=16", "optimizer.lr=3e-4")
    (evaluation,) = [line["eval_reward"] for line in metrics(folder) if "eval_reward" in line]
    assert evaluation > 0.45  # from 0.22


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("lora.rank=4", "value.path=tiny"), "with an adapter the value model is an output layer on the policy"),
        (("generation.top_k=5",), "sample from other probabilities"),
        (("generation.most_attempts=2",), "compares each with its expected value"),
        (("reference.kind=cached",), "completions are sampled anew"),
        (("loss.kl_weight=0", "reference.kind=model"), "with loss.kl_weight=0 nothing reads a reference"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(train: Train, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(*settings)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_value_model_is_planned(tmp_path: Path, processes: int) -> None:
    """A separate model with gradients and optimizer state, sharded like the policy; next to nothing with an adapter."""
    module = load_recipe(find_recipe("ppo"))

    def weights(*settings: str) -> int:
        given = ("loss.kl_weight=0", *settings)
        cfg = config(tmp_path / "run", *given)
        found = rehearse(module, cfg, choose_device(None, "cpu"), Machines(processes))
        return found.peak.bytes_by_label["weights"]

    parameters = sum(parameter.nbytes for parameter in load_model("tiny").parameters())
    assert weights() == pytest.approx(2 * parameters / processes, rel=0.05)
    assert weights("lora.rank=4") == pytest.approx(parameters / processes, rel=0.05)
