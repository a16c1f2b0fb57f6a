"""Plan the presets with adapters before and after a change. Runs on one CPU.

    python benchmarks/adapter_launches.py --before COMMIT
    python benchmarks/adapter_launches.py --before COMMIT --only llama3_2_3b --results-dir /tmp/results

Each preset is planned on an H100, by the package of an earlier commit and by that of `--after`. The planned launches
are those of PyTorch on a simulated GPU (`planned_launches.py` compares them).

Writes `results/adapter_launches_<hardware>.json` after every row. Rows of the same two commits are kept.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, ROOT, console, describe_hardware, print_result, write_result

COLUMNS = ["preset", "launches before", "launches", "fewer", "step before", "step", "peak before", "peak"]
CARD = "H100"
GIB = 2**30
# Run with an earlier package, so it uses only what that has too.
PLAN = """
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from measure import overrides
from shapes import EMBEDDED_MODEL, write_model_folder
from lean_ft.plan.devices import find_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config, preset_recipe
from lean_ft.system.catalog import find_preset, find_recipe, load_recipe
name, file = sys.argv[1], find_preset(sys.argv[1])
recipe = load_recipe(find_recipe(preset_recipe(file)))
with tempfile.TemporaryDirectory() as folder:
    model = write_model_folder(name.partition("/")[0], Path(folder) / "model", EMBEDDED_MODEL)
    own = {"model.path": model, "model.random_init": True, "output_dir": Path(folder) / "run", "device": "cuda"}
    step = rehearse(recipe, load_config(recipe.Config, file, overrides(own)), find_device(sys.argv[3]))
launches = sum(launches.number for launches in step.ledger.values())
print(json.dumps({"launches": launches, "step_seconds": step.step_seconds, "peak_bytes": step.peak_bytes}))
"""


def presets_with_adapters() -> list[str]:
    """The fine-tuning presets of published models that train an adapter."""
    from lean_ft.settings.text import load_config, preset_recipe
    from lean_ft.system.catalog import find_recipe, load_recipe, presets

    finetune = load_recipe(find_recipe("finetune"))
    names = [name for name, file in presets().items() if preset_recipe(file) == "finetune"]
    of_published = [name for name in names if not name.startswith("tiny/")]
    return [name for name in of_published if load_config(finetune.Config, presets()[name], []).lora is not None]


def planned(preset: str, package: Path) -> dict[str, float]:
    """Launches, seconds and peak of the preset's step, by the package in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", PLAN, preset, str(ROOT / "benchmarks"), CARD]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{preset}: the planner of {package} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(
    before: Annotated[str, typer.Option(help="Commit to compare with.")],
    after: Annotated[str, typer.Option(help="Commit that is compared.")] = "HEAD",
    only: Annotated[str, typer.Option(help="Only presets whose name contains one of these, comma-separated.")] = "",
    results_dir: Path = RESULTS,
) -> None:
    """Plan every preset by both packages, and print the table."""
    hardware = describe_hardware("cpu")
    path = results_dir / f"adapter_launches_{hardware.slug}.json"
    settings = {"card": CARD, "before": _commit(before), "after": _commit(after)}
    stored = json.loads(path.read_text()) if path.exists() else {"rows": [], "settings": None}
    known = {row["label"]: row for row in stored["rows"] if stored["settings"] == settings}
    names = [name for name in presets_with_adapters() if any(part in name for part in only.split(","))]
    with tempfile.TemporaryDirectory(prefix="lean_ft_launches_") as folder:
        packages = {which: Path(folder) / which for which in ("before", "after")}
        for which, package in packages.items():
            package.mkdir()
            archive = subprocess.run(["git", "archive", settings[which]], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", package], input=archive.stdout, check=True)
        for name in names:
            if name not in known:
                plans = {which: planned(name, package) for which, package in packages.items()}
                known[name] = {"label": name, "status": "ok", **plans}
            console.print(" | ".join(_cells(known[name])), markup=False)
            rows = [known[label] for label in sorted(known)]
            more = {"hardware": hardware, "settings": settings, "rows": rows, "folder": results_dir}
            write_result("adapter_launches", benchmark="adapter_launches", **more)
    if names:
        print_result(path, describe, COLUMNS, table_cells)


def _commit(name: str) -> str:
    command = ["git", "rev-parse", "--short=12", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"fine-tuning presets with adapters on an {settings['card']}, planned: launches, time and peak memory of a "
        f"step, before (commit {settings['before']}) and now (commit {settings['after']})"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [_cells(row) for row in result["rows"]]


def _cells(row: dict[str, Any]) -> list[str]:
    before, after = row["before"], row["after"]
    return [
        row["label"],
        f"{before['launches']:,.0f}",
        f"{after['launches']:,.0f}",
        f"{1 - after['launches'] / before['launches']:.0%}",
        f"{before['step_seconds'] * 1000:,.0f} ms",
        f"{after['step_seconds'] * 1000:,.0f} ms",
        f"{before['peak_bytes'] / GIB:.2f} GiB",
        f"{after['peak_bytes'] / GIB:.2f} GiB",
    ]


if __name__ == "__main__":
    typer.run(main)
