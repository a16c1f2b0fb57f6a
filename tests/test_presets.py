"""Presets of published models are short, name only settings that differ from the defaults, and have true comments.

The sizes in a preset's comment are computed here from the model's shape. The memory of presets for fine-tuning is a
result of `benchmarks/pretended_ladder.py`: the bytes that PyTorch's allocator reserves on a simulated GPU of the named
size. That of the other objectives is the planner's, from the gate (tests/assets/gate/plans.json).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import num_parameters, write_model_folder
from lean_ft.hub import download as hub
from lean_ft.hub.paths import planned_model_path
from lean_ft.plan.devices import find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config, preset_recipe, preset_values
from lean_ft.system import catalog
from tests import gate
from tests.settings.cases import load_recipe, settings_of

GIB = 2**30
SPARE_BYTES = 0.75 * GIB  # of the GPU memory, for the driver's context and other programs
_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
ROWS = {
    row["label"]: row for row in json.loads(next(_RESULTS.glob("pretended_ladder_presets_*.json")).read_text())["rows"]
}


PRESETS = {name: file for name, file in catalog.presets().items() if not name.startswith("tiny/")}
PLANNED = {  # by the last part of a preset's name: what the preset does
    "dpo": "DPO with {adapter}",
    "kto": "KTO with {adapter}",
    "grpo": "GRPO with {adapter} on math answers",
    "tools": "GRPO with {adapter} and a tool",
    "ppo": "PPO with {adapter} on math answers",
    "online_dpo": "online DPO with {adapter} on math answers",
    "reward": "a reward model with {adapter}",
    "classify": "classification with {adapter}",
    "embed": "embeddings with {adapter}",
    "rerank": "a reranker with {adapter}",
    "distill": "{adapter}, distilled from {teacher} in 4 bits",
}
TRAINING = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA", "images": "{adapter} with images"} | PLANNED


def kind_of(name: str) -> str:
    return name.partition("/")[2]


def comment(name: str) -> str:
    """The expected comment of a preset, behind the model's name."""
    values, shape = preset_values(PRESETS[name]), name.partition("/")[0]
    count = num_parameters(shape, images=kind_of(name) == "images")
    size = f"{count / 1e9:.2f} B parameters, {2 * count / 1e9:.1f} GB of weights"
    adapter = "QLoRA" if values.get("lora.quantize") == "nf4" else "LoRA" if "lora" in values else "all parameters"
    teacher = values.get("distill.teacher", "").rpartition("/")[2].replace("-", " ")
    if kind_of(name) in PLANNED:
        gb = round(gate.card_of(PRESETS[name]).memory_bytes / GIB / 0.98)
        reserved, source = gate.read("plans")[name]["reserved"], "as the planner predicts it"
    else:
        gb, reserved = ROWS[name]["card_gb"], ROWS[name]["reserved_bytes"]
        source = "reserved by PyTorch's allocator on a simulated GPU"
    training = TRAINING[kind_of(name)].format(adapter=adapter, teacher=teacher)
    return f", {training}: {size}.\n# Trains on a GPU with {gb} GB: {reserved / GIB:.1f} GiB at the peak, {source}.\n"


def recipe_name(preset: str) -> str:
    name = preset_recipe(catalog.find_preset(preset))
    assert name is not None
    return name


@pytest.mark.first(5)
@pytest.mark.parametrize("name", PRESETS)
def test_the_comment_is_what_the_shape_and_the_allocator_give(name):
    file = catalog.find_preset(name)
    values = preset_values(file)
    assert comment(name) in file.read_text(), "a planned peak comes from scripts/write_gate.py"
    if kind_of(name) in PLANNED:
        reserved, memory_bytes = gate.read("plans")[name]["reserved"], gate.card_of(file).memory_bytes
    else:
        row = ROWS[name]
        reserved, memory_bytes = row["reserved_bytes"], row["memory_bytes"]
        # The measured settings are the preset's current settings, except for the model and the data.
        measured = {name: value for name, value in row["values"].items() if name != "output_dir"}
        assert measured == values, "run benchmarks/pretended_ladder.py --tables presets --again"
    assert reserved + SPARE_BYTES <= memory_bytes, "too little GPU memory is left"
    assert hub.parse_name(values["model.path"]) is not None
    assert "output_dir" not in values  # so that a second run gets a new name


@pytest.mark.long
def test_an_adapters_peak_is_the_planners(tmp_path):
    """For one Llama; docs/memory.md compares all presets."""
    name = "llama3_1_8b/qlora"
    recipe = load_recipe(recipe_name(name))
    folder = write_model_folder("llama3_1_8b", tmp_path / "model")
    cfg = load_config(recipe.Config, catalog.find_preset(name), [f"model.path={folder}", f"output_dir={tmp_path}/run"])
    card = replace(find_device("RTX 4090"), memory_bytes=ROWS[name]["memory_bytes"])
    assert rehearse(recipe, cfg, card).reserved_bytes == pytest.approx(ROWS[name]["reserved_bytes"], rel=0.02)


@pytest.mark.first(20)
@pytest.mark.parametrize("name", [*PRESETS, "tiny/full", "tiny/lora"])
def test_a_preset_states_nothing_that_goes_without_saying(name):
    recipe, file = recipe_name(name), catalog.find_preset(name)
    cfg = load_config(load_recipe(recipe).Config, file).model_dump(mode="json")
    defaults = settings_of(recipe)
    for key in preset_values(file):
        if key not in defaults:  # a group without settings, which turns the group on, or with a list for one of them
            assert preset_values(file)[key] == "{}" or preset_values(file)[key].startswith("[")
            continue
        if defaults[key].required:
            continue
        value: Any = cfg
        for part in key.split("."):
            value = value[part]
        assert value != defaults[key].default, key
    text = file.read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 20


def test_each_objective_has_presets_of_two_sizes_that_shrink_in_no_plan():
    kinds = [kind_of(name) for name in PRESETS]
    assert {kind: kinds.count(kind) for kind in PLANNED} == dict.fromkeys(PLANNED, 2)
    assert kinds.count("images") >= 2
    recipes = list(map(recipe_name, PRESETS))
    assert not [name for name in catalog.presets() if recipes.count(recipe_name(name)) < 2]  # also tiny's
    assert not [name for name in PRESETS if kind_of(name) in PLANNED and gate.shorter(name)]


@pytest.mark.first
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_validates_without_a_network(name, hub_server):
    from typer.testing import CliRunner

    from lean_ft.cli.main import app

    answer = CliRunner().invoke(app, ["validate", recipe_name(name), "--config", name])
    assert answer.exit_code == 0, answer.output
    assert "# ok" in answer.output
    assert hub_server.requests == []


@pytest.mark.first(3)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_planned_from_the_config_json_next_to_it_until_the_model_is_here(
    name, hub_server, monkeypatch, tmp_path
):
    file = catalog.find_preset(name)
    path = preset_values(file)["model.path"]
    assert planned_model_path(path) == file.parent
    assert hub_server.requests == []
    monkeypatch.setattr(hub, "find_cached", lambda name, weights: tmp_path)
    monkeypatch.setattr(hub, "model_folder", lambda name, weights: tmp_path)
    assert planned_model_path(path) == tmp_path


@pytest.mark.long
def test_a_plan_needs_no_network(hub_server):
    from typer.testing import CliRunner

    from lean_ft.cli.main import app

    command = ["plan", "--config", "smollm2_135m/full", "device=cpu", "compile=false", "data.max_length=128"]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    assert "134,515,008 parameters" in answer.output
    assert hub_server.requests == []
