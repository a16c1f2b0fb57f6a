"""Run a few steps of presets on a real GPU with random weights, and compare memory, launches and time with the plan.

    python benchmarks/gpu_presets.py
    python benchmarks/gpu_presets.py --presets gpt_oss_20b/qlora,llama3_2_3b/full

Each row of a batch is one document of the maximum length, as in a plan, so attention is at its largest. Models of several processes are made,
planned and compiled side by side; their timed steps run one process at a time. Nothing is downloaded.

Writes `results/gpu_presets_<hardware>.json` after every row.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import ROOT, last_error
from results import RESULTS, commit, console, gibibytes, print_result, require_hardware, tokens_per_second, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

STEPS = ROOT / "benchmarks" / "pretended_steps.py"
PRESETS = "gpt_oss_20b/qlora,qwen3_30b_a3b/qlora,qwen3_8b/qlora,llama3_2_3b/full,gemma4_26b_a4b/qlora"
COLUMNS = ["preset", "planned", "allocated", "planned reserved", "reserved", "planned step", "step", "tokens/s", "planned launches", "launches"]  # fmt: skip


def run(preset: str, folder: Path, timeout_seconds: float) -> dict[str, Any]:
    """The measured and the planned row of a preset, or why there is none."""
    from lean_ft.settings.text import preset_recipe
    from lean_ft.system.catalog import find_preset

    model = write_model_folder(preset.partition("/")[0], folder / preset / "model", EMBEDDED_MODEL)
    own = [f"model.path={model}", f"output_dir={folder / preset / 'run'}"]
    command = [sys.executable, "-W", "ignore", STEPS, preset_recipe(find_preset(preset)), "--config", preset, *own]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    row: dict[str, Any] = {"label": preset, "commit": commit()}
    pipes: Any = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    locked, ends = environment | {"GPU_LOCK": str(folder / "lock")}, time.monotonic() + timeout_seconds
    running = [
        subprocess.Popen(command, env=locked, **pipes),
        subprocess.Popen([*command, "--plan"], env=environment, **pipes),
    ]
    for process in running:
        try:
            output, errors = process.communicate(timeout=max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            for one in running:
                one.kill()
            return {**row, "status": "timed out", "reason": f"took longer than {timeout_seconds:.0f} s"}
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            return {**row, "status": "failed", "reason": last_error(output + errors), "output": errors[-3000:]}
        row |= json.loads(lines[-1])
    row["launches"] = sum(
        count for name, (count, _) in row["kernels"].items() if not name.startswith(("Memcpy", "Memset"))
    )
    row["kernels"] = dict(sorted(row["kernels"].items(), key=lambda item: -item[1][1])[:25])
    return {**row, "step_seconds": min(row["seconds"]), "status": "ok", "reason": None}


def main(
    presets: Annotated[str, typer.Option(help="Names, comma-separated.")] = PRESETS,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one row in seconds.")] = 600,
    budget_seconds: Annotated[float | None, typer.Option(help="Time limit of all rows in seconds.")] = None,
    device: Annotated[str, typer.Option(help="Only cuda.")] = "cuda",
    results_dir: Path = RESULTS,
) -> None:
    """Compare plans with steps on a real GPU."""
    hardware, rows = require_hardware(device), {}
    limit = min(timeout_seconds, budget_seconds or timeout_seconds)
    with tempfile.TemporaryDirectory(prefix="lean_ft_presets_") as folder, ThreadPoolExecutor(8) as pool:
        names = presets.split(",")
        for done in as_completed([pool.submit(run, name, Path(folder), limit) for name in names]):
            row = done.result()
            rows[row["label"]] = row
            console.print(" | ".join(_cells(row)) + f" {row['reason'] or ''}", markup=False)
            shown = [rows[name] for name in names if name in rows]
            path = write_result(
                "gpu_presets", benchmark="gpu_presets", hardware=hardware, settings={}, rows=shown, folder=results_dir
            )
    print_result(path, describe, COLUMNS, table_cells)


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        "presets on a real GPU with random weights, each row one document of the longest length: memory as PyTorch's allocator counts it in step 3, "
        "the fastest of four steps, and launches by PyTorch's profiler, next to the plan"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [_cells(row) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return [row["label"], row["status"], *["-"] * (len(COLUMNS) - 2)]
    memory = [
        gibibytes(row[name])
        for name in ("predicted_bytes", "allocated_bytes", "predicted_reserved_bytes", "reserved_bytes")
    ]
    seconds = [f"{row[name] * 1000:,.0f} ms" for name in ("predicted_seconds", "step_seconds")]
    speed = tokens_per_second(row["tokens"] / row["step_seconds"])
    return [row["label"], *memory, *seconds, speed, f"{row['predicted_launches']:,.0f}", f"{row['launches']:,}"]


if __name__ == "__main__":
    typer.run(main)
