"""Compile Triton kernels for five GPU architectures, and report registers, spills, shared memory and occupancy.

    PRETENDED_GPU_TOUCH=65536 tests/pretended_gpu/run.sh python benchmarks/kernel_resources.py

The kernels are those of one training step: one layer of each shape with its output layer and optimizer, compiled by
Inductor on a simulated or a real card, the kernels of mixtures of experts (grouped products and the activation),
attention with all its rules, and recurrent layers. Each is compiled again for every architecture in `LIMITS`, in all
configurations that Inductor would try on this card. The numbers are ptxas's, which cuobjdump reads from the binary.
Occupancy is the share of an SM's warps that can run at once.

Source of the limits: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities".

Writes `results/kernel_resources_<hardware>.json`.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import typer
from results import RESULTS, console, describe_hardware, print_result, write_result
from shapes import write_model_folder

SHAPES = (
    "smollm2_135m",
    "qwen2_5_0_5b",
    "llama3_2_1b",
    "llama3_2_3b",
    "llama3_1_8b",
    "qwen3_4b",
    "gemma3_1b",
    "phi4_mini",
    "olmo2_7b",
    "mistral_7b",
)
MIXTURES, ATTENTION, RECURRENT = "mixtures of experts", "attention", "recurrent layers"
SETTINGS = (
    "model.random_init=true",
    "data.source=not-read.jsonl",
    "data.max_length=512",
    "batch_size=2",
    "optimizer.name=adamw_8bit",
    "optimizer.in_backward=true",
    "memory.activation_checkpointing=full",
    "compile=true",
    "plan=false",
    "device=cuda",
    "output_dir=not-written",
)


class Limits(NamedTuple):
    """What an SM has."""

    warps: int
    shared_bytes: int
    registers: int = 65536


LIMITS = {80: Limits(64, 164 * 1024), 89: Limits(48, 100 * 1024), 90: Limits(64, 228 * 1024)}
LIMITS |= {100: Limits(64, 228 * 1024), 120: Limits(48, 100 * 1024)}
_SHARED_PER_BLOCK = 1024  # that the driver takes


class Kernel(NamedTuple):
    """A kernel as given to Triton's compiler."""

    source: Any
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.source.fn.__name__


def training_kernels(shape: str) -> list[Kernel]:
    """Return the kernels that Inductor makes for one step of full fine-tuning with one layer of the shape."""
    import torch
    from pretended_steps import measure

    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_recipe, load_recipe

    found: list[Kernel] = []
    with tempfile.TemporaryDirectory(prefix="lean_ft_kernels_") as folder, _compiled(found):
        model = write_model_folder(shape, Path(folder))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        recipe = load_recipe(find_recipe("full_finetune_single_device"))
        measure(recipe, load_config(recipe.Config, None, [f"model.path={model}", *SETTINGS]))
    torch.compiler.reset()
    return found


class _compiled:
    """Context manager that adds each kernel given to Triton's compiler to a list."""

    def __init__(self, found: list[Kernel]) -> None:
        self._found = found

    def __enter__(self) -> None:
        import triton

        compile = triton.compile

        def noted(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
            self._found.append(Kernel(source, dict(options or {})))
            return compile(source, target=target, options=options, **more)

        self._patch = mock.patch.object(triton, "compile", noted)
        self._patch.start()

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def mixture_kernels() -> list[Kernel]:
    """Return the kernels of mixtures: grouped products with the thin matrices of a rank-16 adapter on 64 experts,
    quantized numbers expanded, and the activation and its gradient as in gpt-oss, Qwen3 and Gemma 4."""
    import torch
    from triton.runtime.jit import JITFunction

    from lean_ft.models.expand_kernel import expand
    from lean_ft.models.grouped_kernels import multiply, multiply_outer
    from lean_ft.models.mix import grouped_activation, summed_rows

    launched: list[Any] = []
    run = JITFunction.run
    with mock.patch.object(JITFunction, "run", lambda *args, **kwargs: launched.append(run(*args, **kwargs))):
        ends = torch.arange(64, 4097, 64, dtype=torch.int32, device="cuda")
        rows, right = (torch.zeros(4096, n, device="cuda", dtype=torch.bfloat16) for n in (2048, 16))
        multiply(rows, torch.zeros(64, 2048, 16, device="cuda", dtype=torch.bfloat16), ends)
        multiply(right, torch.zeros(64, 16, 2048, device="cuda", dtype=torch.bfloat16), ends)
        multiply(right, torch.zeros(64, 16, 2048, device="cuda", dtype=torch.bfloat16), ends, rows)
        multiply_outer(rows, right, ends)
        summed_rows(rows, torch.zeros(512, 8, dtype=torch.int64, device="cuda"))
        for numbers in (rows.to(torch.uint8), rows.to(torch.float8_e4m3fn)):
            scales = torch.zeros(
                rows.numel() // 16, device="cuda", dtype=torch.uint8 if numbers.dtype == torch.uint8 else None
            )
            expand(numbers, scales, rows.new_empty(2 * rows.numel()) if numbers.dtype == torch.uint8 else rows)
        inner, weights, bias = rows[:, :1024].contiguous(), torch.zeros(4096, 1, device="cuda"), rows[:64]
        clamped, silu = ("silu", True, True, 1.702, 1.0, 7.0, False), ("silu", True, False, 1.0, 0.0, None, False)
        for own_bias, formula in ((bias, clamped), (None, silu), (None, ("gelu_tanh", *silu[1:]))):
            for grad in (None, inner):
                grouped_activation(
                    rows, weights, own_bias, torch.zeros_like(ends).repeat(64).long(), grad, True, *formula
                )
    return [Kernel(kernel.src, {"num_warps": kernel.metadata.num_warps}) for kernel in launched]


def attention_kernels(capability: int) -> list[Kernel]:
    """Return the kernels of attention for heads of 256 and of 512 features, with sinks, a window, a soft cap and
    prefixes, in the sizes for an architecture."""
    import torch
    from triton.runtime.jit import JITFunction

    from lean_ft.models.attention.flash_kernels import attend, attend_backward
    from lean_ft.models.attention.row_attention import Rows

    launched: list[Any] = []
    run, num_tokens = JITFunction.run, 1024
    ends = torch.arange(1, num_tokens + 1, dtype=torch.int32, device="cuda")
    rows = Rows(ends[[0, -1]] - 1, torch.zeros(8, device="cuda"), None, 64, 50.0, num_tokens, ends[None, :2], ends, 64)
    as_there = mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10))
    with as_there, mock.patch.object(JITFunction, "run", lambda *args, **kwargs: launched.append(run(*args, **kwargs))):
        for head_dim in (256, 512):
            query, key = (torch.zeros(num_tokens, n, head_dim, device="cuda").bfloat16() for n in (8, 4))
            out, lse = attend(query, key, key, rows)
            attend_backward(out, out, lse, query, key, key, rows)
    options = ("num_warps", "num_stages")
    return [Kernel(kernel.src, {name: getattr(kernel.metadata, name) for name in options}) for kernel in launched]


def recurrent_kernels() -> list[Kernel]:
    """Return the kernels of recurrent layers for the delta rule of Qwen3.5, for Mamba-2 with heads of 80 and of 64
    features and keys of 128 and of 256, with documents; for convolutions of 4 taps; and to decode a token."""
    import torch
    from triton.runtime.jit import JITFunction

    from lean_ft.models.state.convolution import causal_convolution, causal_convolution_backward
    from lean_ft.models.state.decoding import Rates, Token, convolution_step, gated_norm, recurrent_step
    from lean_ft.models.state.linear_attention import linear_attention, linear_attention_backward

    launched: list[Any] = []
    run, num_tokens = JITFunction.run, 1024
    bounds = torch.tensor([0, 100, num_tokens], dtype=torch.int32, device="cuda")
    with mock.patch.object(JITFunction, "run", lambda *args, **kwargs: launched.append(run(*args, **kwargs))):
        for key_heads, heads, key_dim, value_dim in ((16, 32, 128, 128), (8, 128, 128, 80), (1, 24, 256, 64)):
            key, value = (
                torch.zeros(1, num_tokens, *size, device="cuda").bfloat16()
                for size in ((key_heads, key_dim), (heads, value_dim))
            )
            decay, corrects = torch.zeros(1, num_tokens, heads, device="cuda"), value_dim == 128
            _, states = linear_attention(key, key, value, decay, decay, bounds, None, corrects)
            linear_attention_backward(value, key, key, value, decay, decay, bounds, states, corrects)
        x, weight = value[0].flatten(1)[None], torch.zeros(heads * value_dim, 4, device="cuda").bfloat16()
        causal_convolution(x, weight, weight[:, 0], bounds, "silu")
        causal_convolution_backward(x, x, weight, weight[:, 0], bounds, "silu")
        token, rates = (
            Token(key[:, :1], key[:, :1], value[:, :1], decay[:, :1], decay[:, :1]),
            Rates(decay[0, 0], decay[0, 0]),
        )
        recurrent_step(token, rates, states[0], corrects=True)
        convolution_step(x[:, :1], x[:, :3], weight, None, "silu")
        gated_norm(x[:, :1], x[:, :1], weight[:, 0], 1e-6, 1, True)
    options = ("num_warps", "num_stages")
    return [Kernel(kernel.src, {name: getattr(kernel.metadata, name) for name in options}) for kernel in launched]


def resources(kernels: list[Kernel], capability: int) -> Iterator[dict[str, Any]]:
    """Yield what each kernel takes on an architecture: registers, spilled bytes, shared memory, occupancy."""
    import triton
    from triton.backends.compiler import GPUTarget

    for kernel in kernels:
        binary = triton.compile(kernel.source, target=GPUTarget("cuda", capability, 32), options=kernel.options)
        registers, spilled_bytes = _usage(binary.asm["cubin"])
        warps, shared_bytes = binary.metadata.num_warps, binary.metadata.shared
        occupancy = occupancy_of(LIMITS[capability], registers, warps, shared_bytes)
        found = {"registers": registers, "spilled_bytes": spilled_bytes, "shared_bytes": shared_bytes}
        yield {"kernel": kernel.name, "capability": capability, "warps": warps, "occupancy": occupancy, **found}


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread, which ptxas uses for spilled registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2]) + int(found[3])


def occupancy_of(limits: Limits, registers: int, warps: int, shared_bytes: int) -> float:
    """The share of an SM's warps that can run at once."""
    of_a_warp = -(-registers * 32 // 256) * 256  # registers are given to a warp in units of 256
    blocks = min(
        limits.registers // of_a_warp // warps,
        limits.shared_bytes // (shared_bytes + _SHARED_PER_BLOCK),
        limits.warps // warps,
        32,
    )
    return blocks * warps / limits.warps


def measure_shapes(shapes: list[str]) -> list[dict[str, Any]]:
    """One row per shape, or other group of kernels, and architecture: the worst of its kernels."""
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    rows = []
    others = {ATTENTION: list[Kernel], MIXTURES: mixture_kernels, RECURRENT: recurrent_kernels}
    for shape in shapes:
        kernels = others[shape]() if shape in others else training_kernels(shape)
        for capability in LIMITS:
            kernels = attention_kernels(capability) if shape == ATTENTION else kernels
            found = list(resources(kernels, capability))
            row: dict[str, Any] = {"shape": shape, "capability": capability, "num_kernels": len(found), "status": "ok"}
            row |= {key: max(one[key] for one in found) for key in ("registers", "spilled_bytes", "shared_bytes")}
            row["occupancy"] = min(one["occupancy"] for one in found)
            row["spilling"] = sorted({one["kernel"] for one in found if one["spilled_bytes"]})
            rows.append(row)
            console.print(f"{shape}, sm_{capability}: {row}", markup=False)
    return rows


COLUMNS = ["kernels of", "kernels", *(f"sm_{capability}" for capability in LIMITS)]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        "Triton kernels of one training step (8-bit AdamW in backward, full checkpointing, compiled, bfloat16), of "
        "mixtures of experts, of attention and of recurrent layers, compiled by Triton "
        f"{result['versions']['triton']} and its ptxas; no kernel ran"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """One row per shape: the most registers, the least occupancy and the most spilled bytes on each architecture."""
    cells: dict[str, list[str]] = {}
    for row in result["rows"]:
        spilled = f", {row['spilled_bytes']} B spilled" if row["spilled_bytes"] else ""
        own = cells.setdefault(row["shape"], [row["shape"], str(row["num_kernels"])])
        own.append(f"{row['registers']}, {row['occupancy']:.0%}{spilled}")
    return list(cells.values())


def main(
    only: Annotated[
        str, typer.Option(help="Groups of kernels, comma-separated. The others keep their rows.")
    ] = ",".join((*SHAPES, MIXTURES, ATTENTION, RECURRENT)),
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Report what the kernels take on each architecture."""
    hardware = describe_hardware("cpu")
    chosen, earlier = only.split(","), results_dir / f"kernel_resources_{hardware.slug}.json"
    kept = json.loads(earlier.read_text())["rows"] if earlier.exists() else []
    rows = [row for row in kept if row["shape"] not in chosen] + measure_shapes(chosen)
    path = write_result(
        "kernel_resources",
        benchmark="kernel_resources",
        hardware=hardware,
        settings={"overrides": SETTINGS},
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)
    os._exit(0)  # skip the exit handlers of CUDA libraries, which a simulated GPU does not support


if __name__ == "__main__":
    typer.run(main)
