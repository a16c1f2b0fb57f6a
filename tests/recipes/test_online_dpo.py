"""online_dpo on the embedded model: which completions form a pair."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from lean_ft import load_model
from tests.recipes.conftest import Train

RECIPE = "online_dpo"


def test_the_best_and_worst_completions_form_a_pair_unless_equal(train: Train, tmp_path: Path, capsys) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def f(prompts, completions):\n"
        "    worth = [1.0, None, 3.0, 0.0, 0.0, None, None, 2.0, None, 5.0, 4.0, 4.5]\n"
        "    return [value for value, _ in zip(worth, completions, strict=True)]\n"
        "def even(completions):\n    return [1.0] * len(completions)\n"
    )
    (line,) = train(f"rewards=['{rewards}:f']", "generation.passes=2", "save_every=1", "max_steps=1")
    path = tmp_path / "run" / "step_00000001" / "training_state" / "training_state.json"
    ids = [answer["ids"] for answer in json.loads(path.read_text())["batches"]["answers"]]
    pairs = [(2, 0), (9, 10)]  # the completions of the 2nd and 3rd prompt have equal rewards
    assert line["target_tokens"] == sum(len(ids[i]) for pair in pairs for i in pair)
    assert line["rewards/margins"] == 0
    lines = train(f"rewards=['{rewards}:even']", "optimizer.name=sgd", "optimizer.weight_decay=0", output="even")
    assert [line["target_tokens"] for line in lines] == [0, 0, 0]
    assert [(line["reward"], line["even_groups"], line["loss"]) for line in lines] == [(1, 1, None)] * 3
    said = capsys.readouterr().out
    assert said.count("all completions of each prompt have the same reward") == 1 and "not finite" not in said
    (kept,) = (tmp_path / "even").glob("step_00000003/*.safetensors")
    before = dict(load_model("tiny").named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in load_file(kept).items())
