"""Measure the CPU seconds of every test. Writes `tests/cpu_seconds.json` and the table of CONTRIBUTING.md.

    python scripts/time_tests.py                      # all tests, long ones too: about an hour on two cores
    python scripts/time_tests.py tests/data           # these tests; the others keep their numbers
    python scripts/time_tests.py -m "not long"        # arguments of pytest
    python scripts/time_tests.py --from FILE...       # take the lines that tests/stopwatch.py wrote

CPU seconds include child processes, and depend little on what else the machine does. `tests/selection.py` reads them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(?<=<!-- times -->\n).*?(?=<!-- end of times -->)", re.DOTALL)
SHORTEST = 0.05  # seconds; shorter tests are not recorded


def measure(arguments: list[str]) -> dict[str, float]:
    """Run these tests in two processes. Failures do not matter here."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"STOPWATCH": f"{folder}/times", "OMP_NUM_THREADS": "1"}
        selected = arguments if "-m" in arguments else ["-m", "", *arguments]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tests.stopwatch", *selected]
        subprocess.run(command, cwd=CHECKOUT, env=environment)
        return read(list(Path(folder).iterdir()))


def read(files: list[Path]) -> dict[str, float]:
    return dict(json.loads(line) for file in files for line in file.read_text().splitlines())


def merged(old: dict[str, dict[str, float]], new: dict[str, float]) -> dict[str, dict[str, float]]:
    """The record, by file and test, with new numbers in the place of old ones."""
    record = {file: dict(tests) for file, tests in old.items() if (CHECKOUT / file).exists()}
    for node, seconds in new.items():
        file, _, test = node.partition("::")
        record.setdefault(file, {}).pop(test, None)
        if seconds >= SHORTEST:
            record[file][test] = round(seconds, 2)
    return {file: dict(sorted(tests.items())) for file, tests in sorted(record.items()) if tests}


def default_tests() -> set[str]:
    """The ids of the default set, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT).stdout
    return {line for line in printed.splitlines() if "::" in line}


def table(record: dict[str, dict[str, float]], default: set[str]) -> str:
    """A line for each folder of tests, with the CPU seconds of its default and of its long tests."""
    folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for file, tests in record.items():
        folder = file.split("/")[1]
        for test, seconds in tests.items():
            columns = (f"tests/{folder}" if not folder.endswith(".py") else "tests/*.py", "all")
            for name in columns:
                folders[name][f"{file}::{test}" not in default] += seconds
    folders["all"] = folders.pop("all")
    rows = [f"| `{name}` | {short:.0f} | {long:.0f} |" for name, (short, long) in folders.items()]
    return "\n".join(["| folder | default | long |", "|---|---|---|", *rows]) + "\n"


def main(arguments: list[str]) -> None:
    from tests.selection import RECORD

    if arguments[:1] == ["--from"]:
        new = read([Path(argument) for argument in arguments[1:]])
    else:
        new = measure(arguments)
    record = merged(json.loads(RECORD.read_text()) if RECORD.exists() else {}, new)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    page = CHECKOUT / "CONTRIBUTING.md"
    page.write_text(TABLE.sub(lambda _: table(record, default_tests()), page.read_text()))


if __name__ == "__main__":
    sys.path.insert(0, str(CHECKOUT))
    main(sys.argv[1:])
