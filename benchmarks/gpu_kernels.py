"""Time the kernels of a step on a GPU, each next to its alternatives.

    python benchmarks/gpu_kernels.py

Attention: three documents in one row. Recurrent: the same documents, in layers as wide as Qwen3.5 9B's and Mamba-2's.
Expand: frozen weights of layers or experts. Sums: the rows of each token's experts. Nothing is downloaded.

Writes `results/gpu_kernels_<hardware>.json` after every row.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from results import RESULTS, console, print_result, require_hardware, write_result
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lean_ft.models import frozen_weight
from lean_ft.models.attention import kernels
from lean_ft.models.attention.attention import Scoring, attend_documents
from lean_ft.models.mix import summed_rows
from lean_ft.models.state.convolution import causal_convolution
from lean_ft.models.state.linear_attention import linear_attention

ENDS = (0, 700, 1800, 4096)
# Name: query heads, key heads, features of a head, how scores are computed, sinks, and the kernels besides lean_ft's.
ATTENTION = {
    "Llama 3.2 3B": (24, 8, 128, Scoring(), False, ("library",)),
    "gpt-oss, all tokens": (64, 8, 64, Scoring(), True, ("library", "eager")),
    "gpt-oss, window of 128": (64, 8, 64, Scoring(window=128), True, ("library", "eager")),
    "Gemma 3, window of 1,024": (8, 4, 256, Scoring(window=1024), False, ("library", "eager")),
    "soft cap, heads of 256": (16, 8, 256, Scoring(softcap=50.0), False, ("eager", "flex")),
    "Gemma 4, heads of 512": (16, 4, 512, Scoring(), False, ("eager", "flex")),
}
# Name, groups of queries and keys, heads, features of a query, features of a value, and whether values are corrected.
RECURRENT = (
    ("Qwen3.5 9B, gated delta rule", 16, 32, 128, 128, True),
    ("Nemotron-H 8B, Mamba-2", 8, 128, 128, 64, False),
)
KERNELS = {"own": "lean_ft's kernel", "library": "library", "flex": "flex attention", "eager": "separate operations"}
COLUMNS = ["operation", *KERNELS.values(), "lean_ft uses"]


def milliseconds(work: Callable[[], object]) -> float:
    import triton  # pyright: ignore[reportMissingImports]

    return triton.testing.do_bench(work, warmup=5, rep=25, return_mode="median")


def attention_row(name: str) -> dict[str, Any]:
    """Milliseconds of attention's forward and backward pass."""
    heads, key_heads, width, scoring, has_sinks, others = ATTENTION[name]
    device = torch.device("cuda")
    shapes = [(1, ENDS[-1], count, width) for count in (heads, key_heads, key_heads)]
    query, key, value = (torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes)
    sinks = torch.randn(heads, device=device).bfloat16() if has_sinks else None
    bounds = torch.tensor(ENDS, dtype=torch.int32, device=device)
    row: dict[str, Any] = {"label": f"attention: {name}", "milliseconds": {}, "failed": {}}
    for kernel in ("own", *others):
        try:
            kernels.use_attention("auto" if kernel in ("library", "flex") else kernel, torch.bfloat16, device)
            attend = lambda: attend_documents(query, key, value, bounds, scoring, sinks)  # noqa: E731
            attend = flex(query, key, value, bounds, scoring.softcap) if kernel == "flex" else attend
            out = attend()
            arguments = out, (query, key, value), torch.randn_like(out)
            backward = milliseconds(lambda: torch.autograd.grad(*arguments, retain_graph=True))  # noqa: B023
            row["milliseconds"][kernel] = [milliseconds(attend), backward]
        except Exception as error:  # such as too little shared memory
            row["failed"][kernel] = f"{type(error).__name__}: {error}"[:300]
    kernels.use_attention("auto", torch.bfloat16, device)
    used = kernels.kernel_of(query, is_plain=scoring.softcap is None, sinks=has_sinks)
    return row | {"used": "library" if used == "flash" else used}


def flex(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cap: float | None) -> Callable[[], Tensor]:
    """The same attention by PyTorch's flex attention, without windows and sinks."""
    tokens = torch.arange(query.shape[1], device=query.device)
    document = torch.bucketize(tokens, bounds[1:-1].long(), right=True)
    sizes = None, None, len(tokens), len(tokens)
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (document[i] == document[j]), *sizes, device=query.device)
    change = None if cap is None else lambda score, b, h, i, j: cap * torch.tanh(score / cap)
    attend, tensors = torch.compile(flex_attention, dynamic=False), [x.transpose(1, 2) for x in (query, key, value)]
    return lambda: attend(*tensors, score_mod=change, block_mask=mask, enable_gqa=True).transpose(1, 2)


def recurrent_rows(device: str = "cuda", ends: tuple[int, ...] = ENDS) -> Iterator[dict[str, Any]]:
    """Milliseconds of recurrent layers' forward and backward pass."""
    bounds, num_tokens = torch.tensor(ends, dtype=torch.int32, device=device), ends[-1]

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(1, num_tokens, *shape, device=device).to(dtype)

    for name, groups, heads, key_width, width, corrects in RECURRENT:
        query, key = (F.normalize(random(groups, key_width), dim=-1).requires_grad_() for _ in range(2))
        value = random(heads, width).requires_grad_()
        decay, beta = F.logsigmoid(random(heads, dtype=torch.float32)), random(heads).sigmoid()
        leaves = query, key, value, decay.requires_grad_(), beta.requires_grad_()
        yield passes(f"recurrent: {name}", lambda: linear_attention(*leaves, bounds, None, corrects)[0], leaves)  # noqa: B023
    x, weight = random(8192).requires_grad_(), torch.randn(8192, 4, device=device).bfloat16().requires_grad_()
    convolve = lambda: causal_convolution(x, weight, None, bounds, "silu")  # noqa: E731
    yield passes("recurrent: convolution of 8,192 features", convolve, (x, weight))


def passes(label: str, compute: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> dict[str, Any]:
    """The row of an operation of lean_ft alone: milliseconds of its forward and its backward pass."""
    out = compute()
    grad = torch.randn_like(out)
    backward = milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    return {"label": label, "milliseconds": {"own": [milliseconds(compute), backward]}, "used": "own"}


def memory_rows() -> Iterator[dict[str, Any]]:
    """Milliseconds and bytes of kernels that only move memory."""
    from lean_ft.models.expand_kernel import expand  # needs Triton

    float8 = torch.randn(128, 1536, 2048, device="cuda").to(torch.float8_e4m3fn)
    pairs = torch.randint(110, 140, (32 * 5760 * 90, 16), dtype=torch.uint8, device="cuda")
    nf4 = pairs[: 2 * 64 * 1536 * 32].view(-1, 32)
    cases = {
        "MXFP4, 32 x 5,760 x 2,880": (pairs, pairs.flatten()[: len(pairs)], (len(pairs), 32)),
        "float8, 1 scale per row, 128 x 1,536 x 2,048": (float8, torch.rand(128, 1536, 1, device="cuda"), float8.shape),
        "float8, 16 scales per row, 128 x 1,536 x 2,048": (float8, torch.rand(128, 1536, 16, device="cuda"),
            float8.shape),
        "NF4, 64 x 1,536 x 2,048": (nf4, torch.rand(len(nf4), device="cuda"), (len(nf4), 64)),
    }  # fmt: skip
    for name, (numbers, scales, shape) in cases.items():
        out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        own = milliseconds(lambda: expand(numbers, scales, out))  # noqa: B023
        other = milliseconds(lambda: frozen_weight._expand_stepwise(numbers, scales, torch.bfloat16))  # noqa: B023
        times = {"own": [own], "library" if "NF4" in name else "eager": [other]}
        yield {"label": f"expand: {name}", "milliseconds": times, "bytes": numbers.nbytes + scales.nbytes + out.nbytes}
    for count, width in ((8, 2048), (4, 2880)):
        rows = torch.randn(4096 * count, width, device="cuda").bfloat16()
        places = torch.randperm(4096 * count, device="cuda").view(4096, count)
        own = milliseconds(lambda: summed_rows(rows, places))  # noqa: B023
        other = milliseconds(lambda: F.embedding_bag(places, rows, mode="sum"))  # noqa: B023
        times = {"own": [own], "library": [other]}
        moved = rows.nbytes + places.nbytes + rows.nbytes // count
        yield {"label": f"sums: 4,096 x {count} x {width:,}", "milliseconds": times, "bytes": moved}


def main(
    device: Annotated[str, typer.Option(help="Only cuda.")] = "cuda",
    budget_seconds: Annotated[float, typer.Option(help="Start no row after this many seconds.")] = 600,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Time kernels on a GPU."""
    hardware, rows, ends = require_hardware(device), [], time.monotonic() + budget_seconds
    if hardware["device"] != "cuda":
        console.print("These kernels run on a GPU only; nothing was measured.")
        return
    for row in (row for part in (map(attention_row, ATTENTION), recurrent_rows(), memory_rows()) for row in part):
        rows.append({"status": "ok", "reason": None, **row})
        path = write_result("gpu_kernels", benchmark="gpu_kernels", hardware=hardware, settings={}, rows=rows,
            folder=results_dir)  # fmt: skip
        if time.monotonic() > ends:
            rows.append(
                {"label": "further rows", "status": "not run", "reason": "no time was left", "milliseconds": {}}
            )
            write_result("gpu_kernels", benchmark="gpu_kernels", hardware=hardware, settings={}, rows=rows,
                folder=results_dir)  # fmt: skip
            break
    print_result(path, describe, COLUMNS, table_cells)


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        "median time of kernels. Attention: forward + backward, documents of 700, 1,100 and 2,296 tokens in one row, "
        "bfloat16; library: PyTorch's flash kernel. Recurrent: the same documents. Expand: a frozen weight to "
        "bfloat16; library: bitsandbytes. Sums: tokens x experts per token x hidden features, bfloat16; library: "
        "PyTorch's embedding_bag"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [row["label"], *(_cell(row, kernel) for kernel in KERNELS), KERNELS[row.get("used", "own")]]
        for row in result["rows"]
    ]


def _cell(row: dict[str, Any], kernel: str) -> str:
    if kernel not in row["milliseconds"]:
        return "failed" if kernel in row.get("failed", {}) else "-"
    times = row["milliseconds"][kernel]
    rate = f" ({row['bytes'] / times[0] / 1e6:,.0f} GB/s)" if "bytes" in row else ""
    return f"{' + '.join(f'{ms:.3f}' for ms in times)} ms{rate}"


if __name__ == "__main__":
    typer.run(main)
