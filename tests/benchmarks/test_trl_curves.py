"""Settings are those of the recipes, and three steps of each objective equal TRL's."""

import json

import pytest
import trl_curves
import typer
from measure import overrides
from trl_curves import COMMON, OBJECTIVES, main

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
def test_settings_are_those_of_the_recipe(tmp_path, objective) -> None:
    config = load_recipe(recipes()[objective.recipe]).Config
    given = {"model.path": "x", "data.source": "x", "output_dir": tmp_path, **COMMON, **objective.settings}
    given |= {"rewards": "[length]"} if objective.recipe == "grpo" else {}
    load_config(config, None, overrides(given))


@pytest.mark.long
def test_three_steps_of_each_objective_are_trls(tmp_path, monkeypatch) -> None:
    """On the embedded model. A setting on one side alone is found."""
    pytest.importorskip("trl")
    rows = [{"question": f"{i} and {i + 1}?", "answer": f"It is {2 * i + 1}."} for i in range(40)]
    pairs = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "No."} for row in rows]
    for name, lines in (("train", rows), ("preferences", pairs)):
        (tmp_path / f"gsm8k_{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def exit_code(only: str) -> int:
        with pytest.raises(typer.Exit) as ended:
            main(trl_curves.EMBEDDED_MODEL, tmp_path, 3, only, tmp_path / "results", tmp_path / "chart.png")
        return ended.value.exit_code

    assert exit_code("") == 0
    [result] = (tmp_path / "results").glob("*.json")
    assert [row["name"] for row in json.loads(result.read_text())["rows"]] == list(OBJECTIVES)
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    changed = OBJECTIVES["sft"]._replace(settings={**OBJECTIVES["sft"].settings, "data.train_on": "all"})
    monkeypatch.setitem(OBJECTIVES, "sft", changed)
    assert exit_code("sft") == 1
