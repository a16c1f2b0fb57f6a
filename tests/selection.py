"""Which tests a command runs: the default set, the long ones, a covering set, or one of several lanes.

The default set (`make test`) has one case of each kind. A test is left out of it by one of two marks:

    @pytest.mark.long              takes too long, or repeats what a shorter test shows
    @pytest.mark.first(3)          of its cases, the first 3 are default; the others are long

`make test-all` runs everything. `--covering` takes one case of each test that the default set leaves out wholly, if the
case takes no more than 7 s, and `--lane 2/5` one of five parts of equal CPU time.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

LIMIT = 360.0  # CPU seconds of the default set, with imports
IMPORTS = 65.0  # of these, two processes that import torch and transformers and collect the tests
UNRECORDED = 0.01  # CPU seconds of a test that tests/cpu_seconds.json leaves out
LONGEST_COVERING = 7.0  # CPU seconds of a test of the covering set; longer ones run nightly
RECORD = Path(__file__).parent / "cpu_seconds.json"


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def id_of(item: pytest.Item) -> str:
    """The test's id in its file, as pytest prints it."""
    return item.nodeid.partition("::")[2]


def kind_of(item: pytest.Item) -> str:
    """The test's id without its case."""
    return item.nodeid.partition("[")[0]


@cache
def recorded_seconds() -> dict[str, dict[str, float]]:
    """CPU seconds of tests by file and id, as `scripts/time_tests.py` measured them."""
    return json.loads(RECORD.read_text())


def seconds_of(items: Iterable[pytest.Item]) -> float:
    """The sum of the recorded CPU seconds of these tests."""
    record = recorded_seconds()
    return sum(record.get(file_of(item), {}).get(id_of(item), UNRECORDED) for item in items)


def is_default(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is None


def mark_long(items: list[pytest.Item]) -> None:
    """Mark as `long` the cases that `first` leaves out."""
    kinds: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("first"):
            kinds[kind_of(item)].append(item)
    for cases in kinds.values():
        mark = cases[0].get_closest_marker("first")
        for item in cases[mark.args[0] if mark and mark.args else 1 :]:
            item.add_marker("long")


def covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """One case, the shortest on record, of each test that has no case in the default set, unless it takes too long."""
    record = recorded_seconds()

    def seconds(item: pytest.Item) -> float:
        return record.get(file_of(item), {}).get(id_of(item), UNRECORDED)

    kinds: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        kinds[kind_of(item)].append(item)
    shortest = [min(cases, key=seconds) for cases in kinds.values() if not any(map(is_default, cases))]
    return [item for item in shortest if seconds(item) <= LONGEST_COVERING]


def lane(items: list[pytest.Item], number: int, lanes: int) -> list[pytest.Item]:
    """One of several parts with about equal CPU time. A file's tests stay together, for its fixtures."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[file_of(item)].append(item)
    seconds = {file: seconds_of(own) for file, own in files.items()}
    sums = [0.0] * lanes
    mine: set[str] = set()
    for file in sorted(files, key=lambda file: (-seconds[file], file)):
        least = sums.index(min(sums))
        sums[least] += seconds[file]
        if least == number - 1:
            mine.add(file)
    return [item for item in items if file_of(item) in mine]
