"""Run the tests of exported GGUF files with llama.cpp and write their outcome into the table of docs/export.md.

    python scripts/make_export_table.py

A cell says `passes` if every case of the family passed the column's test, and `fails` otherwise; the script then exits
with 1.
"""

import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.gguf.open import GGUF_FAMILIES  # noqa: E402

PAGE = ROOT / "docs" / "export.md"
MARKS = "<!-- table -->", "<!-- end of table -->"
COLUMNS = {
    "test_llama_cpp_computes_the_same": "model in llama.cpp",
    "test_llama_cpp_computes_what_peft_computes": "adapter in llama.cpp",
    "test_an_exported_model_comes_back_unchanged": "read from a GGUF file",
    "test_llama_cpp_reads_every_kind": "quantized kinds in llama.cpp",
}


class Outcomes:
    """A pytest plugin that records outcomes by (family, test)."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], list[bool]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, _, case = report.nodeid.partition("::")[2].rstrip("]").partition("[")
        if report.when == "call" or report.failed:
            self.passed[case.partition("/")[0], test].append(report.passed)


def main() -> int:
    outcomes = Outcomes()
    files = [str(ROOT / "tests" / "gguf" / f"test_{name}.py") for name in ("llama_cpp", "adapter", "open")]
    pytest.main(["-q", "-m", "", "-k", " or ".join(COLUMNS), "--rootdir", str(ROOT), *files], plugins=[outcomes])
    lines = [
        "| family | llama.cpp's architecture | " + " | ".join(COLUMNS.values()) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for name, family in GGUF_FAMILIES.items():
        found = [outcomes.passed[name, test] for test in COLUMNS]
        cells = ["passes" if results and all(results) else "fails" for results in found]
        for i, no_case in (2, "no"), (3, "not tested"):
            cells[i] = cells[i] if found[i] else no_case
        lines.append(f"| `{name}` | `{family.architecture}` | {' | '.join(cells)} |")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(before + "\n\n".join([MARKS[0], "\n".join(lines), MARKS[1]]) + rest.partition(MARKS[1])[2])
    return int("fails" in "".join(lines))


if __name__ == "__main__":
    sys.exit(main())
