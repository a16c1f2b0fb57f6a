"""Record the hardware, versions, settings and commit of every benchmark result, and print its table."""

import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30

console = Console(highlight=False, soft_wrap=True)

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "datasets",
    "accelerate",
    "liger-kernel",
    "bitsandbytes",
    "torchao",
    "triton",
)
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")

# Runs torch in a separate process, so that this process stays small and holds no GPU memory.
_ASK_TORCH = """
import json, torch
facts = {"threads": torch.get_num_threads(), "gpu": None}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    capability = f"{gpu.major}.{gpu.minor}"
    facts["gpu"] = {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": capability}
    facts["gpu"]["cuda"] = torch.version.cuda
print(json.dumps(facts))
"""


class Hardware(dict[str, Any]):
    """Facts of the measured device, as plain values."""

    @property
    def slug(self) -> str:
        """The device in file names: `nvidia-h200`, `amd-epyc-2-cores`."""
        return re.sub(r"[^a-z0-9]+", "-", self.short_name.lower().replace("(r)", "").replace("(tm)", "")).strip("-")

    @property
    def short_name(self) -> str:
        """The device in captions: `NVIDIA H200`, `AMD EPYC, 2 cores`."""
        if self["device"] == "cuda":
            return self["gpu"]["name"]
        return f"{self['cpu']}, {self['cores']} cores"

    @property
    def full_name(self) -> str:
        """The device with its memory; a CPU also with its bfloat16 instructions."""
        if self["device"] == "cuda":
            return f"{self.short_name} ({self['gpu']['memory_bytes'] / GIB:.0f} GiB)"
        features = [name for name in ("avx512_bf16", "amx_bf16", "bf16") if name in self["cpu_features"]]
        with_bf16 = f" with {' and '.join(features)}" if features else ""
        return f"{self.short_name}{with_bf16}, {self['memory_bytes'] / GIB:.0f} GiB, {self['threads']} threads"


@functools.cache
def describe_hardware(device: str = "auto") -> Hardware:
    """Describe the machine, and the device for this `device` setting."""
    answer = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=True)
    facts = json.loads(answer.stdout)
    fields = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    return Hardware(
        device="cuda" if device == "cuda" or (device == "auto" and facts["gpu"]) else "cpu",
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        cpu_features=[feature for feature in CPU_FEATURES if feature in flags],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        threads=facts["threads"],
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        gpu=facts["gpu"],
        system=f"{platform.system()} {platform.machine()}",
    )


def require_hardware(device: str) -> Hardware:
    """Describe the hardware to measure on. Exits if `device` is cuda and there is no GPU."""
    if device not in ("auto", "cuda", "cpu"):
        raise typer.BadParameter(f"expected auto, cuda or cpu, found {device!r}", param_hint="--device")
    hardware = describe_hardware(device)
    if device == "cuda" and hardware["gpu"] is None:
        console.print("No GPU found; nothing was measured. Pass --device cpu to measure on the CPU.")
        raise typer.Exit(0)
    return hardware


def versions() -> dict[str, str | None]:
    """Versions of Python and of relevant libraries; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The measured commit, with `-dirty` for a changed tree; BENCHMARK_COMMIT without a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCHMARK_COMMIT")
    return described.stdout.strip()


def write_result(
    name: str,
    *,
    benchmark: str,
    hardware: Hardware,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    folder: Path = RESULTS,
    **more: Any,
) -> Path:
    """Write `<name>_<hardware>.json` and return its path. `benchmark` is the script that renders the table."""
    result = {
        "benchmark": benchmark,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": _command(sys.argv),
        "hardware": hardware,
        "versions": versions(),
        "settings": settings,
        "rows": rows,
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{hardware.slug}.json"
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    whole.replace(path)  # a process that is killed leaves the result of before
    return path


def _command(arguments: Sequence[str]) -> str:
    """The command without paths of this machine."""
    kept: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument.startswith("--results-dir") and before != "--results-dir":
            kept.append(argument.replace(f"{ROOT}/", ""))
    return shlex.join(["python", *kept])


# Printing -----------------------------------------------------------------------------------------------------------


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; columns after the first are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: print wide lines there instead of truncating.
    (Console(highlight=False) if console.is_terminal else Console(width=140, highlight=False)).print(table)


def print_result(
    path: Path,
    describe: Callable[[dict[str, Any]], str],
    columns: list[str],
    table_cells: Callable[[dict[str, Any]], list[list[str]]],
) -> dict[str, Any]:
    """Print a result's table, the reasons for missing numbers, and its path. Returns the result."""
    result = json.loads(path.read_text(encoding="utf-8"))
    print_table(f"{describe(result)}; on {Hardware(result['hardware']).full_name}", columns, table_cells(result))
    for line in missing_numbers(result):
        console.print(line, markup=False)
    console.print(str(path), markup=False)
    return result


def missing_numbers(result: dict[str, Any]) -> list[str]:
    """The rows without a number, one line per reason: `a; b: not run, no time was left for it`."""
    rows: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["status"] != "ok":
            what = row.get("label") or row["side"] + (f" at length {row['length']}" if "length" in row else "")
            of_one_reason = rows.setdefault(f"{row['status']}, {row['reason']}", [])
            if what not in of_one_reason:
                of_one_reason.append(what)
    return [f"{'; '.join(labels)}: {reason}" for reason, labels in rows.items()]


def peaks(row: dict[str, Any], steady: str = "peak_memory_bytes") -> str:
    """A row's peak; with the first steps' peak if the run continued until its peak was stable: `2.10 GiB (first steps:
    2.05 GiB)`."""
    first = row.get(f"first_{steady}")
    return gibibytes(row.get(steady)) + ("" if first is None else f" (first steps: {gibibytes(first)})")


def words_of(figure: Any) -> str:
    """All words and numbers of matplotlib's figure, a line each."""
    from matplotlib.text import Text

    texts = (text.get_text() for text in figure.findobj(Text))
    return "\n".join(" ".join(text.split()) for text in texts if text.strip())


def narrow_path(picture: Path) -> Path:
    """The path of a picture's form for phones."""
    return picture.with_stem(f"{picture.stem}_narrow")


def save_picture(figure: Any, path: Path) -> None:
    """Save a figure as PNG, with its words as the file's description: a test compares them with the results."""
    figure.savefig(path, metadata={"Description": words_of(figure)}, pil_kwargs={"optimize": True})


def gibibytes(count: float | None) -> str:
    """`3.12 GiB`, `640 MiB`; a dash for None."""
    if count is None:
        return "-"
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def tokens_per_second(value: float | None) -> str:
    """Three significant digits, `21,400`, `98.3`; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def change(new: float | None, old: float | None) -> str:
    """A change in percent: `-23 %`; a dash without a number to compare with."""
    if new is None or not old:
        return "-"
    return f"{(new / old - 1) * 100:+.0f} %"
