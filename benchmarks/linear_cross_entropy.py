"""Compare output layer and cross-entropy: lean_ft's, PyTorch's, Liger's and the plain computation.

    python benchmarks/linear_cross_entropy.py --shape qwen2_5_0_5b --tokens 4096

Each runs forward and backward in a new process, on the same random bfloat16 hidden states, weight and labels. Time is
the median of several calls. Memory is the peak above the inputs, with both gradients. Errors are those of both
gradients relative to float64 (Frobenius norm), at a smaller size with as many chunks. PyTorch has a fused loss since
2.13; Liger's kernels need Triton and a GPU. Missing peers are listed.

Writes `results/linear_cross_entropy_<shape>_<tokens>_<hardware>.json`.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, measure_contestants, names_in
from results import RESULTS, console, gibibytes, print_result, require_hardware, write_result
from shapes import shape_of

LABELS = {
    "plain": "plain: projection, then cross-entropy in float32",
    "plain_compiled": "plain, compiled",
    "torch": "torch F.linear_cross_entropy",
    "torch_chunked": "torch, chunked (its own choice)",
    "torch_chunked_accurate": "torch, chunked, accurate sums",
    "torch_chunked_compact": "torch, chunked, compact sums",
    "liger": "Liger fused linear cross-entropy",
    "lean_ft": "lean_ft, eager",
    "lean_ft_compiled": "lean_ft, compiled",
    "lean_ft_weight_sums": "lean_ft, compiled, bfloat16 accumulation",
}
CHUNK_TOKENS = 1024  # lean_ft's default
ERROR_TOKENS, ERROR_HIDDEN, ERROR_VOCAB = 2048, 256, 4096


# In the process of one contestant -----------------------------------------------------------------------------------


def contestant(name: str, chunk_tokens: int) -> Callable[[Any, Any, Any], Any]:
    """The function (hidden, weight, labels) -> sum of losses. Raises LookupError with the reason if it is
    unavailable."""
    import torch
    from torch.nn import functional as F

    if name.startswith("lean_ft"):
        from lean_ft.losses import linear_cross_entropy

        sums = "weight" if name == "lean_ft_weight_sums" else "float32"
        compiled = name != "lean_ft"

        def ours(hidden: Any, weight: Any, labels: Any) -> Any:
            return linear_cross_entropy(
                hidden,
                weight,
                labels,
                num_targets=labels.numel(),
                chunk_tokens=chunk_tokens,
                accumulation_dtype=sums,
                compile=compiled,
            )

        return ours
    if name.startswith("plain"):

        def plain(hidden: Any, weight: Any, labels: Any) -> Any:
            return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

        return torch.compile(plain) if name == "plain_compiled" else plain
    if name.startswith("torch"):
        if not hasattr(F, "linear_cross_entropy"):
            raise LookupError(f"torch {torch.__version__} has none; 2.13 does")
        policy = {"torch_chunked": "auto", "torch_chunked_accurate": "accurate", "torch_chunked_compact": "compact"}
        options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy[name]) if name in policy else None

        def theirs(hidden: Any, weight: Any, labels: Any) -> Any:
            return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)

        return theirs
    if importlib.util.find_spec("liger_kernel") is None:
        raise LookupError("liger_kernel is not installed")
    if not torch.cuda.is_available():
        raise LookupError("Liger's kernels need a GPU")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda hidden, weight, labels: liger(weight, hidden, labels)


def inputs(tokens: int, hidden_size: int, vocab_size: int, device: Any, seed: int) -> tuple[Any, Any, Any]:
    """Random hidden states and weight, whose logits have a standard deviation of about 1, and labels."""
    import torch

    torch.manual_seed(seed)
    hidden = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device=device).normal_()
    weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device=device).normal_(std=hidden_size**-0.5)
    labels = torch.randint(vocab_size, (tokens,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def errors(loss_of: Callable[[Any, Any, Any], Any], device: Any) -> dict[str, float]:
    """Relative errors of the loss and of both gradients against float64 on the same bfloat16 inputs."""
    import torch
    from torch.nn import functional as F

    hidden, weight, labels = inputs(ERROR_TOKENS, ERROR_HIDDEN, ERROR_VOCAB, device, seed=1)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, labels, reduction="sum")
    exact.backward()
    loss = loss_of(hidden, weight, labels)
    loss.backward()

    def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
        return float((found.double() - truth).norm() / truth.norm())

    return {
        "loss_error": relative(loss.detach(), exact.detach()),
        "grad_hidden_error": relative(hidden.grad, exact_hidden.grad),
        "grad_weight_error": relative(weight.grad, exact_weight.grad),
    }


def work(name: str, shape: str, tokens: int, chunk_tokens: int, repeats: int, device_name: str, report: Path) -> None:
    """Measure one variant and write the report."""
    import torch
    from timing import measure_calls

    from lean_ft.memory.host_memory import return_freed_memory

    return_freed_memory()  # as in every recipe, for all variants
    device = torch.device(device_name)
    try:
        loss_of = contestant(name, chunk_tokens)
    except LookupError as absent:
        report.write_text(json.dumps({"status": "absent", "reason": str(absent.args[0])}))
        return
    sizes = shape_of(shape)
    hidden, weight, labels = inputs(tokens, sizes["hidden_size"], sizes["vocab_size"], device, seed=0)

    def step() -> None:
        loss_of(hidden, weight, labels).backward()
        hidden.grad = weight.grad = None  # only the inputs exist before each call

    timing = measure_calls(step, device, repeats=repeats)
    # After the timing, because code compiled for two sizes becomes dynamic and slower. Use as many chunks at the small
    # size as at the large size, because every chunk rounds.
    error = errors(contestant(name, max(1, ERROR_TOKENS * chunk_tokens // tokens)), device)
    report.write_text(json.dumps({"status": "ok", "reason": None, **timing._asdict(), **error}))


COLUMNS = ["loss", "time", "memory", "gradient error: hidden", "gradient error: weight"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"forward and backward pass of the output layer and its loss, {settings['tokens']:,} tokens, hidden size "
        f"{settings['hidden_size']:,}, vocabulary {settings['vocab_size']:,}, bfloat16; memory without the inputs, "
        "with the gradients; errors are relative to float64"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    cells = []
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], "-", "-", "-"])
            continue
        seconds = row["seconds"]
        time = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
        hidden_error, weight_error = (f"{row[key]:.1e}" for key in ("grad_hidden_error", "grad_weight_error"))
        cells.append([row["label"], time, gibibytes(row["extra_bytes"]), hidden_error, weight_error])
    return cells


def main(
    shape: Annotated[
        str, typer.Option(help="Model shape, from shapes.py; only hidden size and vocabulary are used.")
    ] = "qwen2_5_0_5b",
    tokens: Annotated[int, typer.Option(help="Target tokens.")] = 4096,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk, for lean_ft.")] = CHUNK_TOKENS,
    repeats: Annotated[int, typer.Option(help="Timed calls; the median is reported.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    only: Annotated[str, typer.Option(help=f"Rows to run, comma-separated: {', '.join(LABELS)}, with commas.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 900,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Total time in seconds; remaining runs are skipped.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare time, memory and error of fused and plain output losses."""
    if worker and report is not None:
        work(worker, shape, tokens, chunk_tokens, repeats, device, report)
        return
    chosen = {name: LABELS[name] for name in names_in(only, LABELS)}
    hardware = require_hardware(device)
    sizes = shape_of(shape)
    console.print(f"{tokens} tokens, hidden {sizes['hidden_size']}, vocabulary {sizes['vocab_size']:,}")
    arguments = [
        *("--shape", shape, "--tokens", str(tokens), "--chunk-tokens", str(chunk_tokens)),
        *("--repeats", str(repeats), "--device", hardware["device"]),
    ]
    rows = measure_contestants(__file__, chosen, arguments, Budget(timeout_seconds, budget_seconds))
    path = write_result(
        f"linear_cross_entropy_{shape}_{tokens}",
        benchmark="linear_cross_entropy",
        hardware=hardware,
        settings={
            "shape": shape,
            "tokens": tokens,
            "hidden_size": sizes["hidden_size"],
            "vocab_size": sizes["vocab_size"],
            "dtype": "bfloat16",
            "chunk_tokens": chunk_tokens,
            "repeats": repeats,
            "error_sizes": {"tokens": ERROR_TOKENS, "hidden_size": ERROR_HIDDEN, "vocab_size": ERROR_VOCAB},
        },
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
