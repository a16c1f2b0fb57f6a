"""Presets of published models are short, name only settings that differ from the defaults, and have true comments.

The sizes in a preset's comment are computed here from the model's shape. Its memory is a result of
`benchmarks/pretended_ladder.py`: the bytes that PyTorch's allocator reserves on a pretended GPU of the named size.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import num_parameters, write_model_folder
from lean_ft.hub import download as hub
from lean_ft.plan.devices import find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import describe, load_config, preset_recipe, preset_values
from lean_ft.system import catalog

GIB = 2**30
SPARE_BYTES = 0.75 * GIB  # of the GPU memory, for the driver's context and other programs
_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
ROWS = {
    row["label"]: row for row in json.loads(next(_RESULTS.glob("pretended_ladder_presets_*.json")).read_text())["rows"]
}


# Name and repository of each published model. The shapes are in benchmarks/shapes.py.
MODELS = {
    "llama3_2_1b": ("Llama 3.2 1B Instruct (gated)", "meta-llama/Llama-3.2-1B-Instruct"),
    "llama3_2_3b": ("Llama 3.2 3B Instruct (gated)", "meta-llama/Llama-3.2-3B-Instruct"),
    "llama3_1_8b": ("Llama 3.1 8B Instruct (gated)", "meta-llama/Llama-3.1-8B-Instruct"),
    "qwen2_5_0_5b": ("Qwen2.5 0.5B Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2_5_1_5b": ("Qwen2.5 1.5B Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2_5_7b": ("Qwen2.5 7B Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    "qwen3_0_6b": ("Qwen3 0.6B", "Qwen/Qwen3-0.6B"),
    "qwen3_4b": ("Qwen3 4B", "Qwen/Qwen3-4B"),
    "qwen3_8b": ("Qwen3 8B", "Qwen/Qwen3-8B"),
    "qwen3_30b_a3b": ("Qwen3 30B-A3B Instruct", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    "qwen3_5_0_8b": ("Qwen3.5 0.8B (language model)", "Qwen/Qwen3.5-0.8B"),
    "qwen3_5_2b": ("Qwen3.5 2B (language model)", "Qwen/Qwen3.5-2B"),
    "qwen3_5_4b": ("Qwen3.5 4B (language model)", "Qwen/Qwen3.5-4B"),
    "qwen3_5_9b": ("Qwen3.5 9B (language model)", "Qwen/Qwen3.5-9B"),
    "gemma3_1b": ("Gemma 3 1B Instruct (gated)", "google/gemma-3-1b-it"),
    "gemma3_4b": ("Gemma 3 4B Instruct (gated) (language model)", "google/gemma-3-4b-it"),
    "gemma4_e2b": ("Gemma 4 E2B Instruct (language model)", "google/gemma-4-E2B-it"),
    "gemma4_e4b": ("Gemma 4 E4B Instruct (language model)", "google/gemma-4-E4B-it"),
    "gemma4_12b": ("Gemma 4 12B Instruct (language model)", "google/gemma-4-12B-it"),
    "gpt_oss_20b": ("gpt-oss 20B", "openai/gpt-oss-20b"),
    "ministral3_3b": ("Ministral 3 3B Instruct (language model)", "mistralai/Ministral-3-3B-Instruct-2512-BF16"),
    "ministral3_8b": ("Ministral 3 8B Instruct (language model)", "mistralai/Ministral-3-8B-Instruct-2512-BF16"),
    "mistral_7b": ("Mistral 7B Instruct v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    "phi4_14b": ("Phi-4 14B", "microsoft/phi-4"),
    "phi4_mini": ("Phi-4-mini Instruct", "microsoft/Phi-4-mini-instruct"),
    "smollm2_135m": ("SmolLM2 135M Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "smollm2_360m": ("SmolLM2 360M Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2_1_7b": ("SmolLM2 1.7B Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "smollm3_3b": ("SmolLM3 3B", "HuggingFaceTB/SmolLM3-3B"),
    "olmo2_1b": ("OLMo 2 1B Instruct", "allenai/OLMo-2-0425-1B-Instruct"),
    "olmo2_7b": ("OLMo 2 7B Instruct", "allenai/OLMo-2-1124-7B-Instruct"),
    "olmo3_7b": ("OLMo 3 7B Instruct", "allenai/Olmo-3-7B-Instruct"),
}


def comment(name: str) -> str:
    """The expected comment of a preset."""
    row, (shape, _, kind) = ROWS[name], name.partition("/")
    count = num_parameters(shape)
    size = f"{count / 1e9:.2f} B parameters, {2 * count / 1e9:.1f} GB of weights"
    training = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}[kind]
    return (
        f"# {MODELS[shape][0]}, {training}: {size}.\n"
        f"# Trains on a GPU with {row['card_gb']} GB: {row['reserved_bytes'] / GIB:.1f} GiB at the peak, reserved by PyTorch's "
        "allocator on a pretended GPU.\n"
    )


PRESETS = {name: file for name, file in catalog.presets().items() if not name.startswith("tiny/")}


def recipe_name(preset: str) -> str:
    name = preset_recipe(catalog.find_preset(preset))
    assert name is not None
    return name


def test_every_model_has_a_preset():
    assert {name.partition("/")[0] for name in PRESETS} == set(MODELS)


@pytest.mark.parametrize("name", PRESETS)
def test_the_comment_is_what_the_shape_and_the_allocator_give(name):
    file, row, (_, repo) = catalog.find_preset(name), ROWS[name], MODELS[name.partition("/")[0]]
    cfg = load_config(catalog.load_recipe(catalog.find_recipe(recipe_name(name))).Config, file)
    assert file.read_text().startswith(comment(name))
    assert row["reserved_bytes"] + SPARE_BYTES <= row["memory_bytes"], "too little GPU memory is left"
    # The measured settings are the preset's current settings, except for the model and the data.
    assert row["values"] == preset_values(file), "run benchmarks/pretended_ladder.py --tables presets --again"
    assert cfg.model.path == repo
    assert hub.parse_name(cfg.model.path) is not None
    assert cfg.output_dir.name == name.removesuffix("/full").replace("/", "_")


@pytest.mark.long
def test_an_adapters_peak_is_the_planners(tmp_path):
    """For one Llama; docs/memory.md compares all presets."""
    name = "llama3_1_8b/qlora"
    recipe = catalog.load_recipe(catalog.find_recipe(recipe_name(name)))
    folder = write_model_folder("llama3_1_8b", tmp_path / "model")
    cfg = load_config(recipe.Config, catalog.find_preset(name), [f"model.path={folder}", f"output_dir={tmp_path}/run"])
    card = replace(find_device("RTX 4090"), memory_bytes=ROWS[name]["memory_bytes"])
    assert rehearse(recipe, cfg, card).reserved_bytes == pytest.approx(ROWS[name]["reserved_bytes"], rel=0.02)


@pytest.mark.parametrize("name", [*PRESETS, "tiny/full", "tiny/lora"])
def test_a_preset_states_nothing_that_goes_without_saying(name):
    recipe, file = catalog.load_recipe(catalog.find_recipe(recipe_name(name))), catalog.find_preset(name)
    cfg = load_config(recipe.Config, file).model_dump(mode="json")
    defaults = {setting.key: setting for setting in describe(recipe.Config)}
    for key in preset_values(file):
        if key not in defaults:  # a group without settings, which turns the group on
            assert preset_values(file)[key] == "{}"
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


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_validates_without_a_network(name, hub_server):
    from typer.testing import CliRunner

    from lean_ft.cli.main import app

    answer = CliRunner().invoke(app, ["validate", recipe_name(name), "--config", name])
    assert answer.exit_code == 0, answer.output
    assert "# ok" in answer.output
    assert hub_server.requests == []
