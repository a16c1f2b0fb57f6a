"""Compare the planner's prediction with the allocations of PyTorch's CUDA allocator on a simulated GPU.

    make test-pretended-gpu                               # once: installs CUDA wheels and builds the simulated GPU
    .venv-pretended-gpu/bin/python benchmarks/pretended_ladder.py
    .venv-pretended-gpu/bin/python benchmarks/pretended_ladder.py --tables presets --only qlora

The simulated GPU (`tests/pretended_gpu`) replaces the driver, the runtime and cuBLAS: PyTorch allocates, frees and
compiles as on a GPU, but no kernel runs. Peaks are the allocator's in a real sequence of allocations. They are not
measured on a GPU, whose driver context takes about 0.5 GiB more. Each row is a new process.

Three tables: `ladder`, one technique added per rung, as in torchtune's published ladder; `optimizers`, each optimizer
and its options; `presets`, every preset on the GPU in its comment. Writes
`results/pretended_ladder_<table>_<hardware>.json` after every row. Rows with a number are skipped without --again. With
--predict only the planner runs again.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measure import ROOT, last_error, overrides
from results import RESULTS, commit, console, describe_hardware, gibibytes, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

from lean_ft.settings.text import preset_recipe, preset_values
from lean_ft.system.catalog import find_preset
from lean_ft.system.catalog import presets as shipped

COLUMNS = ["setting", "GPU", "planned allocated", "allocated", "planned reserved", "reserved", "error", "update"]
# By the GB of a GPU: the simulated GPU of its generation, and the GiB that the driver reports.
CARDS: dict[int, tuple[str, float]] = {
    8: ("RTX4090", 7.6),
    12: ("RTX4090", 11.7),
    16: ("RTX4090", 15.6),
    24: ("RTX4090", 23.5),
    32: ("RTX4090", 31.4),
    40: ("A100", 39.4),
    48: ("RTX4090", 47.4),
    80: ("A100", 79.1),
}
FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
FINE_TUNING = ("finetune", FULL)
CHUNKED = {"memory.loss_chunk_tokens": 1024}
CHECKPOINTED = {**CHUNKED, "compile": True, "memory.activation_checkpointing": "full"}
IN_BACKWARD = {**CHECKPOINTED, "optimizer.in_backward": True}
EIGHT_BIT = {**IN_BACKWARD, "optimizer.name": "adamw_8bit"}
_SUMS = {**EIGHT_BIT, "memory.loss_accumulation_dtype": "weight"}
_OFFLOADED = {**_SUMS, "memory.activation_offload": True}
_PARKED = {**_OFFLOADED, "memory.tied_gradient": "host"}
_STREAMED = {**_PARKED, "optimizer.state": "streamed"}
WHOLE_LOGITS = {"memory.loss_chunk_tokens": 0}
_ADAPTER = {**CHECKPOINTED, "memory.activation_offload": True}
_ON_HOST = {**CHECKPOINTED, "memory.frozen_embeddings": "host"}
_LEAN_8B = {key: value for key, value in _STREAMED.items() if key != "memory.tied_gradient"}
_QLORA_8B = {**_ADAPTER, "lora.quantize": "nf4", "optimizer.name": "adamw_8bit", "data.max_length": 2048}

# (shape, recipe, label, settings): the ladder that torchtune published, more techniques, and adapters.
RUNGS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama3_2_3b", FULL, "3B: packed, no other technique", WHOLE_LOGITS),
    ("llama3_2_3b", FULL, "+ compile", {**WHOLE_LOGITS, "compile": True}),
    ("llama3_2_3b", FULL, "+ chunked cross-entropy", {**CHUNKED, "compile": True}),
    ("llama3_2_3b", FULL, "+ activation checkpointing", CHECKPOINTED),
    ("llama3_2_3b", FULL, "+ step in backward", IN_BACKWARD),
    ("llama3_2_3b", FULL, "+ 8-bit AdamW", EIGHT_BIT),
    ("llama3_2_3b", FULL, "+ bfloat16 loss accumulation", _SUMS),
    ("llama3_2_3b", FULL, "+ activation offload", _OFFLOADED),
    ("llama3_2_3b", FULL, "+ tied gradient on the host", _PARKED),
    ("llama3_2_3b", FULL, "+ optimizer state streamed", _STREAMED),
    ("llama3_2_3b", LORA, "3B: LoRA, rank 16", CHECKPOINTED),
    ("llama3_2_3b", LORA, "3B: QLoRA, rank 16", {**CHECKPOINTED, "lora.quantize": "nf4"}),
    ("llama3_2_3b", LORA, "3B: LoRA, embeddings on the host", _ON_HOST),
    ("llama3_2_3b", LORA, "3B: QLoRA, embeddings on the host", {**_ON_HOST, "lora.quantize": "nf4"}),
    ("llama3_2_3b", LORA, "3B: LoRA, activations offloaded", _ADAPTER),
    ("llama3_2_3b", LORA, "3B: QLoRA, activations offloaded", {**_ADAPTER, "lora.quantize": "nf4"}),
    ("llama3_1_8b", FULL, "8B: all except streaming, 1 x 2,048",
        {**_LEAN_8B, "optimizer.state": "device", "batch_size": 1, "data.max_length": 2048}),
    ("llama3_1_8b", FULL, "8B: optimizer state streamed, 1 x 2,048",
        {**_LEAN_8B, "batch_size": 1, "data.max_length": 2048}),
    ("llama3_1_8b", LORA, "8B: QLoRA, rank 16, 2 x 2,048",
        {**CHECKPOINTED, "lora.quantize": "nf4", "data.max_length": 2048}),
    ("llama3_1_8b", LORA, "8B: QLoRA, embeddings on the host, 2 x 2,048",
        {**_ON_HOST, "lora.quantize": "nf4", "data.max_length": 2048}),
    ("llama3_1_8b", LORA, "8B: QLoRA, activations offloaded, 2 x 2,048", {**_QLORA_8B, "optimizer.name": "adamw"}),
    ("llama3_1_8b", LORA, "8B: + 8-bit AdamW", _QLORA_8B),
    ("llama3_1_8b", LORA, "8B: + MLP in tiles", {**_QLORA_8B, "memory.tile_mlp": 4}),
]  # fmt: skip

STEPS = Path(__file__).resolve().parent / "pretended_steps.py"
CARD = ROOT / "tests" / "pretended_gpu"


class Setting(NamedTuple):
    """A row: label, recipe with shape, settings or preset, and GPU size in GB."""

    label: str
    recipe: str
    shape: str
    settings: dict[str, Any]
    preset: str | None = None
    card_gb: int = 80


def ladder() -> list[Setting]:
    """The rungs, and adapters with the least memory without offload."""
    packed = {"data.packing": "bfd", "data.max_length": 4096, "batch_size": 2}
    rungs = [Setting(label, recipe, shape, {**packed, **settings}) for shape, recipe, label, settings in RUNGS]
    lean = {**CHECKPOINTED, "optimizer.name": "adamw_8bit", "memory.tile_mlp": 8, "memory.loss_chunk_tokens": 512}
    return [
        *rungs,
        Setting("3B: LoRA, 8-bit AdamW, 8 tiles", LORA, "llama3_2_3b", {**packed, **lean}),
        Setting("3B: QLoRA, 8-bit AdamW, 8 tiles", LORA, "llama3_2_3b", {**packed, **lean, "lora.quantize": "nf4"}),
    ]


def optimizers() -> list[Setting]:
    """Every optimizer with each of its options, compiled and not."""
    rules = {
        **dict.fromkeys(("sgd", "adafactor", "muon", "apollo_mini", "adamw_8bit_torchao"), ("stochastic_rounding",)),
        **dict.fromkeys(("adamw", "adamw_8bit", "adamw_4bit"), ("stochastic_rounding", "update_clipping")),
        "paged_adamw_8bit": (),
    }
    packed = {"data.packing": "bfd", "data.max_length": 4096, "batch_size": 2}
    rows = []
    for compile in (True, False):
        for name, options in rules.items():
            for chosen in ((), *((option,) for option in options)):
                settings = {**_SUMS, "compile": compile, "optimizer.name": name}
                settings |= {f"optimizer.{option}": True for option in chosen}
                label = ", ".join([name, *(option.replace("_", " ") for option in chosen)])
                label += "" if compile else ", uncompiled"
                rows.append(Setting(label, FULL, "llama3_2_3b", {**packed, **settings}))
    return rows


def presets() -> list[Setting]:
    """Every preset that fine-tunes a published model, on the GPU in its comment. The batches of `pretended_steps.py`
    are those of fine-tuning."""
    rows = []
    for name, file in shipped().items():
        if name.startswith("tiny/") or preset_recipe(file) not in FINE_TUNING:
            continue
        said = re.search(r"on a GPU with (\d+) GB", file.read_text())
        recipe = preset_recipe(file)
        assert said is not None and recipe is not None, f"{name} names no card or no recipe"
        rows.append(Setting(name, recipe, name.partition("/")[0], {}, name, int(said[1])))
    return rows


TABLES = {"ladder": ladder, "optimizers": optimizers, "presets": presets}


def main(
    tables: Annotated[str, typer.Option(help="Names, comma-separated.")] = ",".join(TABLES),
    only: Annotated[str, typer.Option(help="Only rows whose label contains this text.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one row in seconds.")] = 1200,
    again: Annotated[bool, typer.Option(help="Run rows again that already have a number.")] = False,
    predict: Annotated[bool, typer.Option(help="Run only the planner again; keep the measured allocations.")] = False,
    results_dir: Path = RESULTS,
) -> None:
    """Run every row on a simulated GPU."""
    if not (CARD / "build" / "libcuda.so.1").exists():
        console.print(
            f"{CARD.relative_to(ROOT)} is not built: run `make test-pretended-gpu`. Nothing was run.", markup=False
        )
        raise typer.Exit(0)
    hardware = describe_hardware("cpu")
    for table in tables.split(","):
        name = f"pretended_ladder_{table}"
        path = results_dir / f"{name}_{hardware.slug}.json"
        known = {row["label"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
        settings = TABLES[table]()
        for setting in settings:
            before = known.get(setting.label, {})
            is_there = before.get("status") == "ok"
            if only not in setting.label or (is_there and not (again or predict)):
                continue
            known[setting.label] = run(setting, timeout_seconds, before if is_there and predict else None)
            console.print(" | ".join(_cells(known[setting.label])), markup=False)
            write_result(
                name,
                benchmark="pretended_ladder",
                hardware=hardware,
                settings={"table": table},
                rows=[known[setting.label] for setting in settings if setting.label in known],
                folder=results_dir,
            )
        if path.exists():
            print_result(path, describe, COLUMNS, table_cells)


def run(setting: Setting, timeout_seconds: float, measured: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row: the allocator's peaks, unless they are `measured`, and the planner's; or why there are none."""
    name, gib = CARDS[setting.card_gb]
    row: dict[str, Any] = {**(measured or {}), "card": f"{setting.card_gb} GB", **setting._asdict()}
    if setting.preset:
        row["values"] = preset_values(find_preset(setting.preset))
    row["commit"] = measured.get("commit") if measured else commit()
    with tempfile.TemporaryDirectory(prefix="lean_ft_pretended_") as folder:
        model = write_model_folder(setting.shape, Path(folder) / "model", EMBEDDED_MODEL)
        own = {**setting.settings, "model.path": model, "output_dir": Path(folder) / "run"}
        arguments = [setting.recipe, *(["--config", setting.preset] if setting.preset else []), *overrides(own)]
        for more in [["--plan"]] if measured else [[], ["--plan"]]:
            command = [CARD / "run.sh", sys.executable, STEPS, *arguments, *more]
            try:
                done = subprocess.run(
                    [str(part) for part in command],
                    cwd=ROOT,
                    env={
                        **os.environ,
                        "PRETENDED_GPU": name,
                        "PRETENDED_GPU_GIB": str(gib),
                        "PRETENDED_GPU_TOUCH": "65536",  # larger copies are skipped, because nothing reads them
                        "PYTHONPATH": str(ROOT),
                    },
                    capture_output=True,
                    text=True,
                    timeout=timeout_seconds,
                )
            except subprocess.TimeoutExpired:
                return {**row, "status": "timed out", "reason": f"took longer than {timeout_seconds:.0f} s"}
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode or not lines:
                output = done.stdout + done.stderr
                status = "out of memory" if "OutOfMemoryError" in output else "failed"
                return {**row, "status": status, "reason": last_error(output), "output": output[-3000:]}
            row |= json.loads(lines[-1])
    return {**row, "status": "ok", "reason": None}


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    configuration = {
        "ladder": "2 rows of 4,096 packed tokens in bfloat16 unless stated otherwise",
        "optimizers": "full fine-tuning of Llama-3.2-3B, 2 rows of 4,096 packed tokens, step in backward",
        "presets": "every preset on the GPU in its comment",
    }[result["settings"]["table"]]
    return (
        f"allocations of PyTorch's CUDA build on a simulated GPU, where no kernel runs: {configuration}. Planned: by "
        "the planner. Allocated and reserved: by PyTorch's allocator in step 3. Error: of the planned reserved "
        "memory. Update: peak workspace of one parameter's update, without weights, gradients and state"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [_cells(row) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return [row["label"], row["card"], row["status"], *["-"] * (len(COLUMNS) - 3)]
    predicted = row["predicted_reserved_bytes"]
    return [
        row["label"],
        row["card"],
        gibibytes(row["predicted_bytes"]),
        gibibytes(row["allocated_bytes"]),
        gibibytes(predicted),
        gibibytes(row["reserved_bytes"]),
        "-" if predicted is None else f"{predicted / row['reserved_bytes'] - 1:+.1%}",
        gibibytes(row["update_bytes"]),
    ]


if __name__ == "__main__":
    typer.run(main)
