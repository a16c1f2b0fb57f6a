"""The speeds that the planner predicts for a CPU, next to the measured ones of compare_torchtune.py."""

import json
from dataclasses import replace

import pytest
from results import RESULTS
from shapes import write_model_folder

from lean_ft.plan.devices import CPU, measured_cpu
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe

RECIPES = {"full": "full_finetune_single_device", "lora": "lora_finetune_single_device"}


@pytest.mark.long
def test_settings_have_the_measured_order_on_a_cpu_and_speeds_within_a_fifth(tmp_path):
    model, found = None, []
    for file in RESULTS.glob("compare_torchtune_*_amd-epyc-2-cores.json"):
        result = json.loads(file.read_text())
        settings = result["settings"]
        if (name := RECIPES.get(settings["recipe"])) is None:
            continue
        model = model or write_model_folder(settings["shape"], tmp_path / "model")
        recipe = load_recipe(find_recipe(name))
        rate = 1e9 * max(row["product_gflops"] for row in result["rows"])
        cpu = replace(CPU, flops_16bit=rate, flops_32bit=rate / 3)
        given = {
            "model.path": model,
            "model.random_init": True,
            "data.source": "x.jsonl",
            "output_dir": tmp_path / "run",
        }
        given |= {"data.max_length": settings["length"], "batch_size": settings["batch_size"], "device": "cpu"}
        for line in result["summary"]:
            if (own := settings["sides"][line["side"]]["settings"]) is None or line["status"] != "ok":
                continue
            texts = [
                f"{key}={json.dumps(value) if isinstance(value, bool) else value}"
                for key, value in (given | own).items()
            ]
            rehearsal = rehearse(recipe, load_config(recipe.Config, None, texts), cpu)
            found.append((line["tokens_per_second"], rehearsal.tokens_per_second))
    assert len(found) >= 3
    assert [pair[1] for pair in sorted(found)] == sorted(planned for _, planned in found)
    for measured, planned in found:
        assert planned == pytest.approx(measured, rel=0.2)


@pytest.mark.long
def test_this_cpu_is_measured():
    cpu = measured_cpu()
    assert cpu.is_cpu
    for rate in (cpu.flops_16bit, cpu.flops_32bit, cpu.bytes_per_second):
        assert 1e8 < rate < 1e15
