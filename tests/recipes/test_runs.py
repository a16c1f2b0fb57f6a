"""What holds of short runs of every training recipe; tests/recipes/cases.py has the runs.

A resumed run equals the uninterrupted run bitwise; settings of memory, layout, micro-batches and precision change no
number; margins start at exactly 0."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.cases import BFLOAT16, CACHED, REPEATED, RUNS, SETTINGS, Equal, Run
from tests.recipes.conftest import first_rows, run_of, run_recipe
from tests.training.toy_runs import TIMES, digests, metrics

RunOnce = Callable[[str, Run], Path]


def params(rows: Iterable[tuple[Any, ...]], *default: str) -> list[Any]:
    """Cases of a table. The first of each recipe in `default` is default, and the others are long."""
    left, found = set(default), []
    for recipe, run, *more in rows:
        marks = [] if recipe in left else [pytest.mark.long]
        left.discard(recipe)
        changed = [" ".join(one.settings) if isinstance(one, Equal) else str(one) for one in more]
        found.append(pytest.param(recipe, run, *more, marks=marks, id=" ".join([recipe, *run.settings, "|", *changed])))
    return found


STOPPED = ((recipe, run, stop) for recipe, runs in RUNS.items() for run in runs for stop in run.stops)
CHANGED = ((recipe, run, equal) for recipe, runs in RUNS.items() for run in runs for equal in run.equals)
BEGINNINGS = ((recipe, run) for recipe, runs in RUNS.items() for run in runs if run.first_loss is not None)


@pytest.mark.parametrize(("recipe", "run", "stop"), params(STOPPED, "finetune", "dpo", "grpo"))
def test_a_resumed_run_equals_the_uninterrupted_run(run_once: RunOnce, recipe: str, run: Run, stop: int) -> None:
    whole = run_once(recipe, run)
    parts = whole.with_name(f"stopped{stop}")
    cache = (f"data.cache_dir={parts}_cache",) if recipe == "dpo" else ()
    run_of(recipe, (*run.settings, *cache, f"max_steps={stop}"), parts)
    for values in Path(f"{parts}_cache").glob("reference-*/values"):  # a lost cache is computed again
        values.write_bytes(b"\xff" * len(values.read_bytes()))
    run_of(recipe, (*run.settings, *cache), parts)
    assert metrics(parts, timed=False) == metrics(whole, timed=False)
    last = max(path.name for path in whole.glob("step_*"))
    assert digests(parts / last) == digests(whole / last)
    ours, theirs = ([file.read_text() for file in folder.glob("samples.jsonl")] for folder in (parts, whole))
    assert ours == theirs


@pytest.mark.parametrize(("recipe", "run", "equal"), params(CHANGED, "full_finetune_single_device", "grpo"))
def test_settings_change_no_number(run_once: RunOnce, recipe: str, run: Run, equal: Equal) -> None:
    whole = run_once(recipe, run)
    other = run_of(recipe, (*run.settings, *equal.settings), whole.with_name(" ".join(equal.settings)))
    lines, expected = metrics(other), metrics(whole)
    least = 1e-5 if recipe in ("grpo", "ppo") else 1e-6  # their losses are near 0
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in equal.names or theirs.keys() - TIMES - {"tokens"}:
            bound = max(equal.rel, 1e-3) if name == "grad_norm" else equal.rel
            assert ours[name] == pytest.approx(theirs[name], rel=bound, abs=least), name
    tokens, repeated = (sum(line.get("tokens", 0) for line in run) for run in (expected, lines))
    assert equal.settings != REPEATED or tokens < 0.85 * repeated


@pytest.mark.parametrize(("recipe", "run"), params(BEGINNINGS, "dpo"))
def test_margins_start_at_exactly_0(run_once: RunOnce, recipe: str, run: Run) -> None:
    first, *_, last = [line for line in metrics(run_once(recipe, run)) if "loss" in line]
    assert first["rewards/margins"] == 0
    assert first["loss"] == pytest.approx(run.first_loss, rel=1e-6)
    if recipe in ("dpo", "kto"):
        assert first["rewards/chosen"] == first["rewards/rejected"] == first.get("baseline", 0) == 0
        assert first["rewards/accuracies"] == 0.5
        assert last["rewards/chosen"] != 0


@pytest.mark.long
@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize(("recipe", "rows", "held_out"), [("dpo", 12, 0.5), ("kto", 9, 0.4)])
def test_each_completion_has_its_own_reference(tmp_path: Path, recipe: str, rows: int, held_out: float, packing: str):
    """With lr=0 all margins stay 0, also in the second epoch's batches and the held-out set."""
    few = (first_rows("tiny/pairs_validation.jsonl", rows, tmp_path), f"data.validation_fraction={held_out}")
    size = "batch_size=1" if packing == "bfd" and recipe == "kto" else "batch_size=4"
    given = (*few, f"data.packing={packing}", size, "epochs=2", "max_steps=8", "optimizer.lr=0", *CACHED)
    *lines, evaluation = run_recipe(recipe, tmp_path / "run", *SETTINGS[recipe], *given)
    assert lines[-1]["epoch"] > 1
    for line in [*lines, {name.removeprefix("eval_"): value for name, value in evaluation.items()}]:
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "baseline"):
            assert line.get(name, 0) == pytest.approx(0, abs=1e-5)


COMPUTED = {  # settings of runs in this order, and the number of pairs or completions that each computes
    "kto": {
        (): 8,  # a step of 4 completions, and as many mismatched
        ("seed=0",): 0,
        ("seed=1",): 8,  # other mismatched pairs
        (BFLOAT16,): 8,
    },
    "dpo": {
        (): 4,  # a step of 4 pairs: only those that the run uses
        ("seed=0",): 0,
        ("loss.name=ipo", "batch_size=2"): 0,  # the loss is not part of the key
        ("loss.ld_alpha=0.5",): 4,
        ("data.max_prompt_length=6",): 4,
        (BFLOAT16,): 4,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", COMPUTED)
def test_a_reference_cache_is_reused_only_where_it_fits(recipe: str, tmp_path: Path, capsys) -> None:
    for i, (settings, expected) in enumerate(COMPUTED[recipe].items()):
        run_of(recipe, (*CACHED, "data.cache_dir=TMP/cache", "max_steps=1", *settings), tmp_path / f"run{i}")
        said = capsys.readouterr().out.partition("log-probabilities of ")[2]
        assert int(said.split()[0].replace(",", "")) == expected, settings
