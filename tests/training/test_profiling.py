"""Profiles of a run; profiling does not change the results."""

import gzip
import json
import re
from pathlib import Path

import pytest

from lean_ft.cli.run import run_recipe
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe

SETTINGS = ["model.path=tiny", "model.dtype=float32", "data.source=tiny/validation.jsonl", "batch_size=1", "device=cpu"]
SETTINGS += ["max_steps=4", "schedule.name=constant", "data.packing=bfd", "data.max_length=64", "plan=false"]


def run(folder: Path, *settings: str) -> Path:
    recipe = load_recipe(find_recipe("full_finetune_single_device"))
    run_recipe(recipe, load_config(recipe.Config, None, [*SETTINGS, *settings, f"output_dir={folder}"]))
    return folder


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("run") / "on", "profile=true", "profile_steps=[1,1,2]")


@pytest.mark.long
def test_operations_are_those_of_the_profiled_steps(profiled: Path) -> None:
    """Each of 4 layers has 7 projections and the model an output layer, with one product in forward and two in
    backward."""
    table = (profiled / "profile" / "operations.txt").read_text()
    calls = re.search(r" aten::mm .* (\d+)  *$", table, re.MULTILINE)
    assert calls is not None and int(calls[1]) >= 2 * 3 * 4 * 7


@pytest.mark.long
def test_the_trace_has_the_steps_that_were_watched(profiled: Path) -> None:
    with gzip.open(profiled / "profile" / "trace.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sorted({name for name in names if name.startswith("ProfilerStep")}) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert names.count("module: model.layers.3.mlp") == 2
    assert "[memory]" in names


@pytest.mark.long
def test_a_profiled_run_is_the_same_bits(profiled: Path, tmp_path: Path) -> None:
    plain = run(tmp_path / "off")
    assert not (plain / "profile").exists()
    weights = [next(folder.glob("step_*4")) / "model.safetensors" for folder in (profiled, plain)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.long
def test_a_run_that_ends_before_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path, "profile=true", "profile_steps=[1,1,2]", "max_steps=null", "epochs=0.02")
    assert "profile     not written: it needs 4 steps (profile_steps)" in capsys.readouterr().out
    assert not any((folder / "profile").iterdir())
