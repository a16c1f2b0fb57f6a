"""Compare torchtune's own recipes and lean_ft on a simulated GPU: the allocator's peaks, launches and host waits of a
step.

    make test-pretended-gpu                               # once: installs CUDA wheels and builds the simulated GPU
    .venv-pretended-gpu/bin/pip install --target torchtune-cuda --no-deps torchtune==0.6.1 torchao==0.10.0
    torchdata==0.11.0 \
        omegaconf antlr4-python3-runtime==4.9.3 kagglehub kagglesdk blobfile pycryptodomex lxml requests tiktoken
    .venv-pretended-gpu/bin/python benchmarks/pretended_torchtune.py --torchtune torchtune-cuda

Each rung adds one technique, as in the ladder that torchtune published for Llama-3.2-3B on an A100: 2 rows of 4,096
tokens in bfloat16. torchtune's rows are one document each, so that its attention needs no mask; lean_ft's are packed.
No kernel runs (see pretended_ladder.py): the numbers are counts of what PyTorch's CUDA build allocates and launches,
not times. Each row is a new process.

Writes `results/pretended_torchtune_<hardware>.json` after every row. Rows with numbers are skipped without --again.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measure import ROOT, last_error
from pretended_ladder import CARD, CHECKPOINTED, CHUNKED, EIGHT_BIT, FULL, IN_BACKWARD, LORA, WHOLE_LOGITS, Setting, run
from results import RESULTS, console, describe_hardware, gibibytes, print_result, write_result
from shapes import EMBEDDED_MODEL, write_model_folder

COLUMNS = [
    "technique",
    "side",
    "allocated",
    "reserved",
    "launches",
    "host waits",
    "reserved vs torchtune",
    "launches vs torchtune",
]
NUM_STEPS = 4
LENGTH, BATCH = 4096, 2
PACKED = {"data.packing": "bfd", "data.max_length": LENGTH, "batch_size": BATCH}


class Rung(NamedTuple):
    """A technique: lean_ft's settings, and torchtune's arguments and changes to its configuration."""

    label: str
    recipe: str
    ours: dict[str, Any]
    arguments: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


_WHOLE = "loss._component_=torch.nn.CrossEntropyLoss"
_NO_CHECKPOINTING, _AFTER_BACKWARD = "enable_activation_checkpointing=False", "optimizer_in_bwd=False"
_OFFLOAD = "enable_activation_offloading=True"
_8BIT, _PAGED = (f"optimizer._component_=bitsandbytes.optim.{name}" for name in ("AdamW8bit", "PagedAdamW8bit"))
_ADAPTER = ("--compile", "--lora-rank", "16")
RUNGS = [
    Rung("packed rows", FULL, WHOLE_LOGITS, (), (_WHOLE, _NO_CHECKPOINTING, _AFTER_BACKWARD)),
    Rung("+ compile", FULL, {**WHOLE_LOGITS, "compile": True}, ("--compile",),
        (_WHOLE, _NO_CHECKPOINTING, _AFTER_BACKWARD)),
    Rung("+ chunked cross-entropy", FULL, {**CHUNKED, "compile": True}, ("--compile",),
        (_NO_CHECKPOINTING, _AFTER_BACKWARD)),
    Rung("+ activation checkpointing", FULL, CHECKPOINTED, ("--compile",), (_AFTER_BACKWARD,)),
    Rung("+ step in backward", FULL, IN_BACKWARD, ("--compile",)),
    Rung("+ activation offload", FULL, {**IN_BACKWARD, "memory.activation_offload": True}, ("--compile",), (_OFFLOAD,)),
    Rung("+ 8-bit AdamW", FULL, {**EIGHT_BIT, "memory.activation_offload": True}, ("--compile",), (_OFFLOAD, _8BIT)),
    Rung("+ its state paged", FULL,
        {**IN_BACKWARD, "optimizer.name": "paged_adamw_8bit", "memory.activation_offload": True}, ("--compile",),
        (_OFFLOAD, _PAGED)),
    Rung("LoRA, checkpointing", LORA, CHECKPOINTED, _ADAPTER),
    Rung("QLoRA, checkpointing", LORA, {**CHECKPOINTED, "lora.quantize": "nf4"}, (*_ADAPTER, "--quantize")),
]  # fmt: skip


def main(
    torchtune: Annotated[Path, typer.Option(help="Folder with torchtune's packages.")] = Path("torchtune-cuda"),
    only: Annotated[str, typer.Option(help="Only rungs whose label contains this text.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="Time limit of one row in seconds.")] = 1200,
    again: Annotated[bool, typer.Option(help="Run rows again that already have numbers.")] = False,
    results_dir: Path = RESULTS,
) -> None:
    """Run every rung with both."""
    hardware = describe_hardware("cpu")
    path = results_dir / f"pretended_torchtune_{hardware.slug}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["label"], row["side"]): row for row in rows}
    for rung in RUNGS:
        for side in ("torchtune", "lean_ft"):
            if only not in rung.label or (known.get((rung.label, side), {}).get("status") == "ok" and not again):
                continue
            if side == "lean_ft":
                row = run(Setting(rung.label, rung.recipe, "llama3_2_3b", {**PACKED, **rung.ours}), timeout_seconds)
            else:
                row = run_torchtune(rung, torchtune.resolve(), timeout_seconds)
            known[rung.label, side] = {**row, "label": rung.label, "side": side}
            console.print(rung.label, side, row["status"], row.get("reason") or "", markup=False)
            ordered = [known[r.label, s] for r in RUNGS for s in ("torchtune", "lean_ft") if (r.label, s) in known]
            settings = {"rows": BATCH, "length": LENGTH, "torchtune": "0.6.1"}
            write_result(
                "pretended_torchtune",
                benchmark="pretended_torchtune",
                hardware=hardware,
                settings=settings,
                rows=ordered,
                folder=results_dir,
            )
    print_result(path, describe, COLUMNS, table_cells)


def run_torchtune(rung: Rung, packages: Path, timeout_seconds: float) -> dict[str, Any]:
    """The counts of torchtune's last step, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="lean_ft_pretended_") as folder:
        model = write_model_folder("llama3_2_3b", Path(folder) / "model", EMBEDDED_MODEL)
        data = Path(folder) / "rows.jsonl"
        data.write_text((json.dumps({"input_ids": [5] * LENGTH}) + "\n") * (BATCH * NUM_STEPS))
        paths = {"--model-folder": model, "--data": data, "--run-directory": Path(folder) / "run"}
        numbers = {"--batch-size": BATCH, "--length": LENGTH, "--device": "cuda", "--values": ",".join(rung.values)}
        options = [str(part) for pair in {**paths, **numbers}.items() for part in pair]
        script = ROOT / "benchmarks" / "torchtune_peer.py"
        environment = {"PRETENDED_GPU": "A100", "PRETENDED_GPU_GIB": "79.1", "PRETENDED_GPU_TOUCH": "65536"}
        environment["PYTHONPATH"] = os.pathsep.join(str(part) for part in (packages, ROOT, ROOT / "benchmarks"))
        command = [CARD / "run.sh", sys.executable, script, *options, *rung.arguments]
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
        if done.returncode:
            return {"status": "failed", "reason": last_error(done.stdout + done.stderr)}
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return {**json.loads(lines[-1]), "status": "ok", "reason": None}


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    settings = result["settings"]
    return (
        f"Llama-3.2-3B, {settings['rows']} rows of {settings['length']:,} tokens in bfloat16; torchtune "
        f"{settings['torchtune']}'s own recipes; allocations, launches and host waits of one step of PyTorch's CUDA "
        "build on a simulated A100, where no kernel runs"
    )


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """Two rows per rung; ratios in the second."""
    cells, sides = [], {(row["label"], row["side"]): row for row in result["rows"]}
    for row in result["rows"]:
        if row["status"] != "ok":
            cells.append([row["label"], row["side"], row["status"], *["-"] * (len(COLUMNS) - 3)])
            continue
        peer, ratios = sides.get((row["label"], "torchtune"), {}), ["-", "-"]
        if row["side"] == "lean_ft" and peer.get("status") == "ok":
            ratios = [f"{row[name] / peer[name]:.2f}" for name in ("reserved_bytes", "launches")]
        memory = [gibibytes(row["allocated_bytes"]), gibibytes(row["reserved_bytes"])]
        cells.append([row["label"], row["side"], *memory, f"{row['launches']:,}", str(row["host_waits"]), *ratios])
    return cells


if __name__ == "__main__":
    typer.run(main)
