"""Distillation on two ranks is that on one: a teacher that is cut as the student is, or what was kept of one."""

import os
from pathlib import Path
from typing import Any

import pytest

from lean_ft.frozen.teacher_cache import keep_teacher
from lean_ft.settings import KeepTeacherConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.parallel.processes import on_ranks
from tests.training.toy_runs import TIMES, digests, metrics

pytestmark = pytest.mark.long  # each starts processes, which takes half a minute; test_dpo and test_finetune stay

SETTINGS = (
    "model.path=tiny",
    "model.random_init=true",
    "model.dtype=float32",
    "data.source=tiny/validation.jsonl",
    "data.max_length=64",
    "optimizer.lr=1e-3",
    "schedule.name=constant",
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "max_steps=3",
    "memory.host_pool=false",
    "memory.loss_chunk_tokens=16",
    "plan=false",
    "device=cpu",
)
# With two micro-batches a step, each of two ranks has one, and their sum has the same bits in either order.
SAME_BITS = {
    "cut": ("distill.teacher=tiny", "data.validation_fraction=0.3", "optimizer.in_backward=true", "parallel.shard=2"),
    "copies": ("distill.teacher=tiny", "distill.divergence=jsd", "parallel.replicate=2"),
    "adapter and 4 bits": ("distill.teacher=tiny", "distill.teacher_dtype=nf4", "lora.rank=4"),
    "kept": ("distill.cached=KEPT", "distill.cross_entropy_weight=0.3", "data.packing=bfd"),
}
# 206 rows are 52 batches, so an epoch's last step of three has one: fewer than go round.
CLOSE = ("distill.cached=KEPT", "gradient_accumulation_steps=3", "max_steps=19", "optimizer.name=sgd")


def run(folder: Path, *settings: str) -> None:
    recipe = load_recipe(find_recipe("distill"))
    given = [setting.replace("KEPT", os.environ["KEPT"]) for setting in settings if "parallel" not in setting]
    given += [setting for setting in settings if "parallel" in setting and "RANK" in os.environ]
    recipe.main(load_config(recipe.Config, None, [*SETTINGS, f"output_dir={folder}", *given]))


def work(folder: Path) -> None:
    for name, settings in SAME_BITS.items():
        run(folder / name, *settings)
    run(folder / "close", *CLOSE)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    given = ["model.path=tiny", *SETTINGS[2:5], "device=cpu", "top_k=8", f"destination={folder / 'scores'}"]
    keep_teacher(load_config(KeepTeacherConfig, None, given))
    os.environ["KEPT"] = str(folder / "scores")
    on_ranks(2, work, folder)
    return folder


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in metrics(folder)]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6), row["step"]


@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one(on_two: Path, tmp_path: Path, name: str) -> None:
    run(tmp_path / "one", *SAME_BITS[name])
    assert digests(on_two / name / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
    assert_close(numbers(on_two / name), numbers(tmp_path / "one"))


def test_a_step_that_does_not_go_round_is_the_same_but_for_rounding(on_two: Path, tmp_path: Path) -> None:
    run(tmp_path / "one", *CLOSE)
    assert_close(numbers(on_two / "close"), numbers(tmp_path / "one"))
