"""Count the machine instructions per parameter of the 8-bit AdamW kernel on five GPU architectures.

    tests/pretended_gpu/run.sh python benchmarks/kernel_instructions.py

Triton compiles the kernel for each architecture, on a simulated or a real card, and cuobjdump disassembles it. The
kernel has no loop, so its instructions divided by the parameters of a thread are those per parameter. No kernel runs.

Writes `results/kernel_instructions_<hardware>.json`.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer
from kernel_resources import LIMITS, Kernel, resources
from results import RESULTS, describe_hardware, print_result, write_result

COLUMNS = ["update", "bytes read and written", *(f"sm_{capability}" for capability in LIMITS)]
# (label, dtype of the weights, stochastic rounding, update clipping)
UPDATES = (
    ("bfloat16, stochastic rounding", "bfloat16", True, False),
    ("bfloat16, stochastic rounding, update clipping", "bfloat16", True, True),
    ("bfloat16, update clipping", "bfloat16", False, True),
    ("float32, update clipping", "float32", False, True),
)


def update_kernel(dtype: str, is_random: bool, clips: bool) -> Kernel:
    """The kernel of an update, for weights of whole programs."""
    import torch
    from triton.runtime.jit import JITFunction

    from lean_ft.optim import adamw_8bit_kernel
    from lean_ft.optim.adamw import Scalars

    launched: list[Any] = []
    run, num_elements = JITFunction.run, 2**20
    weight = torch.zeros(num_elements, dtype=getattr(torch, dtype), device="cuda")
    codes = torch.zeros(num_elements, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(num_elements // 256, device="cuda")
    tables = torch.zeros(512, device="cuda"), torch.zeros(2**15 + 2**16, dtype=torch.int32, device="cuda")
    step = Scalars(scales[0] if clips else 1e-3, *[0.5] * (len(Scalars._fields) - 1))
    with mock.patch.object(JITFunction, "run", lambda *args, **kwargs: launched.append(run(*args, **kwargs))):
        tensors = [weight, weight, codes, scales, codes, scales]
        adamw_8bit_kernel.update(tensors, tables, step, (1, 2) if is_random else None)
    (kernel,) = launched
    return Kernel(kernel.src, {"num_warps": kernel.metadata.num_warps})


def instructions(kernel: Kernel, capability: int) -> int:
    """The machine instructions of a kernel on an architecture, without the padding after its end."""
    import triton
    from triton.backends.compiler import GPUTarget

    binary = triton.compile(kernel.source, target=GPUTarget("cuda", capability, 32), options=kernel.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        said = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(\S.*?) ?;", said, re.M)
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/.*\bBRA (?:0x)?([0-9a-f]+)\b", said)
    assert found and all(int(place, 16) <= int(target, 16) for place, target in branches), "a loop runs several times"
    return sum(not text.startswith("NOP") for text in found)


def measure_updates() -> list[dict[str, Any]]:
    """One row per update: instructions per parameter and resources on each architecture."""
    from lean_ft.optim.adamw_8bit_kernel import BLOCKS

    rows = []
    for label, dtype, is_random, clips in UPDATES:
        kernel, found = update_kernel(dtype, is_random, clips), {}
        for capability in LIMITS:
            (taken,) = resources([kernel], capability)
            per_thread = 256 * BLOCKS / (32 * taken["warps"])
            found[str(capability)] = {**taken, "instructions": instructions(kernel, capability) / per_thread}
        # Weights are read and written, gradients are read; codes and scales of two moments are read and written.
        itemsize = 4 if dtype == "float32" else 2
        num_bytes = 3 * itemsize + 2 * 2 * (1 + 4 / 256)
        rows.append({"label": label, "status": "ok", "bytes_per_parameter": num_bytes, "architectures": found})
    return rows


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        "machine instructions per parameter of the 8-bit AdamW kernel, its registers per thread, and the share of a "
        f"multiprocessor's warps that can run at once; counted in the code of Triton {result['versions']['triton']} "
        "and its ptxas, not timed"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """One row per update."""
    return [
        [
            row["label"],
            f"{row['bytes_per_parameter']:.2f}",
            *(
                f"{x['instructions']:.1f}, {x['registers']}, {x['occupancy']:.0%}"
                for x in row["architectures"].values()
            ),
        ]
        for row in result["rows"]
    ]


def main(
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Count the instructions of each update on each architecture."""
    path = write_result(
        "kernel_instructions",
        benchmark="kernel_instructions",
        hardware=describe_hardware("cpu"),
        settings={},
        rows=measure_updates(),
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)
    os._exit(0)  # skip the exit handlers of CUDA libraries, which a simulated GPU does not support


if __name__ == "__main__":
    typer.run(main)
