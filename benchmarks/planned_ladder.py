"""What the planner predicts for the ladder that torchtune published, and what fits smaller cards: no GPU is needed.

    python benchmarks/planned_ladder.py

Each rung adds one technique to a step of full finetuning of Llama-3.2-3B on 2 x 4,096 packed tokens in bfloat16, as
torchtune's published ladder on an A100 does; adapters, and an 8 B model on cards of 24 and 16 GB, follow. Peaks are of the
allocator: the driver's context and libraries, about half a GiB, come on top. Nothing here is measured.

Writes `results/planned_ladder_<device>.json`.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import rehearse_recipe
from results import RESULTS, describe_hardware, gibibytes, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

COLUMNS = ["setting", "predicted peak", "weights", "optimizer state", "torchtune, published", "planning time"]

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
GIB = 2**30
_CHUNKED = {"memory.loss_chunk_tokens": 1024}
_CHECKPOINTED = {**_CHUNKED, "compile": True, "memory.activation_checkpointing": "full"}
_IN_BACKWARD = {**_CHECKPOINTED, "optimizer.in_backward": True}
_8BIT = {**_IN_BACKWARD, "optimizer.name": "adamw_8bit"}
_SUMS = {**_8BIT, "memory.loss_accumulation_dtype": "weight"}
_OFFLOADED = {**_SUMS, "memory.activation_offload": True}
_PARKED = {**_OFFLOADED, "memory.tied_gradient": "host"}
_STREAMED = {**_PARKED, "optimizer.state": "streamed"}
_WHOLE_LOGITS = {"memory.loss_chunk_tokens": 0}
_ADAPTER = {**_CHECKPOINTED, "memory.activation_offload": True}
_LEAN_8B = {key: value for key, value in _STREAMED.items() if key != "memory.tied_gradient"}
_QLORA_8B = {**_ADAPTER, "lora.quantize": "nf4", "optimizer.name": "adamw_8bit", "data.max_length": 2048}

# (shape, recipe, label, settings, GiB that torchtune published for the rung)
RUNGS: list[tuple[str, str, str, dict[str, Any], float | None]] = [
    ("llama3_2_3b", FULL, "3B: packed, no other technique", _WHOLE_LOGITS, 60.0),
    ("llama3_2_3b", FULL, "+ compile", {**_WHOLE_LOGITS, "compile": True}, 51.0),
    ("llama3_2_3b", FULL, "+ chunked cross-entropy", {**_CHUNKED, "compile": True}, 42.9),
    ("llama3_2_3b", FULL, "+ activation checkpointing", _CHECKPOINTED, 24.9),
    ("llama3_2_3b", FULL, "+ step in backward", _IN_BACKWARD, 23.1),
    ("llama3_2_3b", FULL, "+ 8-bit AdamW", _8BIT, 17.6),
    ("llama3_2_3b", FULL, "+ bfloat16 loss accumulation", _SUMS, None),
    ("llama3_2_3b", FULL, "+ activation offload", _OFFLOADED, None),
    ("llama3_2_3b", FULL, "+ tied gradient on the host", _PARKED, None),
    ("llama3_2_3b", FULL, "+ optimizer state streamed", _STREAMED, None),
    ("llama3_2_3b", LORA, "3B: LoRA, rank 16", _CHECKPOINTED, 8.5),
    ("llama3_2_3b", LORA, "3B: QLoRA, rank 16", {**_CHECKPOINTED, "lora.quantize": "nf4"}, 4.6),
    ("llama3_2_3b", LORA, "3B: LoRA, activations offloaded", _ADAPTER, None),
    ("llama3_2_3b", LORA, "3B: QLoRA, activations offloaded", {**_ADAPTER, "lora.quantize": "nf4"}, None),
    ("llama3_1_8b", FULL, "8B: all except streaming, 1 x 2,048", {**_LEAN_8B, "optimizer.state": "device", "batch_size": 1, "data.max_length": 2048}, None),
    ("llama3_1_8b", FULL, "8B: optimizer state streamed, 1 x 2,048", {**_LEAN_8B, "batch_size": 1, "data.max_length": 2048}, None),
    ("llama3_1_8b", LORA, "8B: QLoRA, rank 16, 2 x 2,048", {**_CHECKPOINTED, "lora.quantize": "nf4", "data.max_length": 2048}, 7.4),
    ("llama3_1_8b", LORA, "8B: QLoRA, activations offloaded, 2 x 2,048", {**_QLORA_8B, "optimizer.name": "adamw"}, None),
    ("llama3_1_8b", LORA, "8B: + 8-bit AdamW", _QLORA_8B, None),
    ("llama3_1_8b", LORA, "8B: + MLP in tiles", {**_QLORA_8B, "memory.tile_mlp": 4}, None),
]  # fmt: skip


def main(
    device_name: Annotated[str, typer.Option(help="The card whose rates and size are planned for.")] = "A100 80GB",
    results_dir: Path = RESULTS,
) -> None:
    """Predicts every rung."""
    from lean_ft.plan.devices import find_device

    device = find_device(device_name)
    rows = []
    for shape, recipe, label, settings, published_gib in RUNGS:
        rows.append(
            {"shape": shape, "recipe": recipe, "label": label, "settings": settings, "published_gib": published_gib}
        )
        rows[-1] |= _predict(shape, recipe, settings, device)
    path = write_result(
        "planned_ladder_" + device.name.lower().replace(" ", "-"),
        benchmark="planned_ladder",
        hardware=describe_hardware("cpu"),
        settings={"device_name": device.name},
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


def _predict(shape: str, recipe: str, settings: dict[str, Any], device: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lean_ft_planned_") as name:
        own = {
            "model.path": write_model_folder(shape, Path(name) / "model", EMBEDDED_MODEL),
            "model.random_init": True,
            "data.source": "not-read.jsonl",
            "data.packing": "bfd",
            "data.max_length": 4096,
            "batch_size": 2,
            "output_dir": Path(name) / "run",
            **settings,
        }
        return {"status": "ok", **rehearse_recipe(recipe, own, device)}


def describe(result: dict[str, Any]) -> str:
    """What the table is of."""
    return (
        f"predicted, not measured: peak of one step on an {result['settings']['device_name']}, bfloat16, 2 rows of 4,096 packed "
        "tokens unless stated otherwise; torchtune published its figures for an A100 (its 8-bit row includes offload)"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The table's text."""
    return [
        [
            row["label"],
            gibibytes(row["peak_bytes"]),
            gibibytes(row["bytes_by_label"].get("weights", 0)),
            gibibytes(row["bytes_by_label"].get("optimizer state", 0)),
            "-" if row["published_gib"] is None else f"{row['published_gib']:.1f} GiB",
            f"{row['planning_seconds']:.1f} s",
        ]
        for row in result["rows"]
    ]


if __name__ == "__main__":
    typer.run(main)
