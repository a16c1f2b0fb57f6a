"""Compare attention over packed documents with attention over padded rows.

    python benchmarks/attention.py --shape llama3_2_3b --batch-size 2 --length 4096

Document lengths are sampled log-uniformly and fill `batch_size` rows of `length` tokens. Packed documents use lean_ft's
`attend_documents`; padded documents have one row each, as long as the longest (`attend_rows`). The third line has one
document per row, the largest amount of attention for this number of tokens. Only attention is measured, forward and
backward. The rate counts tokens of documents without padding.

Writes `results/attention_<shape>_<batch>x<length>_<hardware>.json`.
"""

import json
import math
import random
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, measure_contestants
from results import RESULTS, gibibytes, print_result, require_hardware, tokens_per_second, write_result
from shapes import shape_of

LABELS = {
    "packed": "packed documents",
    "padded": "one padded row a document",
    "whole": "one document a row",
}


def document_lengths(batch_size: int, length: int, seed: int = 0) -> list[list[int]]:
    """Document lengths that fill each row: log-uniform, the last one cut to fit."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(batch_size):
        row: list[int] = []
        while (left := length - sum(row)) > 0:
            row.append(min(left, round(math.exp(drawn.uniform(math.log(max(2, length / 64)), math.log(length))))))
        rows.append(row)
    return rows


def work(kind: str, shape: str, batch_size: int, length: int, repeats: int, device_name: str, report: Path) -> None:
    """Measure one variant and write the report."""
    import torch
    from timing import measure_calls

    from lean_ft.memory.host_memory import return_freed_memory
    from lean_ft.models.attention.attention import attend_documents, attend_rows

    return_freed_memory()
    device = torch.device(device_name)
    sizes = shape_of(shape)
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    head_dim = sizes.get("head_dim", sizes["hidden_size"] // heads)
    lengths = [n for row in document_lengths(batch_size, length) for n in row]
    rows, columns = (len(lengths), max(lengths)) if kind == "padded" else (batch_size, length)

    generator = torch.Generator().manual_seed(0)

    def random_heads(count: int) -> torch.Tensor:
        x = torch.randn(rows, columns, count, head_dim, generator=generator)
        return x.to(device, torch.bfloat16).requires_grad_()

    query, key, value = random_heads(heads), random_heads(kv_heads), random_heads(kv_heads)
    grad = torch.ones_like(query)
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)

    def step() -> None:
        if kind == "packed":
            attended = attend_documents(query, key, value, cu_seqlens)
        else:
            attended = attend_rows(query, key, value)
        attended.backward(grad)
        query.grad = key.grad = value.grad = None

    timing = measure_calls(step, device, repeats=repeats)
    row = {
        **timing._asdict(),
        "input_bytes": sum(x.numel() * x.element_size() for x in (query, key, value, grad)),
        "computed_tokens": rows * columns,
        "tokens_per_second": sum(lengths) / timing.seconds,
    }
    report.write_text(json.dumps({"status": "ok", "reason": None, **row}))


COLUMNS = ["attention", "time", "tokens/s", "memory with inputs", "positions computed"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"forward and backward pass of one attention layer of {settings['shape']}, {settings['documents']} documents "
        f"in {settings['batch_size']} x {settings['length']} tokens, bfloat16"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    cells = []
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], "-", "-", "-"])
            continue
        memory = None if row["extra_bytes"] is None else row["extra_bytes"] + row["input_bytes"]
        cells.append(
            [
                row["label"],
                f"{row['seconds'] * 1000:.1f} ms",
                tokens_per_second(row["tokens_per_second"]),
                gibibytes(memory),
                f"{row['computed_tokens']:,}",
            ]
        )
    return cells


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py; only the heads are used.")] = "llama3_2_3b",
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 4096,
    repeats: Annotated[int, typer.Option(help="Timed calls; the median is reported.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 600,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Total time in seconds; remaining runs are skipped.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare time and memory of packed and padded attention."""
    if worker and report is not None:
        work(worker, shape, batch_size, length, repeats, device, report)
        return
    hardware = require_hardware(device)
    shape_of(shape)
    num_documents = sum(map(len, document_lengths(batch_size, length)))
    arguments = [
        *("--shape", shape, "--batch-size", str(batch_size), "--length", str(length)),
        *("--repeats", str(repeats), "--device", hardware["device"]),
    ]
    rows = measure_contestants(__file__, LABELS, arguments, Budget(timeout_seconds, budget_seconds))
    path = write_result(
        f"attention_{shape}_{batch_size}x{length}",
        benchmark="attention",
        hardware=hardware,
        settings={
            "shape": shape,
            "batch_size": batch_size,
            "length": length,
            "documents": num_documents,
            "dtype": "bfloat16",
            "repeats": repeats,
        },
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
