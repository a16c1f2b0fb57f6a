"""The log lines at a run's start and end."""

from pathlib import Path

import pytest

from lean_ft.settings.text import load_config, preset_recipe
from lean_ft.system.catalog import presets
from lean_ft.training.summary import note_of_rate
from tests.recipes.cases import SETTINGS, SIZES
from tests.recipes.conftest import run_recipe
from tests.settings.cases import load_recipe


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "settings", "size"), SIZES, ids=str)
def test_the_size_of_a_step_has_the_unit_of_batch_size(name, settings, size, tmp_path: Path, capsys) -> None:
    run_recipe(name, tmp_path / "run", *SETTINGS[name], *settings, "max_steps=1")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    assert line.endswith(f" per epoch; {size}")


@pytest.mark.parametrize(
    ("settings", "num_parameters", "is_far"),
    [
        ("lora={} optimizer.lr=2", 1e6, True),
        ("lora={} optimizer.lr=2", 8e9, True),
        ("lora={} optimizer.lr=0.02", 8e9, True),
        ("lora={} optimizer.lr=2e-6", 8e9, True),
        ("optimizer.lr=2e-7", 1e6, True),
        ("lora={}", 1e6, False),
        ("lora={} optimizer.lr=1e-3", 8e9, False),
        ("lora={} optimizer.lr=0", 8e9, False),
        ("optimizer.lr=0.1 optimizer.name=sgd", 8e9, False),
    ],
)
def test_a_rate_far_from_the_usual_one_is_a_note(settings, num_parameters, is_far) -> None:
    given = ["model.path=tiny", "data.source=rows.jsonl", *settings.split()]
    note = note_of_rate(load_config(load_recipe("finetune").Config, None, given), int(num_parameters))
    assert bool(note) is is_far
    if is_far:
        assert "finetune takes " in note and "optimizer.lr=" in note


def test_the_presets_have_usual_rates() -> None:
    for name, preset in presets().items():
        config = load_config(load_recipe(preset_recipe(preset) or "finetune").Config, preset, [])
        small = 885_888 if name.startswith("tiny") else 10**9
        assert note_of_rate(config, small) == "", name
