"""The log lines at a run's start and end."""

from pathlib import Path

import pytest

from tests.recipes.conftest import PAIRS, PROBLEMS, TINY, run_recipe

CHATS = (*TINY, "data.source=tiny/validation.jsonl", "data.max_length=64")
SAMPLED = (*PROBLEMS, "rewards=[length]", "generation.num_answers=2")
STEPS = [  # recipe, settings, size of a step
    ("finetune", (*CHATS, "batch_size=1"), "1 sequence per step"),
    ("finetune", (*CHATS, "batch_size=3", "data.packing=bfd"), "3 packed rows per step"),
    ("finetune", (*CHATS, "data.batch_tokens=128"), "up to 128 positions per step"),
    ("classify", (*TINY, "data.source=tiny/topics_validation.jsonl"), "2 texts per step"),
    ("dpo", (*PAIRS, "gradient_accumulation_steps=2"), "2 x 4 pairs per step"),
    ("kto", PAIRS, "4 answers per step"),
    ("grpo", SAMPLED, "2 x 8 completions per step"),
    ("online_dpo", SAMPLED, "2 x 8 pairs per step"),
]


@pytest.mark.first(2)
@pytest.mark.parametrize(("name", "settings", "size"), STEPS, ids=str)
def test_the_size_of_a_step_has_the_unit_of_batch_size(name, settings, size, tmp_path: Path, capsys) -> None:
    run_recipe(name, tmp_path / "run", *settings, "max_steps=1")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    assert line.endswith(f" per epoch; {size}")
