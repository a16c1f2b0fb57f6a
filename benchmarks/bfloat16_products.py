"""Compare bfloat16 on a CPU without bfloat16 instructions: products in float32, PyTorch's kernels, and a float32 model.

    python benchmarks/bfloat16_products.py                   # SmolLM2 135M's shape, some minutes
    python benchmarks/bfloat16_products.py --shape tiny      # a quick trial

Each side is a new process with random weights. It trains (AdamW, selective checkpointing), eager and compiled, and
generates. On a CPU with bfloat16 instructions, they are disabled for all sides. Ratios use CPU time, because other
processes affect it less than wall time.

Writes `results/bfloat16_products_<shape>_<batch>x<length>_<hardware>.json`.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, measure_contestants, overrides
from results import RESULTS, gibibytes, print_result, require_hardware, write_result
from shapes import write_model_folder

LABELS = {
    "float32": "float32 model",
    "bfloat16": "bfloat16 model, products in float32",
    "pytorch": "bfloat16 model, PyTorch's kernels",
}
WITHOUT_INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def work(kind: str, shape: str, batch_size: int, length: int, new_tokens: int, repeats: int, report: Path) -> None:
    """Measure one side and write the report."""
    os.environ.update(WITHOUT_INSTRUCTIONS)
    import torch
    from timing import measure_calls, resident_bytes

    from lean_ft.data import Batch
    from lean_ft.generation import Sampling, sample
    from lean_ft.losses import CrossEntropy
    from lean_ft.memory import apply_memory
    from lean_ft.models import load_model
    from lean_ft.models.float32_products import use_float32_products
    from lean_ft.optim import build_optimizer
    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_recipe, load_recipe

    held_bytes = resident_bytes()
    row: dict[str, Any] = {"status": "ok", "reason": None}
    with tempfile.TemporaryDirectory() as place:
        settings = {
            "model.path": write_model_folder(shape, Path(place) / "model"),
            "model.random_init": True,
            "model.dtype": "float32" if kind == "float32" else "bfloat16",
            "optimizer.name": "adamw",
            "memory.activation_checkpointing": "selective",
            "data.source": "tiny/train.jsonl",
            "output_dir": Path(place) / "run",
        }
        for step_kind, compile in (("eager", False), ("compiled", True)):
            cfg = load_config(load_recipe(find_recipe("finetune")).Config, None, overrides(settings))
            torch.manual_seed(0)
            model = load_model(cfg.model, "cpu")
            use_float32_products([torch.bfloat16] if kind == "bfloat16" else [])
            apply_memory(model, cfg.memory, compile=compile)
            optimizer, cross_entropy = build_optimizer(model, cfg), CrossEntropy(model, cfg)
            ids = torch.randint(model.config.vocab_size, (batch_size, length))
            positions = torch.arange(length).expand(batch_size, -1)
            inputs = {"input_ids": ids, "positions": positions}
            batch = Batch(inputs, ids.roll(-1, 1), num_targets=ids.numel(), num_tokens=ids.numel())

            def step(model=model, optimizer=optimizer, cross_entropy=cross_entropy, batch=batch) -> None:
                optimizer.set_lr(1e-5)
                (cross_entropy(model, batch) / batch.num_targets).backward()
                optimizer.finish_gradients(max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()

            timing = measure_calls(step, torch.device("cpu"), repeats=repeats)
            extra_bytes = None if timing.extra_bytes is None else timing.extra_bytes + resident_bytes() - held_bytes
            row[step_kind] = {**timing._asdict(), "held_bytes": extra_bytes}
            if compile:
                continue
            prompts = [ids[0, :64].tolist()] * 2
            seconds = []
            for _ in range(repeats + 1):
                started = time.process_time()
                sample(model, prompts, Sampling(new_tokens, 0.0))
                seconds.append(time.process_time() - started)
            row["generation_cpu_seconds"] = statistics.median(seconds[1:])
            del model, optimizer, cross_entropy, step
    report.write_text(json.dumps(row))


COLUMNS = ["model", "step", "compiled step", "step memory", "compiled step memory", "generation"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    s = result["settings"]
    return (
        f"full fine-tuning of {s['shape']} with AdamW, {s['batch_size']} x {s['length']} tokens; generation of "
        f"{s['new_tokens']} tokens for 2 prompts of 64 tokens; CPU time, median of {s['repeats']} calls, in "
        "parentheses relative to the float32 model; memory excludes Python and PyTorch"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table. Ratios are relative to the float32 model."""
    first = next((row for row in result["rows"] if row["name"] == "float32"), {"status": "not run"})
    cells = []
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], "-", "-", "-", "-"])
            continue

        def told(seconds: float, of_first: float | None) -> str:
            return f"{seconds:.2f} s" + ("" if of_first is None else f" ({seconds / of_first:.2f}x)")

        compared = first["status"] == "ok" and row is not first
        cells.append(
            [
                row["label"],
                *(
                    told(row[kind]["cpu_seconds"], first[kind]["cpu_seconds"] if compared else None)
                    for kind in ("eager", "compiled")
                ),
                *(gibibytes(row[kind]["held_bytes"]) for kind in ("eager", "compiled")),
                told(row["generation_cpu_seconds"], first["generation_cpu_seconds"] if compared else None),
            ]
        )
    return cells


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "smollm2_135m",
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 32,
    repeats: Annotated[int, typer.Option(help="Timed calls; the median is reported.")] = 3,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one side in seconds.")] = 1800,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare time and memory of the three sides."""
    if worker and report is not None:
        work(worker, shape, batch_size, length, new_tokens, repeats, report)
        return
    settings = {
        "shape": shape,
        "batch_size": batch_size,
        "length": length,
        "new_tokens": new_tokens,
        "repeats": repeats,
    }
    arguments = [str(part) for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    path = write_result(
        f"bfloat16_products_{shape}_{batch_size}x{length}",
        benchmark="bfloat16_products",
        hardware=require_hardware("cpu"),
        settings=settings,
        rows=measure_contestants(__file__, LABELS, arguments, Budget(timeout_seconds)),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
