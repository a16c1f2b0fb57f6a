"""Runs on a GPU have the losses of runs on a CPU: of sources, with the averages as teacher, with drafting layers."""

from pathlib import Path

import pytest

from lean_ft.hub.paths import resolve_model_path
from tests.models.drafting_checkpoints import checkpoint_with_drafting
from tests.recipes.conftest import run_recipe

COMMON = ("plan=false", "compile=false", "max_steps=3", "batch_size=4", "model.dtype=float32", "schedule.name=constant")
SUMS = "{path: tiny/problems_validation.jsonl, columns: {completion: answer}}"
TWO_SOURCES = f"data.validation_source=[tiny/validation.jsonl,{SUMS}]"
CASES = {
    "averages and sources": (
        "finetune",
        *(
            "optimizer.lr=1e-3",
            "model.path=tiny",
            "data.source=tiny/validation.jsonl",
            TWO_SOURCES,
            "data.packing=padding_free",
        ),
        *("optimizer.ema=0.5", "optimizer.in_backward=true", "eval_every=3"),
    ),
    "the averages teach": (
        "distill",
        *(
            "model.path=tiny-tools",
            "data.source=tiny-tools/calls_train.jsonl",
            "data.max_length=96",
            "data.max_teacher_length=256",
        ),
        *("data.columns.context=context", "distill.teacher=self", "distill.teacher_kind=ema", "optimizer.ema=0.5"),
        "optimizer.lr=1e-3",
    ),
    "the base of an adapter teaches": (
        "distill",
        *(
            "model.path=tiny-tools",
            "data.source=tiny-tools/calls_train.jsonl",
            "data.max_length=96",
            "data.max_teacher_length=256",
        ),
        *("data.columns.context=context", "distill.teacher=self", "lora={}", "data.packing=bfd", "optimizer.lr=0"),
    ),
    "drafting layers": (
        "finetune",
        *("model.path=DRAFTS", "model.mtp=train", "data.source=tiny/validation.jsonl", "data.max_length=64"),
        *("data.packing=bfd", "data.validation_fraction=0.1", "optimizer.lr=1e-3"),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    recipe, *settings = CASES[name]
    folder = tmp_path / "drafts"
    folder.mkdir()
    checkpoint_with_drafting(folder, "glm4_moe", 1, vocab_size=768, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((resolve_model_path("tiny") / file).read_bytes())
    given = [setting.replace("DRAFTS", str(folder)) for setting in (*COMMON, *settings)]
    ours, expected = (run_recipe(recipe, tmp_path / one, *given, f"device={one}") for one in ("cuda", "cpu"))
    assert len(ours) == len(expected) > 2
    for line, other in zip(ours, expected, strict=True):
        values = {key: value for key, value in other.items() if "loss" in key or "mtp" in key}
        assert values and {key: line[key] for key in values} == pytest.approx(values, rel=1e-3, abs=1e-5)
