"""Compare the loss of memory-saving settings with float32 AdamW, over several hundred steps each.

    python benchmarks/convergence.py               # the embedded model on its own data
    python benchmarks/convergence.py --task gsm8k  # a small model from random weights, on GSM8K
    python benchmarks/convergence.py --task trained --model FOLDER --seeds 4    # your own trained model
    python benchmarks/convergence.py --only float32,seed,adamw_4bit --steps 100

Every row runs `full_finetune_single_device` on the same data in the same order and changes only the listed settings. It
reports the mean loss of the last steps and the final held-out loss, each compared with the float32 run. The row `seed`
repeats that run with another data order; smaller differences mean nothing. If a row exceeds its limit, the script exits
with 1.

With `--seeds N` each row runs with N data orders, which are the same for all rows. Losses are means over the seeds.
Differences are means of the differences from the float32 run with the same seed. Both have standard errors.

Writes `results/convergence_<task>_<hardware>.json` and a chart of the curves.
"""

import json
import math
import shutil
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measure import Budget, read_steps, recipe_command, run_measured
from results import RESULTS, Hardware, console, print_result, require_hardware, write_result
from shapes import EMBEDDED_MODEL, find_gsm8k

RECIPE = "full_finetune_single_device"
LAST_STEPS = 50  # for the mean of the final training loss

BASE: dict[str, Any] = {
    "model.dtype": "bfloat16",
    "optimizer.lr": 1e-3,
    "schedule.warmup_steps": 20,
    "optimizer.stochastic_rounding": True,
    "batch_size": 4,
    "epochs": 100,
}


class Task(NamedTuple):
    """A model and data set to train."""

    description: str
    result: str
    """The name of the result file."""
    settings: dict[str, Any]


TASKS = {
    "embedded": Task(
        "full fine-tuning of the embedded model with batches of 4 chats",
        "convergence_embedded",
        {
            "model.path": "tiny",
            "data.source": "tiny/train.jsonl",
            "data.validation_source": "tiny/validation.jsonl",
            "data.max_length": 1024,
        },
    ),
    "gsm8k": Task(
        "a Llama with 4 layers and hidden size 256, trained from random weights on GSM8K, packed in batches of 4 x "
        "512 tokens",
        "convergence_gsm8k",
        {
            "model.random_init": True,
            "data.columns.prompt": "question",
            "data.columns.completion": "answer",
            "data.validation_fraction": 0.02,
            "data.max_length": 512,
            "data.packing": "bfd",
        },
    ),
    "trained": Task(
        "fine-tuning of the trained 5.2 M model on the embedded model's chats, 8 per step",
        "convergence_trained",
        {
            "data.source": "tiny/train.jsonl",
            "data.validation_source": "tiny/validation.jsonl",
            "data.max_length": 256,
            "batch_size": 8,
        },
    ),
}
SMALL_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "head_dim": 64,
}  # differences from the embedded model's config


class Row(NamedTuple):
    """Settings that stand to be compared, and how far above the reference their losses may end, as a share of it.

    A row without a bound shows what the others are for.
    """

    name: str
    label: str
    settings: dict[str, Any]
    bound: float | None


FLOAT32 = {"model.dtype": "float32", "optimizer.stochastic_rounding": False}
LEAN = {
    "optimizer.in_backward": True,
    "memory.activation_checkpointing": "full",
    "memory.loss_chunk_tokens": 256,
    "memory.loss_accumulation_dtype": "weight",
}
ROWS = (
    Row("float32", "float32 AdamW", FLOAT32, 0.0),
    Row("seed", "float32 AdamW, different data order", {**FLOAT32, "seed": 1}, 0.05),
    Row("float32_8bit", "float32 AdamW, 8-bit states", {**FLOAT32, "optimizer.name": "adamw_8bit"}, 0.05),
    Row("float32_backward", "float32 AdamW, in backward", {**FLOAT32, "optimizer.in_backward": True}, 0.0),
    Row("bfloat16", "bfloat16 AdamW, rounded to nearest", {"optimizer.stochastic_rounding": False}, None),
    Row("rounding", "bfloat16 AdamW, stochastic rounding", {}, 0.05),
    Row("adamw_8bit", "+ 8-bit states", {"optimizer.name": "adamw_8bit"}, 0.05),
    Row("lean", "+ in backward, checkpointing, bfloat16 accumulation", {"optimizer.name": "adamw_8bit", **LEAN}, 0.05),
    Row("adamw_8bit_torchao", "8-bit states, torchao", {"optimizer.name": "adamw_8bit_torchao"}, 0.15),
    Row("adamw_4bit", "4-bit states", {"optimizer.name": "adamw_4bit"}, 0.10),
    Row("adafactor", "Adafactor", {"optimizer.name": "adafactor"}, 0.10),
    Row("muon", "Muon", {"optimizer.name": "muon"}, 0.10),
    Row("apollo_mini", "APOLLO-Mini, lr 3e-3", {"optimizer.name": "apollo_mini", "optimizer.lr": 3e-3}, 0.10),
)
COLUMNS = ["setting", "optimizer state", "training loss", "difference", "held-out loss", "difference", "limit"]


def write_small_model(folder: Path) -> Path:
    """Write a model folder without weights, with the embedded model's tokenizer."""
    shutil.copytree(EMBEDDED_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SMALL_MODEL}))
    return folder


def train(
    row: Row, base: dict[str, Any], *, steps: int, seeds: int, device: str, timeout_seconds: float
) -> dict[str, Any]:
    """Run one row, each seed in its own process. Returns its losses, or the reason for having none."""
    result: dict[str, Any] = {"name": row.name, "label": row.label, "settings": row.settings, "bound": row.bound}
    last_losses, eval_losses, curves = list[float](), list[float](), list[list[float]]()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="lean_ft_convergence_") as folder:
            metrics = Path(folder) / "run/metrics.jsonl"
            settings = {"seed": seed, **base, **row.settings, "max_steps": steps, "device": device}
            command = recipe_command(RECIPE, {**settings, "output_dir": metrics.parent})
            measured = run_measured(command, timeout_seconds=timeout_seconds)
            result |= {"status": measured.status, "reason": measured.reason}
            if measured.status != "ok":
                return result
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            curves.append([line["loss"] for line in read_steps(metrics)])
            last_losses.append(statistics.fmean(curves[-1][-LAST_STEPS:]))
            eval_losses.append(next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line))
    result["losses"] = [round(statistics.fmean(losses), 5) for losses in zip(*curves, strict=True)]
    result["last_loss"], result["eval_loss"] = statistics.fmean(last_losses), statistics.fmean(eval_losses)
    if seeds > 1:
        result |= {"last_losses": last_losses, "eval_losses": eval_losses}
    return result | {"state": state_told(measured.output)}


def state_told(output: str) -> str:
    """The size of the optimizer state from the run's `optimizer` line."""
    _, _, told = next(line for line in output.splitlines() if "optimizer" in line and "state" in line).partition(
        "state "
    )
    return told.split(",")[0].strip()


def beyond(row: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Whether a row's losses exceed the reference by more than its limit."""
    if row["bound"] is None:
        return False
    return any(row[name] > reference[name] * (1 + row["bound"]) for name in ("last_loss", "eval_loss"))


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"{TASKS[settings['task']].description}, {settings['steps']} steps; training loss is the mean of the "
        f"last {settings['last_steps']} steps; differences are relative to float32 AdamW"
        + (f"; {seeds} seeds, ± standard error" if (seeds := settings.get("seeds", 1)) > 1 else "")
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    reference = result["rows"][0]
    cells = []
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], *["-"] * 5])
            continue
        shown = [row["label"], row["state"]]
        for name in ("last_loss", "eval_loss"):
            ours, theirs = (one.get(f"{name}es", [one[name]]) for one in (row, reference))
            changes = [100 * (loss / other - 1) for loss, other in zip(ours, theirs, strict=True)]
            shown.append(with_error(ours, ".4f"))
            shown.append("-" if row is reference else with_error(changes, "+.1f" if len(ours) == 1 else "+.2f", " %"))
        cells.append([*shown, "-" if row is reference or row["bound"] is None else f"{row['bound']:+.0%}"])
    return cells


def with_error(values: list[float], form: str, unit: str = "") -> str:
    """The mean, with its standard error for several values."""
    if len(values) == 1:
        return f"{values[0]:{form}}{unit.strip()}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{form}} ± {error:{form.replace('+', '')}}{unit}"


def draw_chart(result: dict[str, Any], path: Path) -> Path | None:
    """Draw the loss curves, averaged over 10 steps. Returns None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), dpi=160)
    colors = plt.get_cmap("tab10")
    for index, row in enumerate(row for row in result["rows"] if row["status"] == "ok"):
        losses, width = row["losses"], min(10, len(row["losses"]))
        smooth = [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]
        first = row["name"] == "float32"
        color = "#1b1f24" if first else colors((index - 1) % 10)
        steps = range(width, len(losses) + 1)
        axes.plot(steps, smooth, label=row["label"], color=color, lw=2.2 if first else 1.0, zorder=3 if first else 2)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean of ten steps")
    axes.set_title(f"Lean settings against float32 AdamW, {Hardware(result['hardware']).short_name}", loc="left")
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path


def main(
    task: Annotated[str, typer.Option(help=f"Task: {' or '.join(TASKS)}.")] = "embedded",
    data: Annotated[Path | None, typer.Option(help="GSM8K's training split, for the task gsm8k.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps per run.")] = 300,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a trained model, for the task trained.", envvar="TRAINED_MODEL")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per row, with different data orders.")] = 1,
    only: Annotated[str, typer.Option(help=f"Rows to run, comma-separated: {', '.join(r.name for r in ROWS)}.")] = "",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    jobs: Annotated[int, typer.Option(help="Concurrent runs.")] = 1,
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one run in seconds.")] = 600,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Total time in seconds; remaining runs are skipped.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result and the chart.")] = RESULTS,
) -> None:
    """Train a small model with each setting and compare the losses with float32 AdamW."""
    hardware = require_hardware(device)
    if task not in TASKS:
        raise typer.BadParameter(f"no task is called {task!r}; expected {' or '.join(TASKS)}")
    base = base_told = {**BASE, **TASKS[task].settings}
    if task == "trained" and model is None:
        raise typer.BadParameter("expected a trained model's folder", param_hint="--model")
    if task == "gsm8k":
        data = data or find_gsm8k()
        if data is None:
            raise typer.BadParameter("expected GSM8K's training split as JSONL", param_hint="--data")
        base = {**base, "data.source": data}
    names = [name.strip() for name in only.split(",") if name.strip()] or [row.name for row in ROWS]
    if unknown := [name for name in names if name not in {row.name for row in ROWS}]:
        raise typer.BadParameter(f"no row is called {unknown[0]!r}; expected some of {', '.join(r.name for r in ROWS)}")
    if "float32" not in names:
        raise typer.BadParameter("the row float32 is what the others are compared with: name it too")
    budget = Budget(timeout_seconds, budget_seconds)

    def run(row: Row) -> dict[str, Any]:
        result = train(
            row,
            base | own,
            steps=steps,
            seeds=seeds,
            device=hardware["device"],
            timeout_seconds=budget.timeout_seconds(),
        )
        last = f"{result['last_loss']:.4f}" if result["status"] == "ok" else result["reason"]
        console.print(f"{row.label:<45} {last}", markup=False)
        return result

    with tempfile.TemporaryDirectory(prefix="lean_ft_convergence_") as name, ThreadPoolExecutor(jobs) as pool:
        own: dict[str, Any] = {}
        if task == "gsm8k":
            own = {"model.path": write_small_model(Path(name) / "model")}
        elif task == "trained":
            own = {"model.path": model}
        rows = list(pool.map(run, [row for row in ROWS if row.name in names]))
    path = write_result(
        TASKS[task].result,
        benchmark="convergence",
        hardware=hardware,
        settings={"task": task, "steps": steps, "last_steps": LAST_STEPS, "seeds": seeds, "base": base_told},
        rows=rows,
        folder=results_dir,
    )
    result = print_result(path, describe, COLUMNS, table_cells)
    drawn = draw_chart(result, path.with_suffix(".png"))
    console.print(drawn or "matplotlib is not installed: no chart.")
    done = [row for row in rows if row["status"] == "ok"]
    failed = [row["label"] for row in done if done[0]["name"] == "float32" and beyond(row, done[0])]
    for label in failed:
        console.print(f"beyond its bound: {label}", markup=False)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
