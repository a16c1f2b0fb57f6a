"""The held-out loss of each source equals that of a run which holds out this source alone, in every recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.processes import on_ranks
from tests.recipes.cases import SETTINGS
from tests.recipes.conftest import first_rows, run_recipe
from tests.training.toy_runs import TIMES, digests

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

CASES = {
    "finetune": ("tiny/validation.jsonl", ("data.packing=bfd",)),
    "dpo": ("tiny/pairs_validation.jsonl", ()),
    "kto": ("tiny/pairs_validation.jsonl", ("loss.name=apo_zero_unpaired",)),  # no baseline of a batch
    "reward": ("tiny/pairs_validation.jsonl", ("data.packing=padding_free",)),
    "classify": ("tiny/topics_validation.jsonl", ()),
    "classify tokens": ("tiny/names_validation.jsonl", ("data.labels_per=token", "data.source=tiny/names_train.jsonl")),
    "rerank": ("tiny/notes_validation.jsonl", ()),
    "embed": ("tiny/notes_validation.jsonl", ()),
    "distill": ("tiny/validation.jsonl", ("distill.teacher=tiny", "model.random_init=true")),
}
PARTS = {"first": 12, "second": 8}  # rows; batches have 4, so that those of a source are its own


def written(folder: Path, source: str) -> dict[str, str]:
    """Write the two parts of a file, and return entries of `data.validation_source`."""
    whole = Path(first_rows(source, sum(PARTS.values()), folder).partition("=")[2])
    lines, entries = whole.read_text().splitlines(), dict[str, str]()
    for name, number in PARTS.items():
        (folder / f"{name}_rows.jsonl").write_text("\n".join(lines[:number]))
        entries[name], lines = f"{{path: {folder / name}_rows.jsonl, name: {name}}}", lines[number:]
    return entries


def evaluated(folder: Path, case: str, held_out: str, *settings: str) -> list[dict[str, Any]]:
    recipe = case.split()[0]
    given = (*SETTINGS[recipe], *CASES[case][1], "max_steps=2", "batch_size=4", "eval_every=1", *settings)
    return run_recipe(recipe, folder, *given, f"data.validation_source={held_out}")


def without_sources(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name.rpartition("/")[2] not in PARTS}


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.mark.first(1)
@pytest.mark.parametrize("case", CASES)
def test_a_source_has_the_loss_of_its_rows_alone(tmp_path: Path, case: str) -> None:
    entries = written(tmp_path, CASES[case][0])
    both = evaluated(tmp_path / "both", case, f"[{', '.join(entries.values())}]")
    of_parts = {name: evaluated(tmp_path / name, case, f"[{entry}]")[-1] for name, entry in entries.items()}
    right = {"dpo": "eval_rewards/accuracies", "reward": "eval_rewards/accuracies", "kto": "eval_rewards/accuracies"}
    right |= {"classify": "eval_accuracy", "classify tokens": "eval_accuracy", "rerank": "eval_accuracy@1"}
    metrics = ["eval_loss", *([right[case]] if case in right else [])]
    for name, alone in of_parts.items():
        for metric in metrics:
            assert both[-1][f"{metric}/{name}"] == pytest.approx(alone[metric], rel=1e-5), (metric, name)
    # With one name for both, nothing is divided: all else has the same bits.
    one = evaluated(tmp_path / "one", case, f"[{', '.join(entries.values())}]".replace("second}", "first}"))
    assert without_times(one) == without_times([without_sources(line) for line in both])


def stopping(folder: Path, held_out: str, *settings: str) -> list[dict[str, Any]]:
    watched = ("eval_every=1", "stop_after_evals=2", "watched_source=second", "optimizer.lr=0.3", "save_every=1")
    given = (*SETTINGS["finetune"], *watched, "max_steps=6", "keep_last=1", "keep_best=1", "schedule.name=constant")
    return run_recipe("finetune", folder, *given, f"data.validation_source={held_out}", *settings)


@pytest.mark.long
def test_a_run_that_watches_a_source_resumes_bitwise(tmp_path: Path) -> None:
    held_out = f"[{', '.join(written(tmp_path, 'tiny/validation.jsonl').values())}]"
    whole = stopping(tmp_path / "whole", held_out)
    of_second = {line["step"]: line["eval_loss/second"] for line in whole if "eval_loss" in line}
    best = min(of_second, key=lambda step: of_second[step])
    last = max(of_second)
    assert last == min(6, best + 2)
    assert {path.name for path in (tmp_path / "whole").glob("step_*")} == {f"step_{n:08}" for n in (best, last)}
    stopping(tmp_path / "parts", held_out, "max_steps=2")
    parts = stopping(tmp_path / "parts", held_out)
    assert without_times(parts) == without_times(whole)
    checkpoint = f"step_{last:08}"
    assert digests(tmp_path / "parts" / checkpoint) == digests(tmp_path / "whole" / checkpoint)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("finetune", ()),
        ("finetune", ("parallel.vocabulary=cut",)),
        ("finetune", ("parallel.context=2",)),
        ("dpo", ("parallel.tensor=2",)),
        ("dpo", ()),
    ],
)
def test_two_processes_have_the_means_of_one(tmp_path: Path, case: str, settings: tuple[str, ...]) -> None:
    held_out = f"[{', '.join(written(tmp_path, CASES[case][0]).values())}]"
    given = ("gradient_accumulation_steps=2", "schedule.name=constant")
    alone = evaluated(tmp_path / "one", case, held_out, *given)
    on_ranks(2, evaluated, tmp_path / "two", case, held_out, *given, *settings)
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1].keys() == alone[-1].keys()
    of_sources = [name for name in alone[-1] if name.endswith(("/first", "/second"))]
    assert len(of_sources) in (2, 4)
    for name in of_sources:
        assert lines[-1][name] == pytest.approx(alone[-1][name], rel=1e-5)
