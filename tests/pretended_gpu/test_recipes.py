"""Recipes on the embedded model, on the pretended GPU and on the CPU: the same losses and norms, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_ft.catalog import find_preset, find_recipe, load_recipe
from lean_ft.settings_text import load_config

pytestmark = pytest.mark.cards("H100")

NUM_STEPS = 4
FULL, LORA = ("full_finetune_single_device", "tiny/full"), ("lora_finetune_single_device", "tiny/lora")
PACKED = "data.packing=bfd data.max_length=256"
# The largest relative difference of a loss, and of a gradient's norm, by the type that computes. The first step's is sums
# of another order; the others add what different weights make of it.
TOLERANCES = {"float32": (1e-5, 1e-4), "float16": (1e-3, 1e-2), "bfloat16": (3e-3, 2e-2)}

CASES: dict[str, tuple[tuple[str, str], str, str]] = {
    "padded_float32": (FULL, "float32", ""),
}
for dtype in TOLERANCES:
    CASES[f"packed_{dtype}"] = FULL, dtype, PACKED
    CASES[f"padding_free_{dtype}"] = FULL, dtype, "data.packing=padding_free"
    CASES[f"padded_{dtype}"] = FULL, dtype, "clip_grad_norm=0.5"
    CASES[f"lora_{dtype}"] = LORA, dtype, ""
    CASES[f"qlora_{dtype}"] = LORA, dtype, f"lora.quantize=nf4 {PACKED}"
for name, more in {
    "sgd": "optimizer.name=sgd optimizer.momentum=0.9",
    "adafactor": "optimizer.name=adafactor clip_grad_norm=null",
    "adamw_8bit": "optimizer.name=adamw_8bit",
    "adamw_8bit_clipping": "optimizer.name=adamw_8bit optimizer.update_clipping=true",
    "adamw_8bit_torchao": "optimizer.name=adamw_8bit_torchao",
    "adamw_4bit": "optimizer.name=adamw_4bit",
    "muon": "optimizer.name=muon",
    "apollo_mini": "optimizer.name=apollo_mini",
    "paged": "optimizer.name=paged_adamw_8bit",
    "paged_state": "optimizer.name=adamw_8bit optimizer.state=paged",
    "streamed": "optimizer.name=adamw_8bit optimizer.state=streamed",
}.items():
    CASES[f"{name}_bfloat16"] = FULL, "bfloat16", f"{more} {PACKED}"
LEAN = f"{PACKED} clip_grad_norm=null optimizer.in_backward=true optimizer.name=adamw_8bit memory.activation_checkpointing=full"
CASES["offload_bfloat16"] = FULL, "bfloat16", f"{LEAN} memory.activation_offload=true"
CASES["parked_bfloat16"] = FULL, "bfloat16", f"{LEAN} memory.tied_gradient=host optimizer.state=streamed"
CASES["compiled_bfloat16"] = FULL, "bfloat16", f"{LEAN} compile=true"
CASES["compiled_float32"] = FULL, "float32", "compile=true memory.activation_checkpointing=selective"
DPO = "dpo", "tiny/dpo"
CASES["dpo_float32"] = DPO, "float32", "memory.activation_checkpointing=full reference.kind=model loss.wpo=true"
CASES["dpo_float16"] = DPO, "float16", "data.packing=padding_free loss.sft_weight=0.1"
CASES["dpo_bfloat16"] = DPO, "bfloat16", f"{LEAN} loss.ld_alpha=0.5"
CASES["budget_bfloat16"] = FULL, "bfloat16", f"{PACKED} compile=true memory.activation_checkpointing=budget"


@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms_are_the_cpus(case: str, tmp_path: Path) -> None:
    (recipe, preset), dtype, more = CASES[case]
    found, expected = (
        run(recipe, preset, tmp_path / device, f"device={device} model.dtype={dtype} {more}")
        for device in ("cuda", "cpu")
    )
    assert len(found) == len(expected) == NUM_STEPS
    loss_tolerance, norm_tolerance = TOLERANCES[dtype]
    for step, (own, reference) in enumerate(zip(found, expected, strict=True), start=1):
        assert own["loss"] == pytest.approx(reference["loss"], rel=loss_tolerance), f"step {step}"
        assert own["grad_norm"] == pytest.approx(reference["grad_norm"], rel=norm_tolerance), f"step {step}"


def run(recipe_name: str, preset: str, output_dir: Path, overrides: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a few steps."""
    recipe = load_recipe(find_recipe(recipe_name))
    own = [f"output_dir={output_dir}", "plan=false", f"max_steps={NUM_STEPS}", "batch_size=4", "eval_answers=0"]
    recipe.main(
        load_config(recipe.Config, find_preset(preset), [*own, "data.validation_source=null", *overrides.split()])
    )
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
