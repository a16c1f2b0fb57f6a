"""Measure the workspace of every optimizer's update on a simulated GPU.

    make test-pretended-gpu                               # once: installs CUDA wheels and builds the simulated GPU
    .venv-pretended-gpu/bin/python benchmarks/pretended_updates.py

Each optimizer with each of its options updates one parameter of each shape of Llama-3.2-3B, as in backward. PyTorch's
CUDA allocator reports the peak, and Inductor compiles, but no kernel runs. It takes minutes and little memory. Writes
`results/pretended_updates_<hardware>.json`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
CARD = ROOT / "tests" / "pretended_gpu"
COLUMNS = ["optimizer", "state per parameter", "update workspace", "per element of a slice"]
VOCABULARY, HIDDEN, INNER, KEY_VALUE = 128_256, 3072, 8192, 1024
RULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sgd", "adafactor", "muon", "apollo_mini", "adamw_8bit_torchao"), ("stochastic_rounding",)),
    **dict.fromkeys(("adamw", "adamw_8bit", "adamw_4bit"), ("stochastic_rounding", "update_clipping")),
    "paged_adamw_8bit": (),
}


def main() -> None:
    """Measure every optimizer in a process on the simulated GPU."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from results import RESULTS, console, describe_hardware, print_result, write_result

    if not (CARD / "build" / "libcuda.so.1").exists():
        console.print(
            f"{CARD.relative_to(ROOT)} is not built: run `make test-pretended-gpu`. Nothing was run.", markup=False
        )
        raise typer.Exit(0)
    environment = {**os.environ, "PRETENDED_GPU": "A100", "PRETENDED_GPU_TOUCH": "65536", "PYTHONPATH": str(ROOT)}
    command = [str(CARD / "run.sh"), sys.executable, "-W", "ignore", str(Path(__file__)), "--measure"]
    rows = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                console.print(" | ".join(_cells(rows[-1])), markup=False)
    if process.returncode:
        raise typer.Exit(1)
    path = write_result(
        "pretended_updates",
        benchmark="pretended_updates",
        hardware=describe_hardware("cpu"),
        settings={"shape": "llama3_2_3b", "card": "A100"},
        rows=rows,
        folder=RESULTS,
    )
    print_result(path, describe, COLUMNS, table_cells)


def measure() -> None:
    """Prints a row for each rule and option."""
    sys.path.insert(0, str(ROOT))
    from lean_ft.system.before_torch import prepare_torch

    prepare_torch()
    import torch
    from torch import nn

    from lean_ft.optim import build_optimizer
    from lean_ft.optim.slices import GPU_COMPILED_SLICE
    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_recipe, load_recipe

    config = load_recipe(find_recipe("full_finetune_single_device")).Config
    with torch.device("cuda"):
        parts = [nn.Linear(HIDDEN, n, bias=False) for n in (HIDDEN, KEY_VALUE, INNER)]
        parts += [nn.Linear(INNER, HIDDEN, bias=False), nn.Embedding(VOCABULARY, HIDDEN), nn.RMSNorm(HIDDEN)]
        model = nn.ModuleList(parts).bfloat16()
    for name, options in RULES.items():
        for chosen in ((), *((option,) for option in options)):
            torch._dynamo.reset()
            with tempfile.TemporaryDirectory() as folder:
                own = [f"output_dir={folder}", "data.source=not-read", "model.path=tiny", "model.dtype=bfloat16"]
                own += ["compile=true", "optimizer.in_backward=true", f"optimizer.name={name}"]
                cfg = load_config(config, None, [*own, *(f"optimizer.{option}=true" for option in chosen)])
            optimizer, largest = build_optimizer(model, cfg), 0
            for state in optimizer.states:
                state.whole.grad = torch.empty_like(state.param)
                for _ in range(2):  # the first update compiles
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    optimizer.apply_rules([state])
                    taken = torch.cuda.max_memory_allocated() - before
                largest = max(largest, taken)
                state.whole.grad = None
            num_elements = sum(state.param.numel() for state in optimizer.states)
            label = ", ".join([name, *(option.replace("_", " ") for option in chosen)])
            row: dict[str, Any] = {
                "label": label,
                "status": "ok",
                "update_bytes": largest,
                "slice_elements": GPU_COMPILED_SLICE,
            }
            print(json.dumps({**row, "state_bytes_per_parameter": optimizer.state_bytes / num_elements}), flush=True)
            del optimizer, state
    os._exit(0)  # skip the exit handlers of CUDA libraries, which a simulated GPU does not support


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        "allocations of PyTorch's CUDA build on a simulated GPU, where no kernel runs: peak workspace of one update "
        "over the parameter shapes of Llama-3.2-3B in bfloat16 (the largest, the embedding, has 394 million "
        "elements), without weights, gradients and state"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [_cells(row) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> list[str]:
    taken, elements = row["update_bytes"], row["slice_elements"]
    return [
        row["label"],
        f"{row['state_bytes_per_parameter']:.2f} bytes",
        f"{taken / 2**20:.1f} MiB",
        f"{taken / elements:.1f} bytes",
    ]


if __name__ == "__main__":
    measure() if "--measure" in sys.argv else typer.run(main)
