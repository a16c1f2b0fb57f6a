"""Compare the planner's predicted peak with the measured peak, over shapes and settings.

    python benchmarks/planner_accuracy.py                      # three shapes cut to six layers: twelve settings, then four
    python benchmarks/planner_accuracy.py --objectives         # recipes with pairs, labels and teachers, on the first shape
    python benchmarks/planner_accuracy.py --shapes llama3_2_3b --layers 0 --batch-size 2 --length 4096 --device cuda

Each setting is planned as by `leanft plan` and then run in a new process. On a GPU the measured value is the
allocator's peak. On a CPU it is the peak resident size minus the base of the process: interpreter, libraries and, with
`compile`, the compiler. The base is measured with the same settings on a very small model, minus its prediction. Runs
of the first shape continue until the peak is stable, and the table also shows the peak of the first steps. Other
shapes, and all with `--settle-steps 0`, run two steps.

Writes `results/planner_accuracy_<hardware>.json`, or `results/planner_accuracy_objectives_<hardware>.json`.
"""  # noqa: E501

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from compare_trl import write_weights
from measure import Budget, measure_training, recipe_command, rehearse_recipe
from memory_ladder import RECIPE
from results import RESULTS, console, gibibytes, peaks, print_result, require_hardware, write_result
from shapes import EMBEDDED_MODEL, write_model_folder, write_pair_rows, write_text_rows

COLUMNS = ["shape", "settings", "predicted", "measured", "error", "planning time"]
NO_SIZE = "tiny"
# Names of measured peaks, and of the peaks without the base.
PEAKS = {"peak_memory_bytes": "measured_bytes", "first_peak_memory_bytes": "first_measured_bytes"}

_CHECKPOINTED = {"memory.activation_checkpointing": "full"}
_IN_BACKWARD = {"optimizer.name": "adamw_8bit", "optimizer.in_backward": True}
# Measured for every shape.
CHOSEN: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer.name": "sgd"},
    "AdamW, checkpointing": _CHECKPOINTED,
    "8-bit AdamW in backward, compile": {**_IN_BACKWARD, "compile": True},
    "8-bit AdamW in backward, compile, selective, bfloat16 accumulation": {
        **_IN_BACKWARD,
        "compile": True,
        "memory.activation_checkpointing": "selective",
        "memory.loss_accumulation_dtype": "weight",
    },
}
# Measured only for the first shape.
SETTINGS: dict[str, dict[str, Any]] = {
    **CHOSEN,
    "AdamW": {},
    "AdamW, unchunked loss": {"memory.loss_chunk_tokens": 0},
    "AdamW, compile": {"compile": True},
    "AdamW, every second layer checkpointed": {"memory.activation_checkpointing": "every_n"},
    "AdamW, matrix products kept": {
        "memory.activation_checkpointing": "selective",
        "memory.selective_keeps": "products",
    },
    "Adafactor, checkpointing": {"optimizer.name": "adafactor", **_CHECKPOINTED},
    "4-bit AdamW in backward, checkpointing": {**_IN_BACKWARD, "optimizer.name": "adamw_4bit", **_CHECKPOINTED},
    "8-bit AdamW in backward, checkpointing, tiles": {**_IN_BACKWARD, **_CHECKPOINTED, "memory.tile_mlp": 4},
}
_LEAN = {**_IN_BACKWARD, **_CHECKPOINTED}
# Other objectives with their settings.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo, references cached": {"recipe": "dpo", **_LEAN},
    "dpo, reference resident": {"recipe": "dpo", **_LEAN, "reference.kind": "model"},
    "dpo, LoRA": {"recipe": "dpo", **_CHECKPOINTED, "lora.rank": 16},
    "kto, reference resident": {"recipe": "kto", **_LEAN, "reference.kind": "model"},
    "reward": {"recipe": "reward", **_LEAN},
    "distill": {"recipe": "distill", **_LEAN, "data.train_on": "all"},
}


def main(
    shapes: Annotated[str, typer.Option(help="Names from benchmarks/shapes.py, comma-separated.")] = (
        "qwen2_5_0_5b,llama3_2_1b,llama3_2_3b"
    ),
    layers: Annotated[int, typer.Option(help="Layers to keep of each shape; 0: all.")] = 6,
    objectives: Annotated[bool, typer.Option(help="Measure other objectives, on the first shape.")] = False,
    batch_size: int = 5,
    length: int = 512,
    settle_steps: Annotated[
        int, typer.Option(help="On a CPU: maximum steps to wait until the peak is stable; 0: do not wait.")
    ] = 200,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    budget_minutes: Annotated[float, typer.Option(help="Total time in seconds.")] = 60.0,
    results_dir: Path = RESULTS,
) -> None:
    """Compare predicted and measured peaks."""
    hardware = require_hardware(device)
    budget = Budget(budget_minutes * 60)
    path, rows = results_dir, []
    on_cpu = hardware["device"] == "cpu"
    settle_steps = settle_steps if on_cpu else 0
    bases: dict[tuple[bool, str], Any] = {}
    wanted = shapes.split(",")[:1] if objectives else shapes.split(",")
    for number, shape in enumerate(wanted):
        common = (0 if number else settle_steps, hardware["device"], budget)
        for label, settings in (OBJECTIVES if objectives else CHOSEN if number else SETTINGS).items():
            if on_cpu and (number > 0, label) not in bases:
                # One row per pass; kto needs two.
                predicted, measured = _both(NO_SIZE, 0, settings, 2 if objectives else 1, 64, *common)
                if measured["status"] == "ok":
                    bases[number > 0, label] = {
                        peak: measured[peak] - predicted["peak_bytes"] for peak in PEAKS if peak in measured
                    }
            predicted, measured = _both(shape, layers, settings, batch_size, length, *common)
            row = {"shape": shape, "label": label, "settings": settings, **measured, "predicted": predicted}
            if measured["status"] == "ok":
                for peak, name in PEAKS.items():
                    if peak in measured:
                        row[name] = measured[peak] - bases.get((number > 0, label), {}).get(peak, 0)
                row["error"] = predicted["peak_bytes"] / row["measured_bytes"] - 1
            rows.append(row)
            console.print(" | ".join(_cells(row)), markup=False)
            # Write after each row, so that an interrupted run keeps its results.
            path = write_result(
                "planner_accuracy_objectives" if objectives else "planner_accuracy",
                benchmark="planner_accuracy",
                hardware=hardware,
                settings={
                    "shapes": ",".join(wanted),
                    "layers": layers,
                    "objectives": objectives,
                    "batch_size": batch_size,
                    "length": length,
                    "settle_steps": settle_steps,
                },
                rows=rows,
                folder=results_dir,
            )
    print_result(path, describe, COLUMNS, table_cells)


def _both(
    shape: str,
    layers: int,
    settings: dict[str, Any],
    batch_size: int,
    length: int,
    settle_steps: int,
    device: str,
    budget: Budget,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prediction and the measurement of one setting."""
    from lean_ft.plan.devices import choose_device

    num_steps = max(2, settle_steps) + 1
    with tempfile.TemporaryDirectory(prefix="lean_ft_planner_") as name:
        folder, recipe = Path(name), settings.get("recipe", RECIPE)
        model = _cut(write_model_folder(shape, folder / "model", EMBEDDED_MODEL), layers)
        source, tokens_per_step = _rows_of(recipe, folder / "rows.jsonl", num_steps, batch_size, length)
        if recipe == "distill":
            write_weights(model)
            settings = {**settings, "distill.teacher": model}
        settings = {
            "model.path": model,
            "model.random_init": recipe != "distill",
            "data.source": source,
            "data.max_length": length,
            "batch_size": batch_size,
            "max_steps": num_steps,
            "epochs": 100,
            "device": device,
            **{key: value for key, value in settings.items() if key != "recipe"},
        }
        predicted = rehearse_recipe(recipe, {**settings, "output_dir": folder / "planned"}, choose_device(None, device))
        measured = measure_training(
            lambda run: recipe_command(recipe, {**settings, "output_dir": run}),
            steps=1,
            warmup_steps=1,
            tokens_per_step=tokens_per_step,
            timeout_seconds=budget.timeout_seconds(),
            settle_steps=settle_steps,
        )
    return predicted, measured


def _rows_of(recipe: str, path: Path, num_steps: int, batch_size: int, length: int) -> tuple[Path, int]:
    """Write rows for this number of steps. Returns the file and the positions per step."""
    if recipe in (RECIPE, "distill"):
        return write_text_rows(path, num_steps * batch_size, length), batch_size * length
    prompt = length // 4
    source = write_pair_rows(path, num_steps * batch_size, prompt, length)
    # kto makes two rows of a pair, other recipes one row with a shared prompt.
    return source, batch_size * (length if recipe == "kto" else 2 * length - prompt)


def _cut(folder: Path, layers: int) -> Path:
    """Keep this number of layers of the model; width and output layer do not change."""
    if layers:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "num_hidden_layers": min(layers, config["num_hidden_layers"])}))
    return folder


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    kind = "allocated" if result["hardware"]["device"] == "cuda" else "resident, without the base of the process"
    objectives = "the listed recipes" if settings.get("objectives") else "full fine-tuning"
    until = ", after the peak is stable or after 2 steps" if settings.get("settle_steps") else ""
    return (
        f"predicted and measured peak memory ({kind}, new processes{until}) of {objectives} in bfloat16, batch of "
        f"{settings['batch_size']} rows of {settings['length']} tokens, random weights"
        + (f", {settings['layers']} layers of each shape" if settings["layers"] else "")
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [_cells(row) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> list[str]:
    error = row.get("error")
    return [
        row["shape"],
        row["label"],
        gibibytes(row["predicted"]["peak_bytes"]),
        peaks(row, "measured_bytes"),
        "-" if error is None else f"{error:+.1%}",
        f"{row['predicted']['planning_seconds']:.1f} s",
    ]


if __name__ == "__main__":
    typer.run(main)
