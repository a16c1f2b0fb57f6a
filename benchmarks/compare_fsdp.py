"""Compare lean_ft on two processes with PyTorch's `fully_shard` and DDP in a plain loop with AdamW.

    python benchmarks/compare_fsdp.py                          # Qwen2.5-0.5B, 1 x 512 per process, three rounds
    python benchmarks/compare_fsdp.py --shape tiny --length 64 --rounds 1

Both sides use bfloat16 and the same shape, batch and length, without checkpointing or compilation, on two CPU
processes. lean_ft runs `finetune` with its defaults and AdamW in backward; the peer is `fsdp_plain.py`. Step time is
the median of the counted steps; memory is the peak resident size of the larger process. The side that starts
alternates. Ratios are computed per round; the median is reported.

Writes `results/compare_fsdp_<shape>_<batch>x<length>_<hardware>.json`.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, measure_training, overrides
from results import RESULTS, console, gibibytes, print_result, require_hardware, tokens_per_second, write_result
from shapes import EMBEDDED_MODEL, num_parameters, write_model_folder, write_text_rows

PROCESSES = 2
LAYOUTS = {"FSDP": ({}, ()), "DDP": ({"parallel.replicate": PROCESSES}, ("--copies",))}
OURS: dict[str, Any] = {"optimizer.name": "adamw", "optimizer.in_backward": True}
COLUMNS = [
    "layout",
    "lean_ft: peak memory",
    "PyTorch: peak memory",
    "memory vs PyTorch",
    "lean_ft: tokens/s",
    "PyTorch: tokens/s",
    "speed vs PyTorch",
]


def ours_command(layout: str, model: Path, text: Path, run: Path, *, batch_size: int, length: int, steps: int) -> list:
    """`leanft run --nproc-per-node 2 finetune`."""
    settings = {
        "model.path": model,
        "model.random_init": True,
        "data.source": text,
        "data.max_length": length,
        "batch_size": batch_size,
        "gradient_accumulation_steps": PROCESSES,
        "max_steps": steps,
        "epochs": 100,
        "save_every": 0,
        "device": "cpu",
        "output_dir": run,
        **OURS,
        **LAYOUTS[layout][0],
    }
    return [
        sys.executable,
        "-m",
        "lean_ft",
        "run",
        "--nproc-per-node",
        str(PROCESSES),
        "finetune",
        *overrides(settings),
    ]


def torch_command(layout: str, model: Path, run: Path, *, batch_size: int, length: int, steps: int) -> list:
    """The plain loop under torchrun."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)),
        *(Path(__file__).with_name("fsdp_plain.py"), "--model-folder", model, "--run-directory", run),
        *("--batch-size", str(batch_size), "--length", str(length), "--steps", str(steps)),
        *LAYOUTS[layout][1],
    ]


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per layout: medians over the rounds, and ratios computed per round."""
    summary = []
    for layout in LAYOUTS:
        line: dict[str, Any] = {"label": layout, "status": "ok", "reason": None}
        pairs: dict[int, dict[str, Any]] = {}
        for row in (row for row in rows if row["layout"] == layout):
            if row["status"] != "ok":
                line |= {"status": row["status"], "reason": f"{row['side']}: {row['reason']}"}
            pairs.setdefault(row["round"], {})[row["side"]] = row
        if line["status"] == "ok":
            for key in ("peak_memory_bytes", "tokens_per_second"):
                for side in ("ours", "torch"):
                    line[f"{side}_{key}"] = statistics.median(pair[side][key] for pair in pairs.values())
                line[f"ratio_{key}"] = statistics.median(p["ours"][key] / p["torch"][key] for p in pairs.values())
        summary.append(line)
    return summary


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"full fine-tuning of {settings['shape']} ({settings['parameters']:,} parameters, random weights), {PROCESSES} "
        f"processes on one CPU with gloo, {settings['batch_size']} x {settings['length']} tokens each, bfloat16, "
        "AdamW; PyTorch: fully_shard or DDP with the model from transformers and a plain loop; median of "
        f"{settings['rounds']} alternating rounds of new processes, {settings['steps']} steps each"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            gibibytes(row.get("ours_peak_memory_bytes")),
            gibibytes(row.get("torch_peak_memory_bytes")),
            f"{row['ratio_peak_memory_bytes']:.2f}" if row["status"] == "ok" else "-",
            tokens_per_second(row.get("ours_tokens_per_second")),
            tokens_per_second(row.get("torch_tokens_per_second")),
            f"{row['ratio_tokens_per_second']:.2f}x" if row["status"] == "ok" else "-",
        ]
        for row in result["rows"]
    ]


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    batch_size: Annotated[int, typer.Option(help="Rows per step and process.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 3,
    steps: Annotated[int, typer.Option(help="Counted steps.")] = 3,
    warmup_steps: Annotated[int, typer.Option(help="Warm-up steps before the counted steps.")] = 2,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one run in seconds.")] = 1800,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Total time in seconds; remaining runs are skipped.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Compare speed and peak memory with PyTorch's own sharding."""
    hardware, budget = require_hardware("cpu"), Budget(timeout_seconds, budget_seconds)
    num_steps = warmup_steps + steps + 1  # one more step than needed, so that the run is stopped before it saves
    threads = str(max(1, (os.cpu_count() or 1) // PROCESSES))
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lean_ft_compare_fsdp_") as folder:
        model = write_model_folder(shape, Path(folder) / "model", EMBEDDED_MODEL)
        text = write_text_rows(Path(folder) / "text.jsonl", num_steps * batch_size * PROCESSES, length)
        common: dict[str, Any] = {"batch_size": batch_size, "length": length, "steps": num_steps}
        for layout in LAYOUTS:
            for turn in range(rounds):
                for side in ("ours", "torch") if turn % 2 == 0 else ("torch", "ours"):

                    def command(run: Path, side: str = side, layout: str = layout) -> list:
                        if side == "ours":
                            return ours_command(layout, model, text, run, **common)
                        return torch_command(layout, model, run, **common)

                    row = measure_training(
                        command,
                        steps=steps,
                        warmup_steps=warmup_steps,
                        tokens_per_step=PROCESSES * batch_size * length,
                        timeout_seconds=budget.timeout_seconds(),
                        environment={"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""},
                    )
                    measured.append({"side": side, "layout": layout, "round": turn, **row})
                    told = f"{row['tokens_per_second']:.1f} tokens/s" if row["status"] == "ok" else row["reason"]
                    console.print(f"{layout} round {turn + 1} {side}: {told}", markup=False)
    path = write_result(
        f"compare_fsdp_{shape}_{batch_size}x{length}",
        benchmark="compare_fsdp",
        hardware=hardware,
        settings={**common, "steps": steps, "shape": shape, "parameters": num_parameters(shape), "rounds": rounds}
        | {"ours": OURS, "warmup_steps": warmup_steps},
        rows=summarize(measured),
        measured=measured,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
