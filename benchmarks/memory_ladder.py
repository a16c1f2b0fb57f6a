"""Measure one training job while memory techniques are added one at a time.

    python benchmarks/memory_ladder.py --shape qwen2_5_0_5b --batch-size 8 --length 512
    python benchmarks/memory_ladder.py --shape llama3_2_3b --batch-size 2 --length 4096 --packing bfd --device cuda

Every rung runs `full_finetune_single_device` in a new process, with random weights and text that fills every position,
and keeps the techniques of the rungs before it. The first rung already stores no attention scores, and its loss writes
the gradient over the logits, so it is leaner than a naive loop.

Writes `results/memory_ladder_<shape>_<batch>x<length>_<hardware>.json` and a chart.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measure import Budget, measure_training, recipe_command
from results import (
    RESULTS,
    Hardware,
    change,
    console,
    gibibytes,
    peaks,
    print_result,
    require_hardware,
    tokens_per_second,
    write_result,
)
from shapes import EMBEDDED_MODEL, num_parameters, write_documents, write_model_folder, write_text_rows

RECIPE = "full_finetune_single_device"


class Rung(NamedTuple):
    """A technique: name, label, added settings, and whether it needs a GPU."""

    name: str
    label: str
    settings: dict[str, Any]
    needs_gpu: bool = False


LADDER = (
    Rung("nothing", "bfloat16 AdamW", {"optimizer.name": "adamw", "memory.loss_chunk_tokens": 0}),
    Rung("compile", "+ compile", {"compile": True}),
    Rung("chunked_loss", "+ chunked cross-entropy", {"memory.loss_chunk_tokens": "auto"}),
    Rung("checkpointing", "+ activation checkpointing", {"memory.activation_checkpointing": "full"}),
    Rung("in_backward", "+ step in backward", {"optimizer.in_backward": True}),
    Rung("adamw_8bit", "+ 8-bit AdamW", {"optimizer.name": "adamw_8bit"}),
    Rung("loss_sums", "+ bfloat16 loss accumulation", {"memory.loss_accumulation_dtype": "weight"}),
    Rung("tile_mlp", "+ MLP in 8 tiles", {"memory.tile_mlp": 8}),
    Rung("adamw_4bit", "+ 4-bit AdamW", {"optimizer.name": "adamw_4bit"}),
    Rung("tied_gradient", "+ tied gradient on the host", {"memory.tied_gradient": "host"}, needs_gpu=True),
    Rung("offload", "+ activations on the host", {"memory.activation_offload": True}, needs_gpu=True),
    Rung("streamed", "+ optimizer state streamed from the host", {"optimizer.state": "streamed"}, needs_gpu=True),
)
# Alternatives to a rung, measured with all rungs up to the named one.
INSTEAD: dict[str, tuple[str, Rung]] = {
    rung.name: (beside, rung)
    for beside, rung in (
        ("checkpointing", Rung("every_n", "every second layer", {"memory.activation_checkpointing": "every_n"})),
        ("checkpointing", Rung("selective", "keep attention", {"memory.activation_checkpointing": "selective"})),
        (
            "checkpointing",
            Rung(
                "products",
                "keep attention and products",
                {"memory.activation_checkpointing": "selective", "memory.selective_keeps": "products"},
            ),
        ),
        ("checkpointing", Rung("budget", "the compiler's budget", {"memory.activation_checkpointing": "budget"})),
        ("checkpointing", Rung("float8", "float8 products", {"memory.float8_products": True}, needs_gpu=True)),
        ("adamw_8bit", Rung("separate", "tied gradient as two", {"memory.tied_gradient": "separate"})),
        ("adamw_8bit", Rung("torchao", "8-bit AdamW, torchao's", {"optimizer.name": "adamw_8bit_torchao"})),
        ("adamw_8bit", Rung("adafactor", "Adafactor", {"optimizer.name": "adafactor"})),
        ("adamw_8bit", Rung("muon", "Muon", {"optimizer.name": "muon"})),
        ("adamw_8bit", Rung("apollo_mini", "APOLLO-Mini", {"optimizer.name": "apollo_mini"})),
        ("loss_sums", Rung("returned", "freed memory given back", {"memory.host_pool": False})),
        ("adamw_8bit", Rung("paged", "states paged", {"optimizer.state": "paged"}, needs_gpu=True)),
    )
}


def rung_settings(name: str, ladder: tuple[Rung, ...] = LADDER) -> dict[str, Any]:
    """The settings of a rung and all rungs before it; of an alternative, up to its place in the ladder."""
    if name in INSTEAD:
        beside, rung = INSTEAD[name]
        return rung_settings(beside, ladder) | rung.settings
    settings: dict[str, Any] = {}
    for rung in ladder:
        settings |= rung.settings
        if rung.name == name:
            return settings
    names = [*(rung.name for rung in ladder), *INSTEAD]
    raise ValueError(f"unknown rung {name!r}; expected one of {', '.join(names)}.")


def measure_rungs(
    names: list[str],
    *,
    shape: str,
    batch_size: int,
    length: int,
    packing: str,
    steps: int,
    warmup_steps: int,
    device: str,
    budget: Budget,
    settle_steps: int = 0,
    tokenizer_folder: Path = EMBEDDED_MODEL,
    extra_settings: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measure each rung in a new process and print it when done."""
    labels = {rung.name: rung.label for rung in LADDER}
    labels |= {name: f"with {beside}: {rung.label}" for name, (beside, rung) in INSTEAD.items()}
    rows = []
    # The last step never ends: the run is stopped before it saves.
    num_steps = max(warmup_steps + steps, settle_steps) + 1
    with tempfile.TemporaryDirectory(prefix="lean_ft_ladder_") as folder:
        model = write_model_folder(shape, Path(folder) / "model", tokenizer_folder)
        text = Path(folder) / "text.jsonl"
        if packing == "none":
            write_text_rows(text, num_steps * batch_size, length)
        else:
            write_documents(text, num_steps * batch_size * length, length)
        for name in names:
            settings = {
                "model.path": model,
                "model.random_init": True,
                "data.source": text,
                "data.max_length": length,
                "data.packing": packing,
                "batch_size": batch_size,
                "max_steps": num_steps,
                "epochs": 100,  # max_steps ends the run, whatever the number of rows
                "device": device,
                **rung_settings(name),
                **(extra_settings or {}),
            }
            row = measure_training(
                lambda run, settings=settings: recipe_command(RECIPE, {**settings, "output_dir": run}),
                steps=steps,
                warmup_steps=warmup_steps,
                tokens_per_step=batch_size * length,
                timeout_seconds=budget.timeout_seconds(),
                settle_steps=settle_steps,
            )
            rows.append({"name": name, "label": labels[name], "settings": rung_settings(name), **row})
            console.print(f"{labels[name]:<30} {outcome(row)}", markup=False)
    return rows


def outcome(row: dict[str, Any]) -> str:
    """A row as text: `3.12 GiB, 98.3 tokens/s`, or the reason for no number."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    return f"{peaks(row)}, {tokens_per_second(row['tokens_per_second'])} tokens/s"


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    kinds = "is resident memory; the system's count is the kernel's peak"
    if result["hardware"]["device"] == "cuda":
        kinds = "is allocated memory; the system's count is the driver's"
    elif settings.get("settle_steps"):
        kinds += "; each run continues until its peak is stable"
    rows = "packed rows" if settings["packing"] != "none" else "rows"
    return (
        f"full fine-tuning of {settings['shape']} ({settings['parameters']:,} parameters, random weights), batch of "
        f"{settings['batch_size']} {rows} of {settings['length']} tokens, bfloat16; peak memory {kinds}; "
        f"tokens/s is the median of {settings['steps']} steps"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table. Changes are relative to the last row above that has a number."""
    on_gpu = result["hardware"]["device"] == "cuda"
    cells, before = [], {}
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["status"], "-", "-", "-", "-"])
            continue
        peak, speed = row["peak_memory_bytes"], row["tokens_per_second"]
        cells.append(
            [
                row["label"],
                peaks(row),
                change(peak, before.get("peak_memory_bytes")),
                gibibytes(row["peak_device_bytes"] if on_gpu else row["peak_rss_bytes"]),
                tokens_per_second(speed),
                change(speed, before.get("tokens_per_second")),
            ]
        )
        before = row
    return cells


COLUMNS = ["setting", "peak memory", "change", "system's count", "tokens/s", "change"]


def draw_chart(result: dict[str, Any], path: Path) -> Path | None:
    """Draw the ladder as bars of peak memory with speeds. Returns None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows, settings = result["rows"], result["settings"]
    ink, grey, track, bar = "#1b1f24", "#68707c", "#eef0f3", "#2f6fde"
    measured = [row["peak_memory_bytes"] for row in rows if row["status"] == "ok"]
    widest = max(measured, default=1)
    unit, unit_bytes = ("GiB", 2**30) if widest >= 2**30 else ("MiB", 2**20)

    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.58 * len(rows)), dpi=160)
    for place, row in enumerate(rows):
        axes.barh(place, widest / unit_bytes, height=0.62, color=track, zorder=1)
        if row["status"] != "ok":
            axes.text(widest / unit_bytes * 0.012, place, row["status"], va="center", color=grey, style="italic")
            continue
        peak = row["peak_memory_bytes"] / unit_bytes
        share = peak * unit_bytes / widest
        axes.barh(place, peak, height=0.62, color=bar, alpha=0.55 + 0.45 * (1 - share), zorder=2)
        inside = share > 0.22
        axes.text(
            peak - widest / unit_bytes * 0.012 if inside else peak + widest / unit_bytes * 0.012,
            place,
            f"{peak:.1f} {unit}",
            ha="right" if inside else "left",
            va="center",
            color="white" if inside else ink,
            weight="bold",
            zorder=3,
        )
        speed = f"{tokens_per_second(row['tokens_per_second'])} tokens/s"
        axes.text(widest / unit_bytes * 1.02, place, speed, va="center", color=ink)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], color=ink)
    axes.set_xlim(0, widest / unit_bytes * 1.22)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks([])
    axes.tick_params(left=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.text(0.02, 0.955, "Peak memory of full fine-tuning", size=14, weight="bold", color=ink, va="top")
    caption = f"{settings['shape']}, batch {settings['batch_size']} x {settings['length']} tokens, bfloat16; "
    figure.text(
        0.02,
        0.955 - 0.32 / figure.get_figheight(),
        caption + Hardware(result["hardware"]).short_name,
        color=grey,
        va="top",
    )
    figure.subplots_adjust(top=1 - 0.85 / figure.get_figheight(), bottom=0.04, left=0.28, right=0.98)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def main(
    shape: Annotated[str, typer.Option(help="Model shape, from shapes.py.")] = "qwen2_5_0_5b",
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    packing: Annotated[str, typer.Option(help="`none`: one text per row; `bfd`: packed rows.")] = "none",
    steps: Annotated[int, typer.Option(help="Counted steps.")] = 4,
    warmup_steps: Annotated[int, typer.Option(help="Warm-up steps, which compile.")] = 2,
    settle_steps: Annotated[
        int, typer.Option(help="On a CPU: maximum steps to wait until the peak is stable; 0: do not wait.")
    ] = 200,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    rungs: Annotated[str, typer.Option(help="Rungs, comma-separated; default: all that the device supports.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one rung in seconds.")] = 3600,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Total time in seconds; remaining runs are skipped.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result and the chart.")] = RESULTS,
    results_name: Annotated[str, typer.Option(help="Prefix of the result's name.")] = "memory_ladder",
    chart: Annotated[bool, typer.Option(help="Draw the chart; needs matplotlib.")] = True,
    chart_from: Annotated[Path | None, typer.Option(help="Draw the chart of this result without measuring.")] = None,
) -> None:
    """Measure the recipe while memory techniques are added one at a time."""
    if chart_from is not None:
        drawn = draw_chart(json.loads(chart_from.read_text()), chart_from.with_suffix(".png"))
        console.print(drawn or "matplotlib is not installed: no chart.")
        return
    hardware = require_hardware(device)
    settle_steps = settle_steps if hardware["device"] == "cpu" else 0
    known = {rung.name: rung for rung in LADDER} | {name: rung for name, (_, rung) in INSTEAD.items()}
    names = [name.strip() for name in rungs.split(",") if name.strip()]
    for name in names:
        rung_settings(name)  # raises for an unknown name before anything runs
    if not names:
        names = [rung.name for rung in LADDER if hardware["device"] == "cuda" or not rung.needs_gpu]
    # Changes are relative to the rung before, so sort the rungs in the order of the ladder.
    names.sort(key=list(known).index)

    console.print(f"{shape}, {num_parameters(shape):,} parameters, {batch_size} x {length}, on {hardware.short_name}")
    rows = measure_rungs(
        names,
        shape=shape,
        batch_size=batch_size,
        length=length,
        packing=packing,
        steps=steps,
        warmup_steps=warmup_steps,
        device=device,
        budget=Budget(timeout_seconds, budget_seconds),
        settle_steps=settle_steps,
    )
    path = write_result(
        f"{results_name}_{shape}_{batch_size}x{length}",
        benchmark="memory_ladder",
        hardware=hardware,
        settings={
            "shape": shape,
            "parameters": num_parameters(shape),
            "batch_size": batch_size,
            "length": length,
            "packing": packing,
            "steps": steps,
            "warmup_steps": warmup_steps,
            "settle_steps": settle_steps,
        },
        rows=rows,
        folder=results_dir,
    )
    result = print_result(path, describe, COLUMNS, table_cells)
    if chart:
        drawn = draw_chart(result, path.with_suffix(".png"))
        console.print(drawn or "matplotlib is not installed: no chart.")


if __name__ == "__main__":
    typer.run(main)
