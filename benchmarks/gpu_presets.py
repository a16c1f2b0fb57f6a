"""Run a few steps of presets on a real GPU with random weights, and compare memory, launches and time with the plan.

    python benchmarks/gpu_presets.py
    python benchmarks/gpu_presets.py --presets gpt_oss_20b/qlora,llama3_2_3b/full
    python benchmarks/gpu_presets.py --predict benchmarks/results/gpu_presets_nvidia-h200.json    # needs no GPU

Each row of a batch is one document of the maximum length, as in a plan, so attention is at its largest. Models of
several processes are made, planned and compiled side by side. When all have done so, their timed and profiled steps run
one process at a time, with nothing beside them. Nothing is downloaded.

`--predict` keeps the measured numbers of a result and plans its presets again for its card.

Writes `results/gpu_presets_<hardware>.json`, or another name (`--results-name`), after every row.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import ROOT, end_with_parent, last_error
from results import (
    RESULTS,
    Hardware,
    commit,
    console,
    gibibytes,
    print_result,
    require_hardware,
    tokens_per_second,
    versions,
    write_result,
)
from shapes import EMBEDDED_MODEL, write_model_folder

STEPS = ROOT / "benchmarks" / "pretended_steps.py"
PRESETS = "gpt_oss_20b/qlora,qwen3_30b_a3b/qlora,qwen3_8b/qlora,llama3_2_3b/full,gemma4_26b_a4b/qlora"
COLUMNS = ["preset", "planned allocated", "allocated", "planned reserved", "reserved", "planned step", "step"]
COLUMNS += ["with today's kernels", "tokens/s", "planned launches", "launches"]
# Kernels that newer ones of lean_ft replaced after the first steps were measured, by a part of their names -> the
# operation of gpu_kernels.py that has the times of both.
REPLACED = {
    "kDequantizeBlockwise": "expand: NF4, 64 x 1,536 x 2,048",
    "EmbeddingBag_updateOutputKernel_sum_mean": "sums: 4,096 x 8 x 2,048",
}


def start(preset: str, folder: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    """Start the steps of a preset, or its plan."""
    from lean_ft.settings.text import preset_recipe
    from lean_ft.system.catalog import find_preset

    model = write_model_folder(preset.partition("/")[0], folder / preset / "model", EMBEDDED_MODEL)
    own = [f"model.path={model}", f"output_dir={folder / preset / 'run'}"]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", STEPS, preset_recipe(find_preset(preset)), "--config", preset, *own, *more],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
    )


class Compilations:
    """The processes of all presets. Their timed steps begin when the last of them has compiled, planned or ended."""

    def __init__(self, folder: Path, num_presets: int) -> None:
        self.lock, self._num_presets = folder / "lock", num_presets
        self._steps: list[subprocess.Popen[str]] = []
        self._plans: list[subprocess.Popen[str]] = []

    def start(self, preset: str, folder: Path) -> list[subprocess.Popen[str]]:
        """Start the steps of a preset, and its plan."""
        running = [start(preset, folder, GPU_LOCK=str(self.lock)), start(preset, folder, "--plan")]
        self._plans.append(running[1])
        self._steps.append(running[0])
        return running

    def are_over(self) -> bool:
        compiled = [Path(f"{self.lock}.{process.pid}").exists() or _ended(process) for process in self._steps]
        return len(compiled) == self._num_presets and all(compiled) and all(map(_ended, self._plans))

    def release(self) -> None:
        """Wait for them, then let the timed steps begin."""
        while not self.are_over():
            time.sleep(0.2)
        Path(f"{self.lock}.go").touch()


def _ended(process: subprocess.Popen[str]) -> bool:
    return process.poll() is not None


def run(preset: str, folder: Path, timeout_seconds: float, compilations: Compilations) -> dict[str, Any]:
    """The measured and the planned row of a preset, or why there is none."""
    row: dict[str, Any] = {"label": preset, "commit": commit()}
    ends = time.monotonic() + timeout_seconds
    running = compilations.start(preset, folder)
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


def predict_again(file: Path) -> None:
    """Replace the planned numbers of a result, for its card."""
    from lean_ft.plan.devices import DEVICES

    result = json.loads(file.read_text(encoding="utf-8"))
    name = result["hardware"]["gpu"]["name"]
    card = max((known for known in DEVICES if known.replace(" ", "") in name.replace(" ", "")), key=len, default=name)
    with tempfile.TemporaryDirectory(prefix="lean_ft_presets_") as folder:
        for row in result["rows"]:
            if row["status"] == "ok":
                process = start(row["label"], Path(folder), "--plan", "--card", card)
                output, errors = process.communicate()
                if process.returncode:
                    raise RuntimeError(f"{row['label']}: {last_error(output + errors)}")
                row |= json.loads(output.splitlines()[-1])
    result["planned"] = {"commit": commit(), "torch": versions()["torch"]}
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main(
    presets: Annotated[str, typer.Option(help="Names, comma-separated.")] = PRESETS,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one row in seconds.")] = 600,
    budget_seconds: Annotated[float | None, typer.Option(help="Time limit of all rows in seconds.")] = None,
    predict: Annotated[
        Path | None, typer.Option(help="A result: keep its measured numbers and plan again, on any machine.")
    ] = None,
    device: Annotated[str, typer.Option(help="Only cuda.")] = "cuda",
    results_name: Annotated[str, typer.Option(help="Start of the result's file name.")] = "gpu_presets",
    results_dir: Path = RESULTS,
) -> None:
    """Compare plans with steps on a real GPU."""
    if predict is not None:
        predict_again(predict)
        print_result(predict, describe, COLUMNS, table_cells)
        for label, (fixed, error) in left_out_errors(json.loads(predict.read_text(encoding="utf-8"))).items():
            console.print(f"{label}: {fixed * 1e6:.1f} us per kernel fit the others; its plan is then {error:+.1%} off")
        return
    from lean_ft.system.catalog import find_preset

    hardware, rows = require_hardware(device), {}
    if hardware["device"] != "cuda":
        console.print("These presets run on a GPU only; nothing was measured.")
        return
    limit = min(timeout_seconds, budget_seconds or timeout_seconds)
    names = presets.split(",")
    for name in names:
        find_preset(name)  # raises for an unknown name
    with tempfile.TemporaryDirectory(prefix="lean_ft_presets_") as folder, ThreadPoolExecutor(len(names)) as pool:
        compilations = Compilations(Path(folder), len(names))
        threading.Thread(target=compilations.release, daemon=True).start()
        for done in as_completed([pool.submit(run, name, Path(folder), limit, compilations) for name in names]):
            row = done.result()
            rows[row["label"]] = row
            console.print(" | ".join(_cells(row, {})) + f" {row['reason'] or ''}", markup=False)
            shown = [rows[name] for name in names if name in rows]
            path = write_result(
                results_name, benchmark="gpu_presets", hardware=hardware, settings={}, rows=shown, folder=results_dir
            )
    print_result(path, describe, COLUMNS, table_cells)


def kernel_times(result: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of operations on the same hardware, by kernel; empty if gpu_kernels.py has not run there."""
    file = RESULTS / f"gpu_kernels_{Hardware(result['hardware']).slug}.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return {row["label"]: row["milliseconds"] for row in rows}


def seconds_with_todays_kernels(row: dict[str, Any], times: dict[str, dict[str, list[float]]]) -> float:
    """The measured step, less the time that newer kernels save."""
    saved = 0.0
    for name, (_, seconds) in row["kernels"].items():
        for part, label in REPLACED.items():
            if part in name and label in times:
                saved += seconds * (1 - times[label]["own"][0] / times[label]["library"][0])
    return row["step_seconds"] - saved


def left_out_errors(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """For each preset, fit the time per kernel to the steps of the others. Returns that time in seconds, and the error
    of the preset's own plan with it."""
    from lean_ft.plan.devices import FIXED_SECONDS

    times = kernel_times(result)
    rows = {row["label"]: row for row in result["rows"] if row["status"] == "ok"}

    def error(label: str, fixed: float) -> float:
        row = rows[label]
        plan = row["predicted_seconds"] + (fixed - FIXED_SECONDS) * row["predicted_launches"]
        return plan / seconds_with_todays_kernels(row, times) - 1

    found = {}
    for label in rows:
        others = [other for other in rows if other != label]
        fitted = min((tenths * 1e-7 for tenths in range(200)), key=lambda x: sum(error(one, x) ** 2 for one in others))
        found[label] = fitted, error(label, fitted)
    return found


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    plan = "the plan"
    if "planned" in result:
        plan += f" of commit {result['planned']['commit']} with torch {result['planned']['torch']}"
    return (
        "presets on a real GPU with random weights, each row one document of the longest length: memory as PyTorch's "
        f"allocator counts it in step 3, the fastest of four steps, that step less what newer kernels save, and "
        f"launches by PyTorch's profiler, next to {plan}"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    times = kernel_times(result)
    return [_cells(row, times) for row in result["rows"]]


def _cells(row: dict[str, Any], times: dict[str, dict[str, list[float]]]) -> list[str]:
    if row["status"] != "ok":
        return [row["label"], row["status"], *["-"] * (len(COLUMNS) - 2)]
    memory = [
        gibibytes(row[name])
        for name in ("predicted_bytes", "allocated_bytes", "predicted_reserved_bytes", "reserved_bytes")
    ]
    each = row["predicted_seconds"], row["step_seconds"], seconds_with_todays_kernels(row, times)
    seconds = [f"{one * 1000:,.0f} ms" for one in each]
    speed = tokens_per_second(row["tokens"] / row["step_seconds"])
    return [row["label"], *memory, *seconds, speed, f"{row['predicted_launches']:,.0f}", f"{row['launches']:,}"]


if __name__ == "__main__":
    typer.run(main)
