"""Run the parity tests and write their outcome into the table of docs/families.md.

    python scripts/make_families_table.py [FAMILY ...]

Runs `tests/models/test_parity.py` and the adapter tests in `tests/peft` for the named families, or for all. Rows of
other families do not change. A cell says `passes` if every case of the family passed every test of the column, and
`fails` otherwise; the script then exits with 1.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.family_cases import CASES  # noqa: E402
from tests.models.test_parity import COLUMNS, LANGUAGE_MODELS  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
MARKS = "<!-- table -->", "<!-- end of table -->"


class Outcomes:
    """A pytest plugin that records outcomes by (family, column)."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], list[bool]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, _, parameters = report.nodeid.partition("::")[2].partition("[")
        named = [case for case in CASES if case in re.split(r"[-\]]", parameters)]
        if test in COLUMNS and named and (report.when == "call" or report.failed):
            self.passed[CASES[named[0]][0], COLUMNS[test]].append(report.passed)


def main() -> int:
    families = sys.argv[1:] or LANGUAGE_MODELS
    if unknown := set(families) - set(LANGUAGE_MODELS):
        sys.exit(f"{', '.join(sorted(unknown))}: unknown family; expected some of {', '.join(LANGUAGE_MODELS)}.")
    outcomes = Outcomes()
    files = ["models/test_parity.py", "peft/test_equals_peft.py", "peft/test_experts.py"]
    tests, columns = [str(ROOT / "tests" / file) for file in files], list(dict.fromkeys(COLUMNS.values()))
    is_column = " or ".join(COLUMNS)
    of_them = " or ".join(case for case, (family, _) in CASES.items() if family in families)
    pytest.main(
        ["-q", "-m", "", "-k", f"({is_column}) and ({of_them})", "--rootdir", str(ROOT), *tests], plugins=[outcomes]
    )
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    table, _, after = rest.partition(MARKS[1])
    kept = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    lines = [
        "| family | checkpoints | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for family in LANGUAGE_MODELS:
        if family not in families:
            lines += [kept[family]] if family in kept else []
            continue
        count = sum(model_type == family for model_type, _ in CASES.values())
        found = [outcomes.passed[family, column] for column in columns]
        cells = ["passes" if results and all(results) else "fails" for results in found]
        lines.append(f"| `{family}` | {count} | " + " | ".join(cells) + " |")
    PAGE.write_text(before + "\n\n".join([MARKS[0], "\n".join(lines), MARKS[1]]) + after)
    return int("fails" in "".join(lines))


if __name__ == "__main__":
    sys.exit(main())
