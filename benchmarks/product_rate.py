"""How fast the machine multiplies matrices at this moment, in bfloat16.

    python benchmarks/product_rate.py

On a CPU a training step is matrix products and little else, and what a shared machine gives to them changes from hour to
hour; a comparison that names the rate can be told from one of another hour.
"""

import sys
import time
from typing import Annotated

import torch
import typer

ROWS, INPUTS, OUTPUTS = 4096, 1024, 4096


def product_rate(device: torch.device, *, repeats: int = 8) -> float:
    """Floating-point operations a second of (4096, 1024) by (1024, 4096), the best of `repeats`."""
    x = torch.ones(ROWS, INPUTS, dtype=torch.bfloat16, device=device)
    weight = torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16, device=device)
    out = torch.empty(ROWS, OUTPUTS, dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(1 + repeats):  # the first warms up
        started = time.perf_counter()
        torch.mm(x, weight.t(), out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * ROWS * INPUTS * OUTPUTS / min(seconds[1:])


def command(device: str) -> list[str]:
    """The rate by a process of its own, so that the caller needs neither the memory nor the threads."""
    return [sys.executable, __file__, "--device", device]


def main(device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto") -> None:
    """Prints the rate in GFLOP/s."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{product_rate(torch.device(device)) / 1e9:.0f}")


if __name__ == "__main__":
    typer.run(main)
