"""Plan a step of every preset on one card, and compare it with the card's published rates. Runs on one CPU.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --only llama3_2_3b --results-dir /tmp/results

The share is the time of all kernels at the published rates of arithmetic and memory traffic (the roofline of Williams
et al. 2009), divided by the planned time of the step. The planner's own rates were fitted to published training speeds
(docs/speed.md).

Writes `results/roofline_<hardware>.json`.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import overrides
from results import RESULTS, console, describe_hardware, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

from lean_ft.plan.devices import find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.plan.result import Launches
from lean_ft.settings.text import load_config, preset_recipe
from lean_ft.system.catalog import find_preset, find_recipe, load_recipe
from lean_ft.system.catalog import presets as shipped

KINDS = ("products", "attention", "other")
COLUMNS = ["preset", "launches", "step", "tokens/s", "share of published rates", *KINDS, "host"]
CARD = "H100"


def main(
    only: Annotated[str, typer.Option(help="Only presets whose name contains this text.")] = "",
    results_dir: Path = RESULTS,
) -> None:
    """Plan the presets of published models, and print the table."""
    rows = []
    for name in shipped():
        if only in name and not name.startswith("tiny/"):
            rows.append(planned(name))
            console.print(" | ".join(_cells(rows[-1])), markup=False)
    if not rows:
        raise typer.BadParameter("no preset contains this text", param_hint="--only")
    if only:
        console.print(json.dumps(rows, indent=2), markup=False)
        return
    path = write_result(
        "roofline", benchmark="roofline", hardware=describe_hardware("cpu"), settings={"card": CARD}, rows=rows,
        folder=results_dir
    )  # fmt: skip
    print_result(path, describe, COLUMNS, table_cells)


def planned(preset: str) -> dict[str, Any]:
    """A row: launches, seconds and shares of the preset's step."""
    file, device = find_preset(preset), find_device(CARD)
    recipe = load_recipe(find_recipe(preset_recipe(file) or ""))
    with tempfile.TemporaryDirectory(prefix="lean_ft_roofline_") as folder:
        model = write_model_folder(preset.partition("/")[0], Path(folder) / "model", EMBEDDED_MODEL)
        own = {"model.path": model, "model.random_init": True, "output_dir": Path(folder) / "run", "device": "cuda"}
        step = rehearse(recipe, load_config(recipe.Config, file, overrides(own)), device)
    kinds = dict.fromkeys(KINDS, Launches())
    for (_, operation), launches in step.ledger.items():
        is_attention = any(part in operation for part in ("attention", "flash"))
        kind = "attention" if is_attention else "products" if launches.flops else "other"
        kinds[kind] = kinds[kind].plus(launches)
    num_launches = sum(launches.number for launches in kinds.values())
    return {
        "label": preset,
        "status": "ok",
        "launches": num_launches,
        "step_seconds": step.step_seconds,
        "tokens_per_second": step.tokens_per_second,
        "share_at_limit": step.share_at_limit,
        "shares": {kind: launches.seconds / step.step_seconds for kind, launches in kinds.items()},
        "host_share": num_launches * device.launch_seconds / step.step_seconds,
    }


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return (
        f"every preset on an {result['settings']['card']}, planned. Share of published rates: time of all kernels at "
        "the card's published rates, of the step. Products, attention, other: planned time of these kernels, of the "
        "step. Host: time that the host needs for launches, of the step; at 100% the host limits the step"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [_cells(row) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> list[str]:
    shares = [row["share_at_limit"], *row["shares"].values(), row["host_share"]]
    return [
        row["label"],
        f"{row['launches']:,.0f}",
        f"{row['step_seconds']:.2f} s",
        f"{row['tokens_per_second']:,.0f}",
        *(f"{share:.0%}" for share in shares),
    ]


if __name__ == "__main__":
    typer.run(main)
