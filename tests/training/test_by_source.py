"""Words and curves of single sources, and the loss that a run watches."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lean_ft.system.units import number
from lean_ft.training.by_source import in_brackets, title_of, undrawn, values_of, watched_loss
from lean_ft.training.curves import drawing_of, read_curves
from lean_ft.training.evaluations import describe_evaluation
from lean_ft.training.length import Length
from tests.recipes.cases import SETTINGS
from tests.recipes.conftest import config_of
from tests.training.test_curves import write_run

MANY: dict[str, float | None] = {f"s{i}": float(i) for i in range(40)}
HELD_OUT = "data.validation_source=[tiny/validation.jsonl,{path: tiny/train.jsonl, name: maths}]"
WATCHED = (HELD_OUT, "eval_every=1", "stop_after_evals=2", "watched_source=maths")


def config(recipe: str, *settings: str) -> Any:
    return config_of(recipe, *SETTINGS[recipe], *settings)


def test_a_number_is_followed_by_those_of_few_sources_or_of_the_ends() -> None:
    assert in_brackets({}, number) == ""
    assert in_brackets({"b": 2.0, "a": 1.0, "c": None}, number) == " (b 2, a 1, c not finite)"
    assert in_brackets(MANY, number) == " (highest of 40: s39 39, s38 38, s37 37, s36 36; lowest: s1 1, s0 0)"
    assert in_brackets(MANY, number, "s7").startswith(" (s7 7; highest of 40: s39 39, ")
    assert in_brackets(MANY | {"s3": None}, number).startswith(" (highest of 40: s3 not finite, s39 39")


def test_an_evaluation_shows_the_loss_and_the_right_pairs_of_each_source() -> None:
    row = {"eval_loss": 0.5, "eval_loss/a": 0.4, "eval_loss/b": None, "non_finite": {"eval_loss/b": "nan"}}
    assert values_of(row, "eval_loss") == {"a": 0.4, "b": None}
    row |= {"eval_rewards/accuracies": 0.75, "eval_rewards/accuracies/a": 1.0}
    words = "held-out loss 0.5 (a 0.4, b not finite), 75.0% of pairs right (a 100.0%)"
    assert describe_evaluation(config("dpo"), row) == words
    found = {"eval_loss": 1, "eval_recall@1": 0.5, "eval_recall@1/a": 0.25}
    assert "50.0% of queries find their passage first (a 25.0%)" in describe_evaluation(config("embed"), found)
    sampled = {"eval_loss": None, "eval_completion_length": 3.0, "eval_reward": 0.5, "eval_reward/a": 0.1}
    assert describe_evaluation(config("grpo"), sampled) == "held-out reward 0.5 (a 0.1), completion length 3"


def test_the_watched_source_decides_when_a_run_stops() -> None:
    cfg = config("finetune", *WATCHED)
    length = Length(cfg, 10)
    for step, loss in enumerate((2.0, 3.0, 2.5), start=1):  # the loss of all rows falls
        length.eval_losses[step] = watched_loss(cfg, {"eval_loss": 1.0 / step, "eval_loss/maths": loss})
    assert length.stops_early
    assert "the held-out loss of maths has not been below 2 since step 1" in length.ending(3)
    assert watched_loss(config("finetune"), {"eval_loss": 1.5, "eval_loss/maths": 2.0}) == 1.5
    assert watched_loss(cfg, {"eval_loss": None}) is None
    with pytest.raises(ValueError, match="the evaluation of this recipe has no loss of each source"):
        watched_loss(cfg, {"eval_loss": 1.5})  # of an older copy of a recipe


@pytest.mark.parametrize("num_sources", [2, 40])
def test_curves_and_tables_show_single_sources(tmp_path: Path, num_sources: int) -> None:
    run = write_run(tmp_path / "run", 3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    for step in (1, 2):
        of_sources = {f"eval_loss/s{i:02}": i + 1 / step for i in range(num_sources)}
        lines.append({"step": step, "epoch": 1.0, "eval_loss": 2.0 + step, **of_sources})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (curves,) = read_curves([run])
    drawn = drawing_of([curves])
    titles = [panel.title for panel in drawn.panels if panel.title.startswith("held-out loss: ")]
    first = max(0, num_sources - 6)
    assert titles == [f"held-out loss: s{i:02}" for i in range(first, num_sources)]
    more = "held-out loss: 34 more sources, with lower values, are in metrics.jsonl"
    assert (more in drawn.lines) == (num_sources == 40)
    assert curves.results()["eval_loss_by_source"] == {f"s{i:02}": i + 0.5 for i in range(num_sources)}
    shown = curves.results_as_text()["held-out by source"]
    assert shown.startswith("s00 0.5, s01 1.5" if num_sources == 2 else "highest of 40: s39 39.5")


def test_other_metrics_with_a_slash_are_no_sources() -> None:
    names = {"eval_loss", "eval_rewards/accuracies", "rewards/accuracies", "eval_loss/a", "extra/loss"}
    assert [title_of(name, names) for name in ("eval_rewards/accuracies", "eval_loss/a")] == [
        "held-out rewards/accuracies",
        "held-out loss: a",
    ]
    assert undrawn(names, [dict.fromkeys(names, 1.0)]) == {}


def test_the_watched_source_has_a_held_out_row() -> None:
    from lean_ft.data.batches import EvalBatches
    from lean_ft.training.by_source import check_is_held_out

    held_out = EvalBatches.__new__(EvalBatches)
    column = SimpleNamespace(num_rows=lambda columns, sides: {"validation": 3, "maths": 0})
    held_out.layout = SimpleNamespace(columns=SimpleNamespace(sources=column), arrangement=SimpleNamespace(sides=1))  # pyright: ignore
    check_is_held_out(config("finetune"), held_out)
    with pytest.raises(ValueError, match="watched_source=maths: none of its rows is held out"):
        check_is_held_out(config("finetune", *WATCHED), held_out)
