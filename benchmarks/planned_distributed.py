"""Predict the memory of each of 8 or 64 GPUs for models of 1, 8 and 70 B parameters. Runs on one CPU.

    python benchmarks/planned_distributed.py
    python benchmarks/planned_distributed.py --only 8B

Full fine-tuning in bfloat16, one row of 4,096 packed tokens per GPU, activation checkpointing, 8 GPUs per machine.
Peaks are the allocator's; the driver's context, NCCL's buffers and libraries come on top. Nothing is measured.

Writes `results/planned_distributed_<device>.json`.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import rehearse_recipe
from results import GIB, RESULTS, console, describe_hardware, gibibytes, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

COLUMNS = [
    "model and GPUs",
    "predicted peak",
    "sent within the node",
    "sent between nodes",
    "planning time",
]

DEVICES_EACH = 8
_PLAIN: dict[str, Any] = {
    "model.random_init": True,
    "data.source": "not-read.jsonl",
    "data.packing": "bfd",
    "data.max_length": 4096,
    "batch_size": 1,
    "memory.activation_checkpointing": "full",
    "memory.loss_chunk_tokens": 4096,
    "parallel.vocabulary": "gathered",
}
_8BIT = {"optimizer.name": "adamw_8bit", "optimizer.in_backward": True}
_CUT = {**_8BIT, "parallel.vocabulary": "cut"}
_4BIT = {**_CUT, "optimizer.name": "adamw_4bit"}
_MODELS = {"1B": "llama3_2_1b", "8B": "llama3_1_8b", "70B": "llama3_1_70b"}

# (model, GPUs, label, settings)
CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("1B", 8, "AdamW", {}),
    ("1B", 8, "8 bits in backward", _8BIT),
    ("1B", 8, "+ vocabulary parallelism", _CUT),
    ("8B", 8, "AdamW", {}),
    ("8B", 8, "8 bits in backward", _8BIT),
    ("8B", 8, "+ vocabulary parallelism", _CUT),
    ("8B", 8, "4-bit AdamW, vocabulary parallelism", _4BIT),
    ("8B", 64, "8 bits in backward", _8BIT),
    ("8B", 64, "+ vocabulary parallelism", _CUT),
    ("8B", 64, "8 replicas (HSDP), 8-bit AdamW, vocabulary parallelism", {**_CUT, "parallel.replicate": 8}),
    ("70B", 8, "AdamW", {}),
    ("70B", 8, "8-bit AdamW in backward, vocabulary parallelism", _CUT),
    ("70B", 8, "4-bit AdamW, vocabulary parallelism", _4BIT),
    ("70B", 64, "AdamW", {}),
    ("70B", 64, "8-bit AdamW in backward, vocabulary parallelism", _CUT),
    ("70B", 64, "8 replicas (HSDP), 8-bit AdamW, vocabulary parallelism", {**_CUT, "parallel.replicate": 8}),
]


def main(
    device_name: Annotated[str, typer.Option(help="GPU to plan for.")] = "H100",
    only: Annotated[str | None, typer.Option(metavar="1B|8B|70B", help="Only this model.")] = None,
    results_dir: Path = RESULTS,
) -> None:
    """Predict every case."""
    from lean_ft.plan.devices import find_device

    device, hardware, rows = find_device(device_name), describe_hardware("cpu"), []
    path = None
    for model, num_gpus, label, settings in CASES:
        if only not in (None, model):
            continue
        case = {"label": f"{model} on {num_gpus}: {label}", "settings": settings, "num_gpus": num_gpus}
        rows.append(case | _predict(_MODELS[model], num_gpus, settings, device))
        console.print(f"{case['label']}: {gibibytes(rows[-1]['peak_bytes'])}, {rows[-1]['where']}", markup=False)
        path = write_result(  # after each case, because all of them take long
            "planned_distributed_" + device.name.lower().replace(" ", "-"),
            benchmark="planned_distributed",
            hardware=hardware,
            settings={"device_name": device.name, "devices_each": DEVICES_EACH},
            rows=rows,
            folder=results_dir,
        )
    if path is None:
        raise typer.BadParameter(f"expected one of {', '.join(_MODELS)}", param_hint="--only")
    print_result(path, describe, COLUMNS, table_cells)


def _predict(shape: str, num_gpus: int, settings: dict[str, Any], device: Any) -> dict[str, Any]:
    from lean_ft.plan.devices import Machines

    with tempfile.TemporaryDirectory(prefix="lean_ft_planned_") as name:
        own = {
            "model.path": write_model_folder(shape, Path(name) / "model", EMBEDDED_MODEL),
            "output_dir": Path(name) / "run",
            "gradient_accumulation_steps": num_gpus,
            **_PLAIN,
            **settings,
        }
        machines = Machines(DEVICES_EACH, num_gpus // DEVICES_EACH)
        return {"status": "ok", **rehearse_recipe("finetune", own, device, machines)}


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"predicted, not measured: memory and traffic of each {settings['device_name']} per step, "
        f"{settings['devices_each']} per node; full fine-tuning in bfloat16, 4,096 packed tokens per GPU, activation "
        "checkpointing"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            gibibytes(row["peak_bytes"]),
            f"{row['sent_bytes'] / GIB:.1f} GiB",
            f"{row['sent_away_bytes'] / GIB:.1f} GiB",
            f"{row['planning_seconds']:.0f} s",
        ]
        for row in result["rows"]
    ]


if __name__ == "__main__":
    typer.run(main)
