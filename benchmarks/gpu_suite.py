"""Run all GPU benchmarks and tests within a time budget.

    python benchmarks/gpu_suite.py --budget-seconds 540 --results-dir benchmarks/results
    python benchmarks/gpu_suite.py --stages tests,ladder_llama
    python benchmarks/gpu_suite.py --device cpu --shape tiny        # a trial without a GPU

The most important stages run first. Each stage is a benchmark that writes its own result. Stages beyond the budget are
listed as not run, and missing peers as absent. Nothing is downloaded. Without a GPU the suite exits, unless you pass
--device cpu.

Writes `results/gpu_suite_<hardware>.json` after every stage: stages, times, and the end of each output.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measure import ROOT, Budget, run_measured
from results import RESULTS, console, print_table, require_hardware, write_result
from shapes import shape_of

BENCHMARKS = Path(__file__).resolve().parent
SHORTEST_STAGE_SECONDS = 45.0  # with less time, a stage would replace a good result by an empty one


class Sizes(NamedTuple):
    """Sizes that the stages use."""

    device: str
    llama: str
    llama_batch: int
    llama_length: int
    qwen: str
    qwen_batch: int
    qwen_length: int
    steps: int
    repeats: int


FULL = Sizes("cuda", "llama3_2_3b", 2, 4096, "qwen2_5_0_5b", 8, 512, steps=6, repeats=20)


def reduced(device: str, shape: str) -> Sizes:
    """The same stages with one small shape."""
    return Sizes(device, shape, 2, 128, shape, 2, 64, steps=2, repeats=2)


class Stage(NamedTuple):
    """A name, a description, and the command without shared options."""

    name: str
    what: str
    command: Callable[[Sizes], list[str]]
    script: bool = True  # a benchmark that accepts --device, --results-dir and --budget-seconds


def _ladder(shape: str, batch: int, length: int, packing: str, sizes: Sizes) -> list[str]:
    return [
        *("memory_ladder.py", "--shape", shape, "--batch-size", str(batch), "--length", str(length)),
        *("--packing", packing, "--steps", str(sizes.steps), "--warmup-steps", "3", "--no-chart"),
    ]


def _loss(shape: str, tokens: int, sizes: Sizes) -> list[str]:
    chunk = str(min(1024, tokens // 2))
    return [
        *("linear_cross_entropy.py", "--shape", shape, "--tokens", str(tokens), "--chunk-tokens", chunk),
        *("--repeats", str(sizes.repeats)),
    ]


STAGES = (
    Stage(
        "tests",
        "the tests that need a GPU",
        lambda sizes: ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"],
        script=False,
    ),
    Stage(
        "presets",
        "steps of presets next to their plans",
        lambda s: ["gpu_presets.py", *([] if s.llama == FULL.llama else ["--presets", f"{s.llama}/full"])],
    ),
    Stage("kernels", "attention, expanding and sums next to their alternatives", lambda s: ["gpu_kernels.py"]),
    Stage(
        "ladder_llama",
        "memory techniques one by one, packed rows of many documents",
        lambda s: _ladder(s.llama, s.llama_batch, s.llama_length, "bfd", s),
    ),
    Stage(
        "techniques",
        "what takes the place of a rung: checkpointing by operation, float8, other update rules, paged states",
        lambda s: [
            *_ladder(s.llama, s.llama_batch, s.llama_length, "bfd", s),
            *(
                "--rungs",
                "checkpointing,every_n,selective,products,budget,float8,adamw_8bit,torchao,adafactor,muon,apollo_mini,paged",
            ),
            *("--results-name", "techniques"),
        ],
    ),
    Stage(
        "loss",
        "the output loss against its peers",
        lambda s: _loss(s.llama, s.llama_batch * s.llama_length, s),
    ),
    Stage(
        "attention",
        "packed against padded attention",
        lambda s: [
            *("attention.py", "--shape", s.llama, "--batch-size", str(s.llama_batch)),
            *("--length", str(s.llama_length), "--repeats", str(s.repeats)),
        ],
    ),
    Stage(
        "optimizer_step",
        "one update of all weights against the peers",
        lambda s: ["optimizer_step.py", "--shape", s.qwen, "--repeats", str(s.repeats)],
    ),
    Stage(
        "ladder_qwen",
        "memory techniques one by one, a small model with a large vocabulary",
        lambda s: _ladder(s.qwen, s.qwen_batch, s.qwen_length, "none", s),
    ),
    Stage(
        "loss_qwen",
        "the output loss against its peers, at the small model's size",
        lambda s: _loss(s.qwen, s.qwen_batch * s.qwen_length, s),
    ),
)


def run_stage(stage: Stage, sizes: Sizes, *, results_dir: Path, budget: Budget) -> dict[str, Any]:
    """Run a stage within the remaining time and return its row."""
    row = {"name": stage.name, "label": f"{stage.name}: {stage.what}"}
    command = stage.command(sizes)
    left = budget.timeout_seconds()
    if left < SHORTEST_STAGE_SECONDS:
        return row | {"status": "not run", "reason": "no time was left for it", "seconds": 0.0}
    if stage.script:
        if not (BENCHMARKS / command[0]).exists():
            return row | {"status": "absent", "reason": f"there is no benchmarks/{command[0]}", "seconds": 0.0}
        # The script should end by itself and write its results; otherwise it is killed.
        of_its_own = left - 15
        command = [
            *(str(BENCHMARKS / command[0]), *command[1:], "--device", sizes.device),
            *("--results-dir", str(results_dir.resolve()), "--budget-seconds", f"{of_its_own:.0f}"),
        ]
    measured = run_measured([sys.executable, *command], timeout_seconds=left)
    if measured.status == "ok" and not stage.script:
        measured.reason = (measured.output.strip().splitlines() or [""])[-1]  # counts of passed and skipped tests
    return row | {
        "status": measured.status,
        "reason": measured.reason,
        "seconds": round(measured.seconds, 1),
        "output": measured.output.replace(f"{ROOT}/", "")[-6000:],
    }


def main(
    budget_seconds: Annotated[float, typer.Option(help="Total time in seconds.")] = 540,
    stages: Annotated[
        str, typer.Option(help=f"Rows to run, comma-separated: {', '.join(s.name for s in STAGES)}, with commas.")
    ] = "",
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the suite without one.")] = "cuda",
    shape: Annotated[str, typer.Option(help="Measure only this shape, at small sizes.")] = "",
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON results.")] = RESULTS,
) -> None:
    """Run all GPU benchmarks and tests."""
    known = {stage.name: stage for stage in STAGES}
    names = [name.strip() for name in stages.split(",") if name.strip()] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"no stage is called {unknown[0]!r}; expected some of {', '.join(known)}")
    if shape:
        shape_of(shape)
    hardware = require_hardware(device)
    sizes = reduced(hardware["device"], shape) if shape else FULL._replace(device=hardware["device"])
    budget = Budget(budget_seconds, budget_seconds)
    console.print(f"{hardware.full_name}; {budget_seconds:.0f} s for {', '.join(names)}", markup=False)

    rows: list[dict[str, Any]] = []
    for name in names:
        console.rule(f"{name}: {known[name].what}", align="left")
        row = run_stage(known[name], sizes, results_dir=results_dir, budget=budget)
        rows.append(row)
        console.print(row.get("output", "").rstrip(), markup=False)
        console.print(f"{row['status']}" + (f": {row['reason']}" if row["reason"] else ""), markup=False)
        # Write after every stage, so that later failures lose nothing.
        path = write_result(
            "gpu_suite",
            benchmark="gpu_suite",
            hardware=hardware,
            settings={"stages": names, "budget_seconds": budget_seconds, "sizes": sizes._asdict()},
            rows=rows,
            folder=results_dir,
        )
    cells = [[row["label"], row["status"], f"{row['seconds']:.0f} s", row["reason"] or ""] for row in rows]
    print_table(f"the suite on {hardware.short_name}", ["stage", "status", "time", "reason"], cells)
    console.print(str(path), markup=False)


if __name__ == "__main__":
    typer.run(main)
