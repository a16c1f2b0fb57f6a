"""Recipes on the embedded model, on a GPU and on the CPU: the same losses and norms, step by step."""

import json
from pathlib import Path

import pytest
import torch

from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_preset, find_recipe, load_recipe
from tests.pretended_gpu.cards import IS_SIMULATED
from tests.pretended_gpu.device_values import drawn_as_on_a_cpu

NUM_STEPS, MANY_STEPS = 5, 20  # the many for packed rows in each type
FULL, LORA = ("full_finetune_single_device", "tiny/full"), ("lora_finetune_single_device", "tiny/lora")
PACKED = "data.packing=bfd data.max_length=256"
IN_BACKWARD = f"{PACKED} clip_grad_norm=null optimizer.in_backward=true optimizer.name=adamw_8bit"
# Tolerances of losses and gradient norms: the order of sums in float32, rounding (which changes later weights) in other
# dtypes.
TOLERANCES = {"float32": (1e-5, 1e-5), "float16": (1e-3, 1e-2), "bfloat16": (8e-3, 4e-2)}

# (recipe and preset, type, settings of both devices, settings of the GPU alone)
CASES: dict[str, tuple[tuple[str, str], str, str, str]] = {
    # every layout, in every type
    **{f"padded_{dtype}": (FULL, dtype, "clip_grad_norm=0.5", "") for dtype in TOLERANCES},
    **{f"packed_{dtype}": (FULL, dtype, PACKED, "") for dtype in TOLERANCES},
    **{f"padding_free_{dtype}": (FULL, dtype, "data.packing=padding_free", "") for dtype in TOLERANCES},
    # adapters
    **{f"lora_{dtype}": (LORA, dtype, "lora.dropout=0.1", "") for dtype in TOLERANCES},
    **{f"qlora_{dtype}": (LORA, dtype, f"lora.quantize=nf4 {PACKED}", "") for dtype in TOLERANCES},
    "dora_bfloat16": (LORA, "bfloat16", "lora.dora=true", ""),
    # every optimizer
    **{
        f"{name}_bfloat16": (FULL, "bfloat16", f"optimizer.name={name} clip_grad_norm=null {PACKED}", "")
        for name in ("sgd", "adafactor", "adamw_8bit", "adamw_8bit_torchao", "adamw_4bit", "muon")
    },
    **{
        f"{name}_rounding_clipping_bfloat16": (
            FULL,
            "bfloat16",
            f"optimizer.name={name} optimizer.stochastic_rounding=true optimizer.update_clipping=true {PACKED}",
            "",
        )
        for name in ("adamw", "adamw_8bit")
    },
    "apollo_mini_float32": (FULL, "float32", f"optimizer.name=apollo_mini clip_grad_norm=null {PACKED}", ""),
    # optimizer states, activations and the output layer's gradient in host memory
    "paged_adamw_8bit_bfloat16": (FULL, "bfloat16", "optimizer.name=paged_adamw_8bit", ""),
    "paged_bfloat16": (FULL, "bfloat16", "optimizer.name=adamw_8bit", "optimizer.state=paged"),
    "streamed_float32": (FULL, "float32", PACKED, "optimizer.state=streamed"),
    "offloaded_bfloat16": (
        FULL,
        "bfloat16",
        f"{IN_BACKWARD} memory.activation_checkpointing=full",
        "memory.activation_offload=true",
    ),
    "parked_and_streamed_bfloat16": (
        FULL,
        "bfloat16",
        f"{IN_BACKWARD} memory.tied_gradient=fused",
        "memory.tied_gradient=host optimizer.state=streamed",
    ),
    "host_embeddings_bfloat16": (
        LORA,
        "bfloat16",
        PACKED,
        "memory.frozen_embeddings=host memory.activation_offload=true",
    ),
    # compiled: traced graphs that run operation by operation
    "compiled_float32": (FULL, "float32", "compile=true memory.activation_checkpointing=selective", ""),
    "compiled_bfloat16": (FULL, "bfloat16", f"{IN_BACKWARD} compile=true optimizer.stochastic_rounding=true", ""),
    "compiled_budget_bfloat16": (FULL, "bfloat16", f"{PACKED} compile=true memory.activation_checkpointing=budget", ""),
    "compiled_qlora_bfloat16": (LORA, "bfloat16", f"lora.quantize=nf4 compile=true {PACKED}", ""),
    # tiles with quantized weights, and quantization-aware training
    "tiled_qlora_float32": (
        LORA,
        "float32",
        f"lora.quantize=nf4 memory.tile_mlp=3 memory.activation_checkpointing=full {PACKED}",
        "memory.activation_offload=true",
    ),
    "quantized_bfloat16": (FULL, "bfloat16", f"quantize.train=int4 {PACKED}", ""),  # a last bit may change a code
    "new_tokens_float32": (FULL, "float32", 'model.new_tokens=["<|aside|>"]', ""),
}
DPO = "dpo", "tiny/dpo"
LEAN = f"{IN_BACKWARD} memory.activation_checkpointing=full"
WITH_MODEL = "memory.activation_checkpointing=full reference.kind=model loss.wpo=true"
# Without AdamW, which turns a gradient of pure rounding error into a full update.
CASES["dpo_float32"] = DPO, "float32", f"{WITH_MODEL} optimizer.name=sgd optimizer.lr=0.01", ""
CASES["dpo_streamed_float32"] = *CASES["dpo_float32"][:3], "reference.kind=streamed"
CASES["dpo_float16"] = DPO, "float16", "data.packing=padding_free loss.sft_weight=0.1", ""
CASES["dpo_bfloat16"] = DPO, "bfloat16", f"{LEAN} loss.ld_alpha=0.5", ""


ON_OLDER_CARDS = ("packed_float16", "padding_free_float16", "qlora_float16", "packed_float32")


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.cards("T4", "H100")) if x in ON_OLDER_CARDS else x for x in CASES]
)
def test_losses_and_norms_are_the_cpus(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With float16's initial loss scale, rounding decides which step overflows.
    monkeypatch.setattr("lean_ft.optim.loss_scaler.INITIAL_SCALE", 2.0**10)
    (recipe, preset), dtype, settings, of_gpu = CASES[case]
    if not IS_SIMULATED and any(word in f"{case} {settings}" for word in ("dropout", "rounding", "apollo")):
        pytest.skip("a real GPU draws other random numbers than a CPU")
    num_steps = MANY_STEPS if case.startswith("packed") else NUM_STEPS
    settings += f" model.dtype={dtype} max_steps={num_steps}"
    expected = run(recipe, preset, tmp_path / "cpu", f"device=cpu {settings}")
    with drawn_as_on_a_cpu():
        found = run(recipe, preset, tmp_path / "cuda", f"device=cuda {settings} {of_gpu}")
    assert len(found) == len(expected) == num_steps
    for own, reference in zip(found, expected, strict=True):
        loss_tolerance, norm_tolerance = TOLERANCES[dtype]
        if recipe == "dpo":  # its loss is a difference of sums
            loss_tolerance *= 3
        if not IS_SIMULATED and "lora" in preset:  # of small gradients, with weights quantized elsewhere
            loss_tolerance, norm_tolerance = 3 * loss_tolerance, max(3 * norm_tolerance, 1e-3)
        for name, tolerance in (("loss", loss_tolerance), ("grad_norm", norm_tolerance)):
            assert own[name] == pytest.approx(reference[name], rel=tolerance), f"{name} of step {own['step']}"


@pytest.mark.cards("T4")
def test_bfloat16_is_refused_before_ampere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Tesla T4 has 7.5 .* Set model.dtype=float16"):
        run(*FULL, tmp_path, "device=cuda model.dtype=bfloat16 max_steps=1")


@pytest.mark.cards("T4", "H100")
@pytest.mark.parametrize("packing", ["padding_free", "bfd"])
def test_one_row_without_a_kernel_is_warned_of(
    packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*FULL, tmp_path, f"device=cuda model.dtype=float16 max_steps=1 data.packing={packing}")
    warns = "padding_free makes one row of the 4 documents of a batch" in capsys.readouterr().out
    assert warns == (packing == "padding_free" and torch.cuda.get_device_capability() < (8, 0))


def run(recipe_name: str, preset: str, output_dir: Path, settings: str) -> list[dict]:
    """Return the lines of metrics.jsonl after a few steps."""
    recipe = load_recipe(find_recipe(recipe_name))
    own = [f"output_dir={output_dir}", "plan=false", "batch_size=4", "eval_answers=0", "data.validation_source=null"]
    given = [*own, *settings.split()]
    recipe.main(load_config(recipe.Config, find_preset(preset), given))
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
