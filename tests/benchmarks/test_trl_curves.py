"""The comparison with TRL runs both sides and distinguishes differences from rounding."""

import json

import pytest
import torch
import trl_curves
import typer
from measure import overrides
from trl_curves import COMMON, OBJECTIVES, apart, beyond, main, table_cells, weights_apart

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes

ROW = {"label": "a", "loss_apart": 2e-5, "loss_apart_of_trl": 3e-6, "weights_apart": 0.1, "weights_apart_of_trl": 0.2}


def test_distances_are_shares_of_the_loss_and_of_the_way() -> None:
    assert apart([1.0, 2.5], [1.0, 3.0]) == [0.0, 0.25]
    start, one, other = ({"w": torch.tensor([value, 0.0])} for value in (0.0, 3.0, 4.0))
    assert weights_apart(one, other, start) == 0.25


def test_what_rounding_explains_is_within_ten_times_trls_own_distance() -> None:
    assert not beyond(ROW)
    assert beyond({**ROW, "loss_apart": 4e-5})
    assert not beyond({**ROW, "loss_apart": 9e-6, "loss_apart_of_trl": 0.0})
    cells = table_cells({"rows": [{**ROW, "losses": {"TRL": [3.0] * 10 + [1.0] * 10}}]})
    assert cells == [["a", "3.000 to 1.000", "2.0e-05", "3.0e-06", "1.0e-01", "2.0e-01"]]


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
