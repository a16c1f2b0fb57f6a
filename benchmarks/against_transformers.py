"""Compare forward and backward of a hybrid model with transformers' model of the same shape, on the same text.

    python benchmarks/against_transformers.py --rounds 2                  # Qwen3.5-0.8B's shape, 4 x 512 tokens
    python benchmarks/against_transformers.py --layers 4 --vocabulary 4096 --length 128 --rounds 1      # in a minute

Weights are random, in bfloat16, and all of them train. One call computes the mean next-token loss and all gradients,
and drops the gradients. Memory is the peak resident size of the process, with weights and libraries. Without an
installed CUDA kernel, both sides compute the state in PyTorch's operations.

Writes `results/against_transformers_<layers>x<batch>x<length>_<hardware>.json`.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import Budget, run_measured
from results import RESULTS, console, gibibytes, print_result, require_hardware, tokens_per_second, write_result
from shapes import shape_of

LABELS = {
    "transformers": "transformers",
    "ours": "lean_ft",
}


def work(kind: str, folder: Path, batch_size: int, length: int, repeats: int, device_name: str, report: Path) -> None:
    """Measure one side and write the report."""
    import torch
    from timing import measure_calls

    from lean_ft.memory.host_memory import return_freed_memory

    return_freed_memory()
    device = torch.device(device_name)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = torch.randint(vocabulary, (batch_size, length), generator=torch.Generator().manual_seed(0)).to(device)
    if kind == "transformers":
        import transformers

        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
            )
        model.train()

        def loss() -> torch.Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss
    else:
        from lean_ft.losses import IGNORED_LABEL, linear_cross_entropy
        from lean_ft.models import load_model

        model = load_model(folder, device=device, dtype=torch.bfloat16, random_init=True)
        labels = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], IGNORED_LABEL)), 1)
        num_targets = batch_size * (length - 1)

        def loss() -> torch.Tensor:
            hidden = model(ids, return_hidden=True)
            total = linear_cross_entropy(hidden, model.output_weight, labels, num_targets=num_targets, chunk_tokens=256)
            return total / num_targets

    found = []

    def step() -> None:
        value = loss()
        value.backward()
        found.append(value.item())
        model.zero_grad(set_to_none=True)

    timing = measure_calls(step, device, repeats=repeats, warmup=1)
    row = {**timing._asdict(), "loss": found[-1], "tokens_per_second": batch_size * length / timing.seconds}
    report.write_text(json.dumps(row))


def compare(config: dict[str, Any], *, rounds: int, arguments: list[str], budget: Budget) -> list[dict[str, Any]]:
    """Measure each side in new processes, round by round. Returns medians and the largest peak."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in LABELS}
    with tempfile.TemporaryDirectory(prefix="lean_ft_against_") as temporary:
        folder, report = Path(temporary), Path(temporary) / "report.json"
        (folder / "config.json").write_text(json.dumps(config))
        for _ in range(rounds):
            for kind, label in LABELS.items():
                command = [
                    sys.executable,
                    __file__,
                    "--worker",
                    kind,
                    "--folder",
                    folder,
                    "--report",
                    report,
                    *arguments,
                ]
                measured = run_measured(command, timeout_seconds=budget.timeout_seconds())
                row: dict[str, Any] = {"status": measured.status, "reason": measured.reason}
                if measured.status == "ok":
                    row |= json.loads(report.read_text())
                    row["peak_memory_bytes"] = measured.peak_rss_bytes
                found[kind].append(row)
                console.print(
                    f"{label:<30} {row['status']}" + (f": {row['reason']}" if row["reason"] else ""), markup=False
                )
    rows = []
    for kind, runs in found.items():
        done = [run for run in runs if run["status"] == "ok"]
        row = {"name": kind, "label": LABELS[kind], **(runs[-1] if len(done) < len(runs) else done[-1]), "runs": runs}
        if len(done) == len(runs):
            row["seconds"] = statistics.median(run["seconds"] for run in done)
            row["tokens_per_second"] = statistics.median(run["tokens_per_second"] for run in done)
            row["peak_memory_bytes"] = max(run["peak_memory_bytes"] for run in done)
        rows.append(row)
    return rows


COLUMNS = ["implementation", "time", "tokens/s", "peak memory", "memory vs transformers", "peak without weights"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"forward and backward pass of the Qwen3.5-0.8B shape ({settings['layers']} layers, vocabulary "
        f"{settings['vocabulary']:,}), {settings['batch_size']} x {settings['length']} tokens, bfloat16; median of "
        f"{settings['rounds']} rounds"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    peaks = {row["name"]: row.get("peak_memory_bytes") for row in result["rows"] if row["status"] == "ok"}
    cells = []
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], "-", "-", "-", "-"])
            continue
        theirs = peaks.get("transformers")
        share = "-" if theirs is None else f"{row['peak_memory_bytes'] / theirs:.2f}"
        time, speed = f"{row['seconds']:.2f} s", tokens_per_second(row["tokens_per_second"])
        memory = gibibytes(row["peak_memory_bytes"]), share, gibibytes(row["extra_bytes"])
        cells.append([row["label"], time, speed, *memory])
    return cells


def main(
    layers: Annotated[int, typer.Option(help="Layers to keep of the shape's 24; every fourth is attention.")] = 24,
    vocabulary: Annotated[int, typer.Option(help="Vocabulary size.")] = 248_320,
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed calls per run; the median is reported.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 1800,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare time and memory of a hybrid model with transformers."""
    if worker and folder is not None and report is not None:
        work(worker, folder, batch_size, length, repeats, device, report)
        return
    hardware = require_hardware(device)
    config = {**shape_of("qwen3_5_0_8b"), "num_hidden_layers": layers, "vocab_size": vocabulary}
    arguments = [
        *("--batch-size", str(batch_size), "--length", str(length), "--repeats", str(repeats)),
        *("--device", hardware["device"]),
    ]
    rows = compare(config, rounds=rounds, arguments=arguments, budget=Budget(timeout_seconds, None))
    path = write_result(
        f"against_transformers_{layers}x{batch_size}x{length}",
        benchmark="against_transformers",
        hardware=hardware,
        settings={
            "layers": layers,
            "vocabulary": vocabulary,
            "batch_size": batch_size,
            "length": length,
            "dtype": "bfloat16",
            "rounds": rounds,
            "repeats": repeats,
        },
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
