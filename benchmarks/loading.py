"""Measure peak memory of loading, saving and exporting a model relative to its weights, each in a new process.

    python benchmarks/loading.py --shape llama3_2_3b
    python benchmarks/loading.py --shape llama3_1_8b --folder /a/disk/with/room   # 16 GB, and 16 GB more for the export

Writes a folder of random bfloat16 weights (`save`), loads it and exports it. The peak is the process's largest resident
size (VmHWM), with Python and torch, whose own size is `before`.

Writes `results/loading_<shape>_<hardware>.json`.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import available_bytes, run_measured
from results import RESULTS, gibibytes, print_result, require_hardware, write_result
from shapes import num_parameters, write_model_folder

LABELS = {"save": "build and save", "load": "load", "export": "export and read back"}
RESERVE_BYTES = 2**30  # for the process and the machine, in addition to the model


# In the process that is measured --------------------------------------------------------------------------------------


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def work(act: str, folder: Path, report: Path) -> None:
    """Run one operation of `LABELS` and write its cost."""
    import torch

    from lean_ft.export import export_folder
    from lean_ft.models import load_model, save_model

    before, started = peak_bytes(), time.perf_counter()
    if act == "export":
        export_folder(folder / "model", folder / "exported")
    else:
        model = load_model(folder / "model", dtype=torch.bfloat16, random_init=act == "save")
        if act == "save":
            save_model(model, folder / "model")
    seconds = time.perf_counter() - started
    report.write_text(json.dumps({"before_bytes": before, "peak_bytes": peak_bytes(), "seconds": seconds}))


# In the process that compares -----------------------------------------------------------------------------------------

COLUMNS = ["operation", "weights", "peak memory", "peak / weights", "memory before", "time"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return f"{settings['shape']} ({settings['parameters']:,} parameters, bfloat16, random weights) on a CPU"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    weights = result["settings"]["weight_bytes"]
    cells = []
    for row in result["rows"]:
        numbers = ["-"] * 4
        if row["status"] == "ok":
            numbers = [gibibytes(row["peak_bytes"]), f"{row['ratio']:.3f}", gibibytes(row["before_bytes"])]
            numbers.append(f"{row['seconds']:.1f} s")
        cells.append([row["label"], gibibytes(weights), *numbers])
    return cells


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "llama3_2_1b",
    folder: Annotated[Path | None, typer.Option(help="Folder for temporary weights.")] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one side in seconds.")] = 900.0,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print the table and write the result."""
    if worker is not None:
        assert folder is not None and report is not None
        work(worker, folder, report)
        return
    hardware = require_hardware("cpu")
    weight_bytes = 2 * num_parameters(shape)
    available = available_bytes()
    if available is not None and available < weight_bytes + RESERVE_BYTES:
        raise typer.BadParameter(
            f"needs {gibibytes(weight_bytes + RESERVE_BYTES)} of memory, {gibibytes(available)} is left"
        )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lean_ft_loading_", dir=folder) as place:
        free = shutil.disk_usage(place).free
        if free < 2 * weight_bytes + RESERVE_BYTES:
            raise typer.BadParameter(
                f"{place} has {gibibytes(free)} free; needs {gibibytes(2 * weight_bytes)}. Set --folder."
            )
        write_model_folder(shape, Path(place) / "model")
        for act, label in LABELS.items():
            answer = Path(place) / f"{act}.json"
            command = [sys.executable, __file__, "--worker", act, "--folder", place, "--report", answer]
            measured = run_measured(command, timeout_seconds=timeout_seconds)
            row: dict[str, Any] = {"label": label, "status": measured.status, "reason": measured.reason}
            if measured.status == "ok":
                row |= json.loads(answer.read_text())
                row["ratio"] = row["peak_bytes"] / weight_bytes
            rows.append(row)
    settings = {"shape": shape, "parameters": num_parameters(shape), "weight_bytes": weight_bytes}
    path = write_result(
        f"loading_{shape}", benchmark="loading", hardware=hardware, settings=settings, rows=rows, folder=results_dir
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
