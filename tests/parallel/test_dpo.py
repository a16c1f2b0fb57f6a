"""Learning from pairs on two ranks is that on one: the same numbers, files and cached reference, whatever the reference."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_ft.hub.paths import resolve_data_path
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from tests.parallel.processes import on_ranks
from tests.training.toy_runs import TIMES, digests, metrics

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
HELD_OUT = ("data.validation_fraction=0.1", "eval_every=2")
# With two micro-batches a step, each of two ranks has one, and their sum has the same bits in either order.
SAME_BITS = {
    "cached": (*HELD_OUT, "loss.sft_weight=0.5"),
    "second model": ("reference.kind=model", "data.packing=bfd", "optimizer.in_backward=true"),
    "adapter off": ("reference.kind=adapter_off", "lora.rank=4", "memory.activation_checkpointing=full"),
    "4 bits": ("reference.kind=nf4", "model.dtype=bfloat16", "optimizer.name=adamw_8bit", "loss.wpo=true"),
}
# Of 32 pairs there are 8 batches: three a step are more than go round, and the third step has two.
CLOSE = (
    "gradient_accumulation_steps=3",
    "max_steps=4",
    "epochs=2",
    "optimizer.name=sgd",
    "data.validation_fraction=0.2",
)


def run(folder: Path, *settings: str) -> None:
    recipe = load_recipe(find_recipe("full_dpo_distributed"))
    given = [*SETTINGS, f"data.cache_dir={folder.with_suffix('.cache')}", f"output_dir={folder}", *settings]
    recipe.main(load_config(recipe.Config, None, given))


def few_pairs(folder: Path) -> str:
    rows = resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines()
    (folder / "few.jsonl").write_text("\n".join(rows[:40]))
    return f"data.source={folder / 'few.jsonl'}"


def work(folder: Path) -> None:
    for name, settings in SAME_BITS.items():
        run(folder / name, *settings)
    run(folder / "close", *CLOSE, f"data.source={folder / 'few.jsonl'}")


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    few_pairs(folder)
    on_ranks(2, work, folder, timeout=600)
    return folder


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in metrics(folder)]


def references(folder: Path) -> dict[str, bytes]:
    caches = folder.with_suffix(".cache").glob("reference-*")
    return {path.name: (path / "values").read_bytes() for path in caches}


@pytest.mark.long
@pytest.mark.parametrize("name", SAME_BITS)
def test_two_ranks_write_the_files_of_one(on_two, tmp_path, name):
    run(tmp_path / "one", *SAME_BITS[name])
    assert digests(on_two / name / "step_00000003") == digests(tmp_path / "one" / "step_00000003")
    ours, theirs = numbers(tmp_path / "one"), numbers(on_two / name)
    assert [row.keys() for row in theirs] == [row.keys() for row in ours]
    for row, expected in zip(theirs, ours, strict=True):
        assert row == pytest.approx(expected, rel=1e-6), row["step"]
    assert ours[0]["rewards/margins"] == theirs[0]["rewards/margins"] or name == "4 bits"
    assert references(on_two / name) == references(tmp_path / "one")
    assert len(references(on_two / name)) == (name == "cached")


@pytest.mark.long
def test_what_does_not_go_round_is_as_on_one(on_two, tmp_path):
    run(tmp_path / "one", *CLOSE, few_pairs(tmp_path))
    ours, theirs = numbers(tmp_path / "one"), numbers(on_two / "close")
    assert len({row["tokens"] for row in ours if "tokens" in row}) > 1
    assert ours[0]["rewards/margins"] == theirs[0]["rewards/margins"] == 0
    for row, expected in zip(theirs, ours, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-7), row["step"]
    assert "eval_rewards/accuracies" in ours[-1]


@pytest.mark.long
def test_it_goes_on_with_the_others_cache(on_two, tmp_path, capsys):
    """A cache that two ranks filled is found by one: its key does not depend on how the model was cut."""
    shared = f"data.cache_dir={(on_two / 'cached').with_suffix('.cache')}"
    run(tmp_path / "one", *SAME_BITS["cached"], shared)
    assert "log-probabilities of 0 pairs computed" in capsys.readouterr().out
    assert json.loads((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()[0])["rewards/margins"] == 0
