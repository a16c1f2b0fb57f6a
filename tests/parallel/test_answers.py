"""kto and reward on two ranks are those on one: the same numbers and files."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.parallel.processes import on_ranks
from tests.training.toy_runs import TIMES, digests, metrics

pytestmark = pytest.mark.long  # each starts processes, which takes half a minute; test_dpo and test_finetune stay

SETTINGS = (
    "model.path=tiny",
    "model.dtype=float32",
    "data.source=tiny/pairs_validation.jsonl",
    "data.max_length=96",
    "optimizer.lr=1e-4",
    "schedule.name=constant",
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "max_steps=3",
    "memory.host_pool=false",
    "memory.loss_chunk_tokens=16",
    "plan=false",
    "device=cpu",
)
HELD_OUT = ("data.validation_fraction=0.05", "eval_every=2")
# With two micro-batches a step, each of two ranks has one, and their sum has the same bits in either order.
SAME_BITS = {
    "kto": HELD_OUT,
    "kto adapter": ("reference.kind=adapter_off", "lora.rank=4", "data.packing=bfd", "batch_size=2"),
    "kto bco": ("loss.name=bco", "reference.kind=model", "optimizer.in_backward=true"),
    "reward": (*HELD_OUT, "optimizer.in_backward=true"),
    "reward adapter": ("lora.rank=4", "loss.per_token=true"),
}
# Three micro-batches a step are more than go round; the fourth, of a single answer or pair, ends an epoch of 13.
CLOSE = ("gradient_accumulation_steps=3", "max_steps=5", "epochs=2", "optimizer.name=sgd", "optimizer.lr=1e-2")
RAGGED = {"kto": CLOSE, "kto bco": (*CLOSE, "loss.name=bco"), "reward": CLOSE}


def run(name: str, folder: Path, *settings: str) -> None:
    recipe = load_recipe(find_recipe(name.partition(" ")[0]))
    given = [*SETTINGS, f"data.cache_dir={folder.with_suffix('.cache')}", f"output_dir={folder}", *settings]
    recipe.main(load_config(recipe.Config, None, given))


def write_rows(folder: Path) -> None:
    """Of 13 rows batches of four leave one, whether they are pairs or answers."""
    answers = [{"prompt": f"{i}", "completion": f"{i}", "label": i % 3 > 0} for i in range(13)]
    pairs = [{"prompt": f"{i}", "chosen": f"yes {i}", "rejected": "no"} for i in range(13)]
    for name, rows in {"answers": answers, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def ragged(name: str, folder: Path) -> tuple[str, ...]:
    file = "pairs.jsonl" if name == "reward" else "answers.jsonl"
    return (*RAGGED[name], f"data.source={folder / file}")


def work(folder: Path) -> None:
    for name, settings in SAME_BITS.items():
        run(name, folder / name, *settings)
    for name in RAGGED:
        run(name, folder / f"{name} ragged", *ragged(name, folder))


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    write_rows(folder)
    on_ranks(2, work, folder)
    return folder


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in metrics(folder)]


@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one(on_two, tmp_path, name):
    run(name, tmp_path / "one", *SAME_BITS[name])
    assert digests(on_two / name / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
    for row, expected in zip(numbers(on_two / name), numbers(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6), row["step"]


@pytest.mark.parametrize("name", RAGGED)
def test_what_does_not_go_round_is_as_on_one(on_two, tmp_path, name):
    run(name, tmp_path / "one", *ragged(name, on_two))
    ours, theirs = numbers(tmp_path / "one"), numbers(on_two / f"{name} ragged")
    assert len({row["tokens"] for row in ours if "tokens" in row}) > 1
    for row, expected in zip(theirs, ours, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6), row["step"]
