"""Compare the launches that the planner counts with those of a simulated GPU.

    make test-pretended-gpu                               # once: installs CUDA wheels and builds the simulated GPU
    .venv-pretended-gpu/bin/python benchmarks/planned_launches.py
    .venv-pretended-gpu/bin/python benchmarks/planned_launches.py --cards H100 --only gpt_oss

Each preset runs three steps on a simulated H100 and a simulated A100 (`tests/pretended_gpu`), where PyTorch launches
kernels as on a card and none runs. The launches and host waits of the third step stand next to the launches of the
plan, compiled as the preset is, and uncompiled. Models have a few layers, one period of their kinds of layers, because
the others repeat them. Then small random models of each family, uncompiled.

Writes `results/planned_launches_<card>_<hardware>.json` after every row. Rows with a number are skipped without
--again; --predict runs only the planner again.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import ROOT, last_error, overrides
from results import RESULTS, commit, console, describe_hardware, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

COLUMNS = ["setting", "layers", "compiled", "planned", "counted", "error", "host waits", "slow path"]
CARDS = {"H100": "H100", "A100": "A100 80GB"}  # the simulated card -> the planner's
NUM_LAYERS = 6  # holds each kind of layer of the presets at least once
CARD = ROOT / "tests" / "pretended_gpu"
STEPS = ROOT / "benchmarks" / "pretended_steps.py"
FULL = "full_finetune_single_device"
_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")  # an entry for each layer
_FAMILY_SETTINGS = {"data.packing": "bfd", "data.max_length": 256, "compile": False, "optimizer.name": "adamw"}


def settings() -> list[dict[str, Any]]:
    """The rows: every preset compiled and not, and every family."""
    from lean_ft.settings.text import preset_recipe
    from lean_ft.system.catalog import find_preset, presets

    fine_tuning = ("finetune", "full_finetune_single_device")  # the batches of pretended_steps.py
    names = [
        name for name, file in presets().items() if not name.startswith("tiny/") and preset_recipe(file) in fine_tuning
    ]
    rows = [
        {"label": name, "recipe": preset_recipe(find_preset(name)), "preset": name, "compiled": compiled}
        for name in names
        for compiled in (True, False)
    ]
    sys.path.insert(0, str(ROOT))
    from tests.models.family_cases import FIRST_CASES

    families = FIRST_CASES.values()
    return rows + [{"label": name, "recipe": FULL, "preset": None, "compiled": False} for name in families]


def write_small_model(row: dict[str, Any], folder: Path) -> int:
    """Write the row's model with few layers, and return their number."""
    if row["preset"] is None:
        from transformers import CONFIG_MAPPING

        from tests.models.family_cases import CASES, SIZES

        model_type, fields = CASES[row["label"]]
        fields = {name: 8192 if name.startswith("vocab_size") else value for name, value in fields.items()}
        CONFIG_MAPPING[model_type](**{**SIZES, "vocab_size": 8192, **fields}).save_pretrained(folder)
        return SIZES["num_hidden_layers"]
    write_model_folder(row["preset"].partition("/")[0], folder, EMBEDDED_MODEL)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if "num_kv_shared_layers" in text:  # half of the layers share, as about half of the published model's
        text["num_kv_shared_layers"] = min(text["num_kv_shared_layers"], NUM_LAYERS)
        text["num_hidden_layers"] = NUM_LAYERS + text["num_kv_shared_layers"]
    else:
        text["num_hidden_layers"] = NUM_LAYERS
    for name in _LISTS:  # the last layer stays what it is
        if isinstance(text.get(name), list):
            text[name] = [*text[name][: text["num_hidden_layers"] - 1], text[name][-1]]
    (folder / "config.json").write_text(json.dumps(config))
    return text["num_hidden_layers"]


def run(row: dict[str, Any], card: str, timeout_seconds: float, counted: dict[str, Any] | None) -> dict[str, Any]:
    """The row with its planned and counted launches, or why there are none. `counted`: known counts."""
    from lean_ft.plan.devices import find_device
    from lean_ft.plan.rehearsal import rehearse
    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_preset, find_recipe, load_recipe

    row = {**row, **(counted or {}), "commit": commit(), "status": "ok", "reason": None}
    with tempfile.TemporaryDirectory(prefix="lean_ft_launches_") as folder:
        model = Path(folder) / "model"
        row["layers"] = write_small_model(row, model)
        own = {"model.path": model, "output_dir": Path(folder) / "run"}
        own |= _FAMILY_SETTINGS if row["preset"] is None else {} if row["compiled"] else {"compile": False}
        recipe = load_recipe(find_recipe(row["recipe"]))
        fixed = ["device=cuda", "plan=false", "model.random_init=true", "data.source=not-read.jsonl"]
        try:
            preset = None if row["preset"] is None else find_preset(row["preset"])
            cfg = load_config(recipe.Config, preset, [*fixed, *overrides(own)])
            plan = rehearse(recipe, cfg, find_device(CARDS[card]))
        except ValueError as error:
            return {**row, "status": "not planned", "reason": str(error)}
        row |= {
            "planned": sum(launches.number for launches in plan.ledger.values()),
            "slow": [reason.partition(". ")[0] for reason in plan.slow_paths],
        }  # without the command for this machine
        if counted:
            return row
        of_preset = ["--config", row["preset"]] if row["preset"] else []
        try:
            done = subprocess.run(
                [str(CARD / "run.sh"), sys.executable, str(STEPS), row["recipe"], *of_preset, *overrides(own)],
                cwd=ROOT,
                # Larger copies are skipped, because nothing reads them.
                env={**os.environ, "PRETENDED_GPU": card, "PRETENDED_GPU_TOUCH": "65536", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            return {**row, "status": "timed out", "reason": f"took longer than {timeout_seconds:.0f} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            return {**row, "status": "failed", "reason": last_error(done.stdout + done.stderr)}
        found = json.loads(lines[-1])
        return row | {"counted": found["launches"], "host_waits": found["host_waits"]}


def main(
    cards: Annotated[str, typer.Option(help="Simulated cards, comma-separated.")] = ",".join(CARDS),
    only: Annotated[str, typer.Option(help="Only rows whose label contains one of these, comma-separated.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one row in seconds.")] = 600,
    again: Annotated[bool, typer.Option(help="Run rows again that already have a number.")] = False,
    predict: Annotated[bool, typer.Option(help="Run only the planner again; keep the counts.")] = False,
    results_dir: Path = RESULTS,
) -> None:
    """Count the launches of every row, and plan them."""
    if not (CARD / "build" / "libcuda.so.1").exists():
        console.print("the simulated GPU is not built: run `make test-pretended-gpu`. Nothing was run.", markup=False)
        raise typer.Exit(0)
    hardware, rows = describe_hardware("cpu"), settings()
    for card in cards.split(","):
        name = f"planned_launches_{card.lower()}"
        path = results_dir / f"{name}_{hardware.slug}.json"
        known = {_key(row): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
        for row in rows:
            before = known.get(_key(row), {})
            is_there = before.get("status") == "ok"
            if not any(part in row["label"] for part in only.split(",")) or (is_there and not (again or predict)):
                continue
            if predict and not is_there:
                continue
            kept = {key: before[key] for key in ("counted", "host_waits")} if is_there and predict else None
            known[_key(row)] = run(row, card, timeout_seconds, kept)
            console.print(" | ".join(_cells(known[_key(row)])), markup=False)
            shown = [known[_key(row)] for row in rows if _key(row) in known]
            more = {"hardware": hardware, "settings": {"card": card}, "rows": shown, "folder": results_dir}
            write_result(name, benchmark="planned_launches", **more)
        if path.exists():
            print_result(path, describe, COLUMNS, table_cells)


def _key(row: dict[str, Any]) -> str:
    return f"{row['label']}, {'compiled' if row['compiled'] else 'uncompiled'}"


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        f"launches of one step on a simulated {result['settings']['card']}, where no kernel runs, and launches that "
        "the planner counts. Models have the presets' shapes and a few layers. Error: of the planned launches. Host "
        "waits: the times that the host waits for the device in a step"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [_cells(row) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return [row["label"], row["status"], *["-"] * (len(COLUMNS) - 2)]
    planned, counted = row["planned"], row["counted"]
    numbers = [f"{planned:,.0f}", f"{counted:,}", f"{planned / counted - 1:+.1%}", f"{row['host_waits']:,}"]
    slow = "; ".join(reason.partition(" ")[0] for reason in row["slow"]) or "-"
    return [row["label"], str(row["layers"]), "yes" if row["compiled"] else "no", *numbers, slow]


if __name__ == "__main__":
    typer.run(main)
