"""Run all GPU tests and benchmarks, the most important first, in as many minutes as a card is at hand.

    python benchmarks/gpu_suite.py --minutes 10
    python benchmarks/gpu_suite.py --parts presets,kernels --again
    python benchmarks/gpu_suite.py --device cpu --shape tiny        # a trial without a GPU

Each part is a command that writes its own result. The suite adds the part's row to its own file as the part ends. Run
the same command again after an interruption: it skips the parts that ended on this commit. A part that ran out of time
runs again. Parts beyond the time limit are listed as not run. Nothing is downloaded. Without a GPU the suite exits,
unless you pass --device cpu.

Writes `results/gpu_suite_<hardware>.json` after every part: status, time, and the end of the output.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measure import ROOT, Budget, run_measured
from results import RESULTS, Hardware, commit, console, print_table, require_hardware, write_result
from shapes import shape_of

BENCHMARKS = Path(__file__).resolve().parent
SHORTEST_PART_SECONDS = 45.0  # with less time, a part would replace a good result by an empty one
ENDED = ("ok", "failed")

# The tests that failed on the first real card, whose tolerances are wider since: gradients of recurrent layers and of
# Gemma 4 in float32, and runs with adapters.
CARD_TESTS = ROOT / "tests" / "pretended_gpu"
FAILED_ONCE = "test_loss_and_gradients and float32 and ("
FAILED_ONCE += "gemma4 or qwen3_next or qwen3_5 or lfm2 or hybrid or bamba or falcon_h1 or nemotron_h)"
FAILED_ONCE += " or test_losses_and_norms and (qlora or host_embeddings or apollo)"
VALUE_TESTS = (
    "test_flash_kernels.py",
    "test_recurrent_kernels.py",
    "test_adamw_8bit_kernel.py",
    "test_grouped_kernels.py",
)


class Sizes(NamedTuple):
    """Sizes that the parts use."""

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
    """The same parts with one small shape."""
    return Sizes(device, shape, 2, 128, shape, 2, 64, steps=2, repeats=2)


class Part(NamedTuple):
    """A name, a description, and the command without shared options, or what this machine lacks for it."""

    name: str
    what: str
    command: Callable[[Sizes], list[str] | str]
    is_benchmark: bool = True  # a script that accepts --device, --results-dir and --budget-seconds


def _tests(*arguments: str) -> list[str]:
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *arguments]


def _failed_once(sizes: Sizes) -> list[str] | str:
    if sizes.device != "cuda":
        return "needs a GPU"
    return _tests("-k", FAILED_ONCE, *(str(CARD_TESTS / name) for name in ("test_families.py", "test_recipes.py")))


def _value_tests(sizes: Sizes) -> list[str] | str:
    """The tests of kernels' values that this version has."""
    files = [CARD_TESTS / name for name in VALUE_TESTS]
    for file in files:
        if not file.exists():
            console.print(f"skipped: {file.name} is not in this version", markup=False)
    return _tests(*(str(file) for file in files if file.exists())) if sizes.device == "cuda" else "needs a GPU"


def _two_cards(sizes: Sizes) -> list[str] | str:
    """Twenty steps on two GPUs, which exchange gradients and weights over NCCL."""
    count = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=False).stdout
    if sizes.device != "cuda" or int(found.strip() or 0) < 2:
        return "needs two GPUs"
    own = ["max_steps=20", "save_every=0", f"output_dir={tempfile.mkdtemp(prefix='lean_ft_nccl_')}/run"]
    return ["-m", "lean_ft", "run", "--nproc-per-node", "2", "finetune", "--config", "tiny/full", *own]


def _presets(sizes: Sizes, *options: str) -> list[str]:
    """With a small shape, one preset of it; the shape `tiny` has the preset `tiny/full`."""
    small = [] if sizes.llama == FULL.llama else ["--presets", f"{sizes.llama}/full"]
    return ["gpu_presets.py", *(small or options)]


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


PARTS = (
    Part(
        "failed_once",
        "the tests that failed on the first real card",
        _failed_once,
        is_benchmark=False,
    ),
    Part("values", "values of kernels", _value_tests, is_benchmark=False),
    Part("presets", "steps of presets next to their plans, one at a time", lambda s: _presets(s)),
    Part(
        "recurrent_preset",
        "the same of a model with recurrent layers",
        lambda s: [*_presets(s, "--presets", "qwen3_5_9b/qlora"), "--results-name", "recurrent_preset"],
    ),
    Part("kernels", "kernels next to their alternatives", lambda s: ["gpu_kernels.py"]),
    Part(
        "update",
        "one update of all weights against the peers",
        lambda s: ["optimizer_step.py", "--shape", s.qwen, "--repeats", str(s.repeats)],
    ),
    Part(
        "rounded_update",
        "the same with stochastic rounding",
        lambda s: [
            *("optimizer_step.py", "--shape", s.qwen, "--repeats", str(s.repeats), "--only", "adamw_8bit_compiled"),
            *("--option", "stochastic_rounding=true", "--results-name", "rounded_update"),
        ],
    ),
    Part("two_cards", "a run on two GPUs", _two_cards, is_benchmark=False),
    Part("tests", "all tests that need a GPU", lambda s: _tests(), is_benchmark=False),
    Part(
        "ladder_llama",
        "memory techniques one by one, packed rows of many documents",
        lambda s: _ladder(s.llama, s.llama_batch, s.llama_length, "bfd", s),
    ),
    Part(
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
    Part("loss", "the output loss against its peers", lambda s: _loss(s.llama, s.llama_batch * s.llama_length, s)),
    Part(
        "attention",
        "packed against padded attention",
        lambda s: [
            *("attention.py", "--shape", s.llama, "--batch-size", str(s.llama_batch)),
            *("--length", str(s.llama_length), "--repeats", str(s.repeats)),
        ],
    ),
    Part(
        "ladder_qwen",
        "memory techniques one by one, a small model with a large vocabulary",
        lambda s: _ladder(s.qwen, s.qwen_batch, s.qwen_length, "none", s),
    ),
    Part(
        "loss_qwen",
        "the output loss against its peers, at the small model's size",
        lambda s: _loss(s.qwen, s.qwen_batch * s.qwen_length, s),
    ),
)


def run_part(part: Part, sizes: Sizes, *, results_dir: Path, budget: Budget) -> dict[str, Any]:
    """Run a part within the remaining time and return its row."""
    row = {"name": part.name, "label": f"{part.name}: {part.what}", "commit": commit()}
    left = budget.timeout_seconds()
    if left < SHORTEST_PART_SECONDS:
        return row | {"status": "not run", "reason": "no time was left for it", "seconds": 0.0}
    if isinstance(command := part.command(sizes), str):
        return row | {"status": "not run", "reason": command, "seconds": 0.0}
    if part.is_benchmark:
        # The script should end by itself and write its results; otherwise it is killed.
        of_its_own = left - 15
        command = [
            *(str(BENCHMARKS / command[0]), *command[1:], "--device", sizes.device),
            *("--results-dir", str(results_dir.resolve()), "--budget-seconds", f"{of_its_own:.0f}"),
        ]
    before = {file: file.stat().st_mtime_ns for file in results_dir.glob("*.json")}
    measured = run_measured([sys.executable, *command], timeout_seconds=left)
    written = [file for file in results_dir.glob("*.json") if before.get(file) != file.stat().st_mtime_ns]
    if measured.status == "ok" and (cut := _cut_rows(written)):
        measured.status, measured.reason = "timed out", f"no time was left for {', '.join(cut)}"
    if measured.status == "ok" and not part.is_benchmark:
        measured.reason = (measured.output.strip().splitlines() or [""])[-1]  # counts of passed and skipped tests
    return row | {
        "status": measured.status,
        "reason": measured.reason,
        "seconds": round(measured.seconds, 1),
        "output": measured.output.replace(f"{ROOT}/", "")[-6000:],
    }


def _cut_rows(files: list[Path]) -> list[str]:
    """Rows of results that lacked time."""
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    return [row["label"] for row in rows if row.get("status") in ("timed out", "not run")]


def earlier_rows(results_dir: Path, hardware: Hardware, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of an earlier call of this commit with the same sizes, by part."""
    file = results_dir / f"gpu_suite_{hardware.slug}.json"
    if not file.exists():
        return {}
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # cut while it was written
        console.print(f"{file} is incomplete: all parts run again", markup=False)
        return {}
    rows = before["rows"] if before["settings"] == settings else []
    return {row["name"]: row for row in rows if row.get("commit") == commit()}


def chosen(parts: str) -> list[Part]:
    """The parts of these names, all without names, in the order of `PARTS`."""
    known = {part.name: part for part in PARTS}
    names = [name.strip() for name in parts.split(",") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no part is called {unknown[0]!r}; expected some of {', '.join(known)}")
    return [part for name, part in known.items() if name in names]


def main(
    minutes: Annotated[float, typer.Option(help="Time limit of this call in minutes.")] = 10,
    parts: Annotated[
        str, typer.Option(help=f"Parts to run, comma-separated: {', '.join(p.name for p in PARTS)}.")
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Repeat parts that ended in an earlier call.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the suite without one.")] = "cuda",
    shape: Annotated[str, typer.Option(help="Measure only this shape, at small sizes.")] = "",
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON results.")] = RESULTS,
) -> None:
    """Run all GPU tests and benchmarks."""
    wanted = chosen(parts)
    if shape:
        shape_of(shape)
    hardware = require_hardware(device)
    sizes = reduced(hardware["device"], shape) if shape else FULL._replace(device=hardware["device"])
    settings = {"sizes": sizes._asdict()}
    budget = Budget(60 * minutes, 60 * minutes)
    console.print(f"{hardware.full_name}; {minutes:g} minutes", markup=False)

    known = earlier_rows(results_dir, hardware, settings)
    for part in wanted:
        console.rule(f"{part.name}: {part.what}", align="left")
        before = known.get(part.name, {})
        if before.get("status") in ENDED and not again:
            console.print(f"skipped: {before['status']} in an earlier call; --again repeats it", markup=False)
            continue
        row = run_part(part, sizes, results_dir=results_dir, budget=budget)
        known[part.name] = row
        console.print(row.get("output", "").rstrip(), markup=False)
        console.print(f"{row['status']}" + (f": {row['reason']}" if row["reason"] else ""), markup=False)
        # Write after every part, so that later failures lose nothing.
        rows = [known[one.name] for one in PARTS if one.name in known]
        write_result(
            "gpu_suite", benchmark="gpu_suite", hardware=hardware, settings=settings, rows=rows, folder=results_dir
        )
    rows = [known[part.name] for part in wanted]
    cells = [[row["label"], row["status"], f"{row['seconds']:.0f} s", row["reason"] or ""] for row in rows]
    print_table(f"the suite on {hardware.short_name}", ["part", "status", "time", "reason"], cells)
    console.print(str(results_dir / f"gpu_suite_{hardware.slug}.json"), markup=False)


if __name__ == "__main__":
    typer.run(main)
