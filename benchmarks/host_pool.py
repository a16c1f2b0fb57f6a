"""Compare full fine-tuning with and without `memory.host_pool`, alternating.

    python benchmarks/host_pool.py --shape qwen2_5_0_5b --batch-size 4 --length 512 --rounds 2

Each run is a new process of the recipe with the settings of the ladder's rung `loss_sums` (8-bit AdamW in backward,
compiled, full checkpointing). The first steps of a run do not count, because they compile and map new pages.

Writes `results/host_pool_<shape>_<batch>x<length>_<hardware>.json`.
"""

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget
from memory_ladder import measure_rungs, rung_settings
from results import (
    RESULTS,
    change,
    gibibytes,
    print_result,
    require_hardware,
    tokens_per_second,
    write_result,
)
from shapes import num_parameters

SIDES = {"loss_sums": "memory.host_pool=true", "returned": "memory.host_pool=false"}  # the ladder's rungs
COLUMNS = ["setting", "seconds per step", "min", "max", "tokens/s", "change", "peak memory", "change"]


def summarize(turns: list[dict[str, Any]], warmup_steps: int) -> list[dict[str, Any]]:
    """One row per side: medians over the counted steps of its runs, or its first failed run."""
    rows = []
    for name, label in SIDES.items():
        own = [turn for turn in turns if turn["name"] == name]
        failed = next((turn for turn in own if turn["status"] != "ok"), None)
        if failed is not None:
            rows.append({**failed, "label": label})
            continue
        seconds = [value for turn in own for value in turn["all_step_seconds"][warmup_steps:]]
        row = {"name": name, "label": label, "settings": own[0]["settings"], "status": "ok", "reason": None}
        row |= {"step_seconds": statistics.median(seconds), "all_step_seconds": seconds}
        rows.append(row | {"peak_memory_bytes": max(turn["peak_memory_bytes"] for turn in own)})
    return rows


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"full fine-tuning of {settings['shape']} ({settings['parameters']:,} parameters, random weights), batch of "
        f"{settings['batch_size']} rows of {settings['length']} tokens, bfloat16, 8-bit AdamW in backward, compiled, "
        f"full activation checkpointing; median of {settings['steps']} steps in each of {settings['rounds']} "
        "alternating new processes; peak resident memory"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table. Changes are relative to the first row."""
    tokens = result["settings"]["batch_size"] * result["settings"]["length"]
    first = result["rows"][0]
    cells = []
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], *["-"] * (len(COLUMNS) - 2)])
            continue
        seconds, peak = row["step_seconds"], row["peak_memory_bytes"]
        compared = row is not first and first["status"] == "ok"
        cells.append(
            [
                row["label"],
                *(f"{value:.2f}" for value in (seconds, min(row["all_step_seconds"]), max(row["all_step_seconds"]))),
                tokens_per_second(tokens / seconds),
                change(first["step_seconds"], seconds) if compared else "-",
                gibibytes(peak),
                change(peak, first["peak_memory_bytes"]) if compared else "-",
            ]
        )
    return cells


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 2,
    steps: Annotated[int, typer.Option(help="Counted steps per run.")] = 10,
    warmup_steps: Annotated[int, typer.Option(help="Warm-up steps before the counted steps.")] = 2,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one run in seconds.")] = 3600,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Measure, print the table and write the result."""
    hardware = require_hardware("cpu")
    pair = list(SIDES)
    turns = measure_rungs(
        [name for round_ in range(rounds) for name in (pair if round_ % 2 == 0 else reversed(pair))],
        shape=shape,
        batch_size=batch_size,
        length=length,
        packing="none",
        steps=steps,
        warmup_steps=warmup_steps,
        device="cpu",
        budget=Budget(timeout_seconds),
    )
    assert rung_settings("returned") == {**rung_settings("loss_sums"), "memory.host_pool": False}
    path = write_result(
        f"host_pool_{shape}_{batch_size}x{length}",
        benchmark="host_pool",
        hardware=hardware,
        settings={
            "shape": shape,
            "parameters": num_parameters(shape),
            "batch_size": batch_size,
            "length": length,
            "rounds": rounds,
            "steps": steps,
            "warmup_steps": warmup_steps,
        },
        rows=summarize(turns, warmup_steps),
        folder=results_dir,
        turns=turns,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
