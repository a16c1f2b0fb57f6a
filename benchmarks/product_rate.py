"""How fast the machine multiplies matrices at this moment, in bfloat16.

    python benchmarks/product_rate.py

On a CPU most of a training step is matrix products, and what a shared machine gives to them changes from hour to hour; a
comparison that names the rate can be told from one of another hour.
"""

import sys
from typing import Annotated

import torch
import typer
from timing import measure_calls

ROWS, INPUTS, OUTPUTS = 1024, 1024, 4096


def product_rate(device: torch.device, *, repeats: int = 8) -> float:
    """Floating-point operations a second of (1024, 1024) by (1024, 4096), the best of `repeats`."""
    x = torch.ones(ROWS, INPUTS, dtype=torch.bfloat16, device=device)
    weight = torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16, device=device)
    out = torch.empty(ROWS, OUTPUTS, dtype=torch.bfloat16, device=device)
    timing = measure_calls(lambda: torch.mm(x, weight.t(), out=out), device, repeats=repeats)
    return 2 * ROWS * INPUTS * OUTPUTS / min(timing.all_seconds)


def command(device: str) -> list[str]:
    """The rate by a process of its own, so that the caller needs neither the memory nor the threads."""
    return [sys.executable, __file__, "--device", device]


def main(
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed products.")] = 8,
) -> None:
    """Prints the rate in GFLOP/s."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{product_rate(torch.device(device), repeats=repeats) / 1e9:.0f}")


if __name__ == "__main__":
    typer.run(main)
