"""Measure one update of all weights of a model: lean_ft's optimizers, eager and compiled, and their peers.

    python benchmarks/optimizer_step.py --shape qwen2_5_0_5b
    python benchmarks/optimizer_step.py --only adamw_8bit_compiled,bitsandbytes_8bit --option stochastic_rounding=true

Weights and gradients are random bfloat16 tensors of the shape's sizes. Each optimizer runs in a new process. State is
the memory kept between steps. Workspace is the peak during the update above weights, gradients and state; a float32
copy of the embedding shows there. CPU time is the sum over all threads.

Writes `results/optimizer_step_<shape>_<hardware>.json`, or another name (`--results-name`).
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from measure import Budget, measure_contestants, names_in
from results import RESULTS, console, gibibytes, print_result, require_hardware, write_result
from shapes import num_parameters, shape_of

LABELS = {
    "sgd": "lean_ft SGD",
    "adafactor": "lean_ft Adafactor",
    "adamw": "lean_ft AdamW",
    "adamw_compiled": "lean_ft AdamW, compiled",
    "adamw_4bit": "lean_ft 4-bit AdamW",
    "adamw_8bit_torchao": "lean_ft 8-bit AdamW, torchao codes",
    "muon": "lean_ft Muon",
    "apollo_mini": "lean_ft APOLLO-Mini",
    "torch_adamw": "torch AdamW, fused",
    "adamw_8bit": "lean_ft 8-bit AdamW",
    "adamw_8bit_compiled": "lean_ft 8-bit AdamW, compiled",
    "paged_adamw_8bit": "lean_ft 8-bit AdamW, paged",
    "bitsandbytes_8bit": "bitsandbytes 8-bit AdamW",
    "torchao_8bit": "torchao 8-bit AdamW",
}
PEER_PACKAGES = {"bitsandbytes_8bit": "bitsandbytes", "torchao_8bit": "torchao"}
LEARNING_RATE = 1e-5


# In the process of one optimizer -------------------------------------------------------------------------------------


def parameters(shape: str, device: Any) -> Any:
    """The shape's parameters in bfloat16 with random values and gradients."""
    import torch

    from lean_ft.models.config_json import decoder_config
    from lean_ft.models.decoder import Decoder

    with torch.device("meta"):
        sizes = [parameter.shape for parameter in Decoder(decoder_config(shape_of(shape))).parameters()]
    torch.manual_seed(0)
    made = torch.nn.ParameterList(torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes)
    for parameter in made:
        parameter.data.normal_(std=0.02)
        parameter.grad = torch.empty_like(parameter).normal_(std=1e-4)
    return made


def contestant(name: str, model: Any, options: dict[str, Any]) -> tuple[Callable[[], object], Callable[[], int]]:
    """Functions for a step and for the size of the state. Raises LookupError with the reason if unavailable."""
    import torch

    on_gpu = next(model.parameters()).is_cuda
    if name in PEER_PACKAGES and importlib.util.find_spec(PEER_PACKAGES[name]) is None:
        raise LookupError(f"{PEER_PACKAGES[name]} is not installed")
    if name == "paged_adamw_8bit" and not on_gpu:
        raise LookupError("paged state needs a GPU")
    if name == "torch_adamw":
        peer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    elif name == "bitsandbytes_8bit":
        import bitsandbytes

        peer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    elif name == "torchao_8bit":
        import torchao.optim

        peer = torchao.optim.AdamW8bit(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    else:
        from lean_ft.optim import build_optimizer
        from lean_ft.settings import ModelConfig, OptimizerConfig

        cfg: Any = SimpleNamespace(
            model=ModelConfig(path="none"),
            optimizer=OptimizerConfig.model_validate({"name": name.removesuffix("_compiled"), **options}),
            clip_grad_norm=None,
            compile=name.endswith("_compiled"),
        )
        ours = build_optimizer(model, cfg)
        ours.set_lr(LEARNING_RATE)
        return ours.step, lambda: ours.state_bytes
    return peer.step, lambda: sum(map(_state_bytes, peer.state.values()))


def _state_bytes(value: Any) -> int:
    """Bytes of the tensors in an optimizer's state, including those inside quantized tensors."""
    import torch

    if isinstance(value, dict):
        return sum(map(_state_bytes, value.values()))
    if not isinstance(value, torch.Tensor):
        return 0
    if hasattr(value, "__tensor_flatten__"):
        return sum(_state_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes


def work(name: str, shape: str, repeats: int, options: dict[str, Any], device_name: str, report: Path) -> None:
    """Measure one optimizer and write the report."""
    import torch
    from timing import measure_calls

    from lean_ft.memory.host_memory import return_freed_memory

    return_freed_memory()  # as in every recipe, for all optimizers
    device = torch.device(device_name)
    model = parameters(shape, device)
    try:
        step, state_bytes = contestant(name, model, options)
    except LookupError as absent:
        report.write_text(json.dumps({"status": "absent", "reason": str(absent.args[0])}))
        return
    timing = measure_calls(step, device, repeats=repeats)
    row = {**timing._asdict(), "state_bytes": state_bytes()}
    report.write_text(json.dumps({"status": "ok", "reason": None, **row}))


COLUMNS = ["optimizer", "time", "CPU time", "state", "workspace"]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    options = "".join(f", {key}={json.dumps(value)}" for key, value in settings["options"].items())
    return f"one update of {settings['shape']} ({settings['parameters']:,} parameters, bfloat16){options}"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    cells = []
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], "-", "-", "-"])
            continue
        times = [f"{s:.2f} s" if s >= 1 else f"{s * 1000:.1f} ms" for s in (row["seconds"], row["cpu_seconds"])]
        cells.append([row["label"], *times, gibibytes(row["state_bytes"]), gibibytes(row["extra_bytes"])])
    return cells


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    only: Annotated[str, typer.Option(help=f"Rows to run, comma-separated: {', '.join(LABELS)}, with commas.")] = "",
    option: Annotated[list[str] | None, typer.Option(help="Setting of lean_ft's optimizers, KEY=VALUE.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps; the median is reported.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 900,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Total time in seconds; remaining runs are skipped.")
    ] = None,
    results_name: Annotated[str, typer.Option(help="Start of the result's file name.")] = "optimizer_step",
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare time, state and workspace of optimizer steps."""
    options = {key: json.loads(value) for key, _, value in (text.partition("=") for text in option or [])}
    if worker and report is not None:
        work(worker, shape, repeats, options, device, report)
        return
    chosen = {name: LABELS[name] for name in names_in(only, LABELS)}
    hardware = require_hardware(device)
    console.print(f"{shape}, {num_parameters(shape):,} parameters, on {hardware.short_name}")
    arguments = [
        *("--shape", shape, "--repeats", str(repeats), "--device", hardware["device"]),
        *(f"--option={key}={json.dumps(value)}" for key, value in options.items()),
    ]
    rows = measure_contestants(__file__, chosen, arguments, Budget(timeout_seconds, budget_seconds))
    path = write_result(
        f"{results_name}_{shape}",
        benchmark="optimizer_step",
        hardware=hardware,
        settings={
            "shape": shape,
            "parameters": num_parameters(shape),
            "options": options,
            "repeats": repeats,
            "dtype": "bfloat16",
        },
        rows=rows,
        folder=results_dir,
    )
    print_result(path, describe, COLUMNS, table_cells)


if __name__ == "__main__":
    typer.run(main)
