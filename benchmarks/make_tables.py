"""Write results as markdown tables into README.md and docs/.

    python benchmarks/make_tables.py            # rewrite the tables of README.md and docs/*.md
    python benchmarks/make_tables.py --check    # change nothing; exit 1 if a table is stale
    python benchmarks/make_tables.py --list     # print the names of the results

A page marks a table with two lines. NAME is a file in benchmarks/results without `.json`, or a prefix of exactly one of
them (`memory_ladder`, `memory_ladder_llama3_2_3b`):

    <!-- table:NAME -->
    <!-- /table -->

`sentence` instead of `table` writes the result in one sentence (compare_trl).

The table is empty while the benchmark has no result. A name of no benchmark is an error. Under each table stand what
was measured, the hardware, versions, date and commit. A row without a number stays in the table, with its reason below.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, ROOT, Hardware, console, missing_numbers

MARKER = re.compile(
    r"^<!-- (?P<kind>table|sentence):(?P<name>\S+) -->\n(?P<body>.*?)^<!-- /(?P=kind) -->$", re.M | re.S
)
# Scripts whose results become tables. Each has COLUMNS, table_cells(result) and describe(result).
BENCHMARKS = (
    "memory_ladder",
    "host_pool",
    "compare_torchtune",
    "compare_trl",
    "images",
    "compare_fsdp",
    "linear_cross_entropy",
    "attention",
    "bfloat16_products",
    "against_transformers",
    "embeddings",
    "engines",
    "drafting",
    "optimizer_step",
    "data_preparation",
    "loading",
    "generation",
    "tokenizers_gsm8k",
    "planner_accuracy",
    "planned_distributed",
    "planned_launches",
    "adapter_launches",
    "published_speed",
    "published_memory",
    "float8_curves",
    "roofline",
    "cpu_step",
    "pretended_ladder",
    "pretended_torchtune",
    "pretended_updates",
    "kernel_resources",
    "kernel_instructions",
    "mixture_traffic",
    "gpu_presets",
    "gpu_kernels",
    "convergence",
    "saving",
    "merging",
    "crashes",
    "rank_crashes",
    "disk_faults",
    "fuzzing",
)
OPENING = re.compile(r"^<!-- (?:table|sentence):\S+ -->$", re.M)


def render(result: dict[str, Any]) -> str:
    """Render a result as a markdown table with its caption. The script of the benchmark defines the columns."""
    script = importlib.import_module(result["benchmark"])
    columns = script.COLUMNS
    lines = [_line(columns), _line(["---", *["---:"] * (len(columns) - 1)])]
    lines += [_line(cells) for cells in script.table_cells(result)]
    lines += ["", f"<sub>{caption(result, script.describe(result))}</sub>"]
    missing = missing_numbers(result)
    if missing:
        lines += ["", "<sub>Without a number: " + "; ".join(_plain(line) for line in missing) + ".</sub>"]
    return "\n".join(lines) + "\n"


def sentence(result: dict[str, Any]) -> str:
    """Render a result as one sentence."""
    return importlib.import_module(result["benchmark"]).sentence(result) + "\n"


def caption(result: dict[str, Any], described: str) -> str:
    """The caption: what was measured, and on what."""
    versions, hardware = result["versions"], Hardware(result["hardware"])
    day = result["measured_at"][:10]
    return _plain(
        f"{described[:1].upper()}{described[1:]}. Measured on {hardware.full_name}, torch {versions['torch']}, "
        f"{day}, commit {result['commit'] or 'unknown'}."
    )


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Escape text for a markdown table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def find_result(name: str, results: Path) -> Path | None:
    """The result of a marker, or None if the benchmark has no result yet. Raises ValueError for other names."""
    if (results / f"{name}.json").is_file():
        return results / f"{name}.json"
    found = sorted(results.glob(f"{name}_*.json"))
    if len(found) > 1:
        raise ValueError(f"table:{name} may be any of {', '.join(path.stem for path in found)}: name one of them.")
    if found:
        return found[0]
    if not any(name == script or name.startswith(f"{script}_") for script in BENCHMARKS):
        raise ValueError(f"table:{name} names no result; expected one that begins with {' or '.join(BENCHMARKS)}.")
    return None


def rewrite(page: str, results: Path) -> str:
    """A page's text with every table rendered. Raises ValueError for an unknown or unclosed marker."""

    def table(match: re.Match[str]) -> str:
        file = find_result(match["name"], results)
        result = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        body = "" if result is None else render(result) if match["kind"] == "table" else sentence(result)
        return f"<!-- {match['kind']}:{match['name']} -->\n{body}<!-- /{match['kind']} -->"

    if len(OPENING.findall(page)) != len(MARKER.findall(page)):
        raise ValueError("a line <!-- table:NAME --> or <!-- sentence:NAME --> lacks its end.")
    return MARKER.sub(table, page)


def main(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 where a table is stale.")] = False,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names of the results.")] = False,
    results_dir: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    pages_dir: Annotated[Path, typer.Option(help="Folder of README.md and docs/.")] = ROOT,
) -> None:
    """Write the results into the tables of README.md and docs."""
    if list_names:
        for path in sorted(results_dir.glob("*.json")):
            console.print(path.stem, markup=False)
        return
    wrong = False
    for page in [pages_dir / "README.md", *sorted((pages_dir / "docs").rglob("*.md"))]:
        if not page.is_file():
            continue
        old = page.read_text(encoding="utf-8")
        name = page.relative_to(pages_dir)
        try:
            new = rewrite(old, results_dir)
        except ValueError as error:
            console.print(f"{name}: {error}", markup=False)
            wrong = True
            continue
        if new == old:
            continue
        if check:
            console.print(f"{name} has stale tables. Run python benchmarks/make_tables.py.", markup=False)
            wrong = True
        else:
            page.write_text(new, encoding="utf-8")
            console.print(f"{name}: tables rewritten", markup=False)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
