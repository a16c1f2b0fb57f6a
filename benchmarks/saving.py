"""Measure the cost of a checkpoint: saved synchronously, or in the background from a copy in host memory.

    python benchmarks/saving.py --shape qwen2_5_0_5b

One process trains a model with random weights on random tokens (8-bit AdamW in backward, selective checkpointing,
bfloat16) and saves as `Run` does, with checksums and fsync. It measures plain steps, a synchronous save, and steps
during a background save. The cost at one save per 20 steps is the time of the copy plus the slowdown, divided by 20
plain steps.

Writes `results/saving_<shape>_<hardware>.json`.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from measure import run_measured
from results import RESULTS, gibibytes, print_result, require_hardware, write_result
from shapes import num_parameters, write_model_folder

STEPS_A_SAVE = 20
COLUMNS = [
    "checkpoint mode",
    "training stalls for",
    "added to concurrent steps",
    "cost at one save per 20 steps",
    "additional memory",
]


def work(folder: Path, batch_size: int, length: int, rounds: int, report: Path) -> None:
    """The measured process; times in seconds."""
    import torch

    from lean_ft.losses import linear_cross_entropy
    from lean_ft.memory import apply_memory
    from lean_ft.memory.host_memory import return_freed_memory
    from lean_ft.models import load_model
    from lean_ft.optim import build_optimizer
    from lean_ft.settings import MemoryConfig, ModelConfig, OptimizerConfig
    from lean_ft.tokenizers import load_tokenizer
    from lean_ft.training.checkpoint import CheckpointState, weight_parts, write_checkpoint
    from lean_ft.training.checkpoints import BackgroundWriter, host_copies

    return_freed_memory()
    torch.manual_seed(0)
    model = load_model(folder / "model", dtype=torch.bfloat16, random_init=True)
    tokenizer = load_tokenizer(folder / "model")
    apply_memory(model, MemoryConfig(activation_checkpointing="selective"), compile=False)
    cfg: Any = SimpleNamespace(
        model=ModelConfig(path=str(folder / "model")),
        optimizer=OptimizerConfig(name="adamw_8bit", in_backward=True),
        clip_grad_norm=None,
        compile=False,
    )
    optimizer = build_optimizer(model, cfg)
    ids = torch.randint(0, model.config.vocab_size, (batch_size, length))
    labels = ids.roll(-1, 1)
    positions = torch.arange(length).expand(batch_size, -1)

    def step() -> float:
        began = time.perf_counter()
        optimizer.set_lr(1e-6)
        hidden = model(ids, positions, return_hidden=True)
        loss = linear_cross_entropy(hidden, model.output_weight, labels, num_targets=ids.numel(), chunk_tokens=1024)
        optimizer.scale(loss / ids.numel(), last=True).backward()
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    saved = iter(range(1, 1000))

    def save(weights: Any, state: Any) -> float:
        began = time.perf_counter()
        place = folder / "run"
        contents = CheckpointState({}, random={}, optimizer=state, weights=weights)
        write_checkpoint(place, next(saved), model, tokenizer, contents)
        return time.perf_counter() - began

    step()  # the first step allocates and compiles
    plain, waited, copied, beside, written = [], [], [], [], []
    writer = BackgroundWriter()
    for _ in range(rounds):
        plain.append(step())
        waited.append(save(None, optimizer.state_parts()))
        plain.append(step())
        began = time.perf_counter()
        copy, state = host_copies(weight_parts(model)), host_copies(optimizer.state_parts())
        copied.append(time.perf_counter() - began)
        writer.start(lambda copy=copy, state=state: written.append(save(copy, state)))
        extra = 0.0
        while writer.is_writing:
            extra += step() - statistics.median(plain)
        writer.wait()
        beside.append(extra)
    copy_bytes = sum(part.values.nbytes for part in (*copy.values(), *state.values()))
    times = {"plain": plain, "waited": waited, "copied": copied, "beside": beside, "written": written}
    report.write_text(json.dumps({**times, "copy_bytes": copy_bytes}))


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"{settings['shape']} ({settings['parameters']:,} parameters, bfloat16), 8-bit AdamW in backward, batch "
        f"{settings['batch_size']} x {settings['length']}, a step of {settings['step_seconds']:.1f} s"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            f"{row['stall_seconds']:.2f} s",
            f"{row['slower_seconds']:+.2f} s",
            f"{row['cost']:.2%}",
            gibibytes(row["copy_bytes"] or None),
        ]
        if row["status"] == "ok"
        else [row["label"], *["-"] * 4]
        for row in result["rows"]
    ]


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 1,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit in seconds.")] = 900.0,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print the table and write the result."""
    if worker is not None:
        work(worker, batch_size, length, rounds, worker / "report.json")
        return
    hardware = require_hardware("cpu")
    with tempfile.TemporaryDirectory(prefix="lean_ft_saving_") as place:
        folder = Path(place)
        write_model_folder(shape, folder / "model")
        (folder / "run").mkdir()
        command = [sys.executable, __file__, "--worker", place, "--batch-size", str(batch_size)]
        command += ["--length", str(length), "--rounds", str(rounds)]
        measured = run_measured(command, timeout_seconds=timeout_seconds)
        if measured.status != "ok":
            print(f"{measured.status}: {measured.reason}")
            raise typer.Exit(1)
        times = json.loads((folder / "report.json").read_text())
    step = statistics.median(times["plain"])
    rows = []
    for label, stall, slower, copy_bytes in (
        ("synchronous (default)", times["waited"], [0.0], 0),
        ("save_async", times["copied"], times["beside"], times["copy_bytes"]),
    ):
        row: dict[str, Any] = {"label": label, "status": "ok", "reason": None, "copy_bytes": copy_bytes}
        row |= {"stall_seconds": statistics.median(stall), "slower_seconds": statistics.median(slower)}
        row["cost"] = (row["stall_seconds"] + row["slower_seconds"]) / (STEPS_A_SAVE * step)
        rows.append(row)
    settings = {"shape": shape, "parameters": num_parameters(shape), "batch_size": batch_size, "length": length}
    path = write_result(
        f"saving_{shape}",
        benchmark="saving",
        hardware=hardware,
        settings={**settings, "step_seconds": step, "rounds": rounds},
        rows=rows,
        folder=results_dir,
        times=times,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
