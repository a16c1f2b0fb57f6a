"""Measure the CPU seconds of every test file. Writes `tests/cpu_seconds.json` and the table of CONTRIBUTING.md.

    python scripts/time_tests.py             # all test files: about 20 minutes of CPU time
    python scripts/time_tests.py tests/data  # these files; the others keep their numbers

CPU seconds include child processes and do not depend on what else the machine does. `make test-fast` runs the files of at
most `FAST_SECONDS` (`tests/conftest.py`).
"""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
RECORD = CHECKOUT / "tests" / "cpu_seconds.json"
TABLE = re.compile(r"(?<=<!-- times -->\n).*?(?=<!-- end of times -->)", re.DOTALL)


class Stopwatch:
    """A pytest plugin: adds up the CPU time of each file's tests and fixtures."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = sum(os.times()[:4])
        yield
        self.seconds[str(item.path.relative_to(CHECKOUT))] += sum(os.times()[:4]) - before


def measure(paths: list[str]) -> None:
    """Run the tests in this process and print their times as JSON. Failures do not matter here."""
    watch = Stopwatch()
    pytest.main(["-q", "--rootdir", str(CHECKOUT), *paths], plugins=[watch])
    print(json.dumps(watch.seconds))


def table(seconds: dict[str, float], fast: float) -> str:
    """Return a line for each folder of tests, with its CPU seconds, all and those of `make test-fast`."""
    folders: dict[str, list[float]] = defaultdict(list)
    for file, one in seconds.items():
        folder = file.split("/")[1]
        folders[f"tests/{folder}" if not folder.endswith(".py") else "tests/*.py"].append(one)
    folders["all"] = list(seconds.values())
    rows = [
        f"| `{name}` | {sum(all_):.0f} | {sum(s for s in all_ if s <= fast):.0f} |" for name, all_ in folders.items()
    ]
    return "\n".join(["| folder | CPU seconds | of these in `make test-fast` |", "|---|---|---|", *rows]) + "\n"


def main(paths: list[str]) -> None:
    from tests.conftest import FAST_SECONDS

    tests = CHECKOUT / "tests"
    seconds: dict[str, float] = json.loads(RECORD.read_text()) if paths else {}
    folders = sorted({str(tests / file.relative_to(tests).parts[0]) for file in tests.rglob("test_*.py")})
    for path in paths or folders:  # a process for each folder, so that one cannot fill the memory for the next
        command = [sys.executable, __file__, "--measure", path]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT).stdout
        seconds |= json.loads(printed.splitlines()[-1])
        seconds = {file: round(one, 1) for file, one in sorted(seconds.items()) if (CHECKOUT / file).exists()}
        RECORD.write_text(json.dumps(seconds, indent=1) + "\n")
        print(f"{path}: {printed.splitlines()[-2]}", flush=True)
    page = CHECKOUT / "CONTRIBUTING.md"
    page.write_text(TABLE.sub(lambda _: table(seconds, FAST_SECONDS), page.read_text()))


if __name__ == "__main__":
    sys.path.insert(0, str(CHECKOUT))
    measure(sys.argv[2:]) if sys.argv[1:2] == ["--measure"] else main(sys.argv[1:])
