"""Measure the current rate of bfloat16 matrix products.

    python benchmarks/product_rate.py

On a CPU, matrix products dominate a training step, and their speed on a shared machine changes from hour to hour.
Benchmarks record the rate so that results from different hours can be compared.
"""

import sys
from typing import Annotated

import torch
import typer
from timing import measure_calls

INPUTS, OUTPUTS = 1024, 4096


def product_rate(device: torch.device, *, rows: int = 1024, repeats: int = 8) -> float:
    """Floating-point operations per second of (rows, 1024) by (1024, 4096); the best of `repeats`."""
    x = torch.ones(rows, INPUTS, dtype=torch.bfloat16, device=device)
    weight = torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, OUTPUTS, dtype=torch.bfloat16, device=device)
    timing = measure_calls(lambda: torch.mm(x, weight.t(), out=out), device, repeats=repeats)
    return 2 * rows * INPUTS * OUTPUTS / min(timing.all_seconds)


def command(device: str) -> list[str]:
    """The command that prints the rate, for a separate process with its own memory and threads."""
    return [sys.executable, __file__, "--device", device]


def main(
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    rows: Annotated[int, typer.Option(help="Rows of the left matrix.")] = 1024,
    repeats: Annotated[int, typer.Option(help="Timed products.")] = 8,
) -> None:
    """Print the rate in GFLOP/s."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{product_rate(torch.device(device), rows=rows, repeats=repeats) / 1e9:.0f}")


if __name__ == "__main__":
    typer.run(main)
