"""ppo on the embedded model: its initial values and its value model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_ft import load_model
from tests.recipes.cases import SETTINGS
from tests.recipes.conftest import Train, planned

RECIPE = "ppo"


@pytest.mark.first(1)
@pytest.mark.parametrize("settings", [("lora.rank=4", "loss.gae_lambda=0.5"), ()], ids=["adapter", "full"])
def test_ratios_start_at_1_and_values_at_0(train: Train, settings: tuple[str, ...], tmp_path: Path) -> None:
    first, _ = train(*settings, "save_every=1", "max_steps=2")
    folder = tmp_path / "run"
    state = json.loads((folder / "step_00000001" / "training_state" / "training_state.json").read_text())
    answers = state["batches"]["answers"]
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
    # With an adapter, the value model is only an output layer.
    assert (sum(tensor.numel() for tensor in beside.values()) > 800_000) == (not settings)
    assert (beside["score.weight" if settings else "own.score.weight"] != 0).all()


@pytest.mark.long
def test_equal_rewards_train_the_value_model(train: Train, tmp_path: Path, capsys) -> None:
    (tmp_path / "even.py").write_text("def f(completions):\n    return [1.0] * len(completions)\n")
    lines = train("rewards=['TMP/even.py:f']", "generation.num_answers=2", "max_steps=1")
    assert lines[0]["even_groups"] == 1 and lines[0]["grad_norm"] > 0
    assert "train nothing" not in capsys.readouterr().out


@pytest.mark.long
def test_muon_leaves_both_output_layers_to_adamw(train: Train, tmp_path: Path) -> None:
    train("optimizer.name=muon", "max_steps=1")
    kept: dict[str, set[str]] = {}
    for name in load_file(tmp_path / "run/step_00000001/training_state/optimizer.safetensors"):
        parameter, _, what = name.rpartition(".")
        kept.setdefault(parameter, set()).add(what)
    matrix, embedding = "value.own.model.layers.0.mlp.up_proj.weight", "policy.model.embed_tokens.weight"
    assert kept["value.own.score.weight"] == kept[embedding] != kept[matrix]


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_the_value_model_is_planned(processes: int) -> None:
    """A separate model with gradients and optimizer state, sharded like the policy; next to nothing with an adapter."""

    def weights(*settings: str) -> int:
        found = planned("ppo", *SETTINGS["ppo"], "loss.kl_weight=0", *settings, device=None, processes=processes)
        return found.peak.bytes_by_label["weights"]

    parameters = sum(parameter.nbytes for parameter in load_model("tiny").parameters())
    assert weights() == pytest.approx(2 * parameters / processes, rel=0.05)
    assert weights("lora.rank=4") == pytest.approx(parameters / processes, rel=0.05)
