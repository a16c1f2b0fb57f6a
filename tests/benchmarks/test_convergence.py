"""Differences are relative to float32, and rows beyond their limit are found."""

import pytest
import typer
from convergence import BASE, ROWS, TASKS, beyond, draw_chart, main, state_told, table_cells, write_small_model
from measure import overrides

from lean_ft.models import load_model
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes
from lean_ft.tokenizers import load_tokenizer

REFERENCE = {"name": "float32", "label": "a", "status": "ok", "bound": 0.0, "state": "1 KiB", "losses": [4.0, 2.0]}
REFERENCE |= {"last_loss": 2.0, "eval_loss": 1.0}
RESULT = {
    "hardware": {"device": "cpu", "cpu": "Some CPU", "cores": 4},
    "rows": [
        REFERENCE,
        {**REFERENCE, "name": "b", "label": "b", "bound": 0.05, "last_loss": 2.05, "eval_loss": 1.1},
        {"name": "c", "label": "c", "status": "timed out", "reason": "slow", "bound": 0.1},
    ],
}


def test_differences_are_from_float32_and_a_missing_number_keeps_its_row() -> None:
    assert table_cells(RESULT) == [
        ["a", "1 KiB", "2.0000", "-", "1.0000", "-", "-"],
        ["b", "1 KiB", "2.0500", "+2.5%", "1.1000", "+10.0%", "+5%"],
        ["c", "timed out", "-", "-", "-", "-", "-"],
    ]


def test_either_loss_may_be_beyond_the_bound() -> None:
    row = RESULT["rows"][1]
    assert beyond(row, REFERENCE)
    assert not beyond({**row, "eval_loss": 1.04}, REFERENCE)
    assert not beyond({**row, "bound": None}, REFERENCE)


def test_the_state_is_read_from_the_runs_own_line() -> None:
    assert state_told("model  x\noptimizer   adamw, lr 0.001, state 3.4 MiB, stepping in backward\n") == "3.4 MiB"


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_row_is_settings_of_the_recipe(tmp_path, task) -> None:
    config = load_recipe(recipes()["full_finetune_single_device"]).Config
    own = {"model.path": "x", "data.source": "x", "output_dir": tmp_path, **BASE, **task.settings}
    for row in ROWS:
        load_config(config, None, overrides({**own, **row.settings}))


def test_the_small_model_has_weights_of_its_own(tmp_path) -> None:
    folder = write_small_model(tmp_path / "model")
    model = load_model(folder, random_init=True)
    assert (model.config.num_layers, model.config.hidden_size) == (4, 256)
    assert load_tokenizer(folder).vocab_size <= model.config.vocab_size
    with pytest.raises(ValueError, match="safetensors"):
        load_model(folder)


def test_without_the_reference_nothing_is_compared() -> None:
    with pytest.raises(typer.BadParameter, match="float32"):
        main(only="muon", device="cpu")


def test_the_chart_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert draw_chart(RESULT, tmp_path / "chart.png").stat().st_size > 1000
