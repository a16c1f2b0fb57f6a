"""Which tests a command runs: the default set, the long ones, a covering set, or one of several lanes.

The default set (`make test`) has one case of each kind. A test is left out of it by one of three marks:

    @pytest.mark.long              takes too long, or repeats what a shorter test shows
    @pytest.mark.first(3)          of its cases, the first 3 are default; the others are long
    @pytest.mark.rotates(*names)   cases with these names are default; of each other case, one test of the file per day

`make test-all` runs everything. `--covering` takes one case of each test that the default set leaves out wholly, and
`--lane 2/5` one of five parts of equal CPU time.
"""

import datetime
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

LIMIT = 360.0  # CPU seconds of the default set, with imports
IMPORTS = 70.0  # of these, two processes that import torch and transformers and collect the tests
UNRECORDED = 0.02  # CPU seconds of a test that tests/cpu_seconds.json leaves out
RECORD = Path(__file__).parent / "cpu_seconds.json"


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def id_of(item: pytest.Item) -> str:
    """The test's id in its file, as pytest prints it."""
    return item.nodeid.partition("::")[2]


def kind_of(item: pytest.Item) -> str:
    """The test's id without its case."""
    return item.nodeid.partition("[")[0]


def recorded_seconds() -> dict[str, dict[str, float]]:
    """CPU seconds of tests by file and id, as `scripts/time_tests.py` measured them."""
    return json.loads(RECORD.read_text())


def seconds_of(items: Iterable[pytest.Item]) -> float:
    """The sum of the recorded CPU seconds of these tests."""
    record = recorded_seconds()
    return sum(record.get(file_of(item), {}).get(id_of(item), UNRECORDED) for item in items)


def is_default(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is None


def mark_long(items: list[pytest.Item], today: datetime.date) -> None:
    """Mark as `long` the cases that `first` and `rotates` leave out today."""
    kinds: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        kinds[kind_of(item)].append(item)
    rotating: dict[str, list[str]] = defaultdict(list)  # by file, in its order
    for kind, cases in kinds.items():
        if mark := cases[0].get_closest_marker("first"):
            for item in cases[mark.args[0] if mark.args else 1 :]:
                item.add_marker("long")
        if cases[0].get_closest_marker("rotates"):
            rotating[file_of(cases[0])].append(kind)
    for tests in rotating.values():
        _rotate([kinds[kind] for kind in tests], today.toordinal())


def _rotate(tests: list[list[pytest.Item]], day: int) -> None:
    """Mark all but the named cases of a file's rotating tests, and one test of each other case."""
    numbers: dict[str, int] = {}
    for place, cases in enumerate(tests):
        for item in cases:
            name = case_of(item)
            number = numbers.setdefault(name, len(numbers))
            if name not in item.get_closest_marker("rotates").args and (number + day) % len(tests) != place:
                item.add_marker("long")


def case_of(item: pytest.Item) -> str:
    """The first part of a case's id: `llama` of `test_logits[llama-packed]`."""
    return item.nodeid.partition("[")[2].rstrip("]").split("-")[0]


def covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """One case, the shortest on record, of each test that has no case in the default set."""
    record = recorded_seconds()
    kinds: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        kinds[kind_of(item)].append(item)
    return [
        min(cases, key=lambda item: record.get(file_of(item), {}).get(id_of(item), UNRECORDED))
        for cases in kinds.values()
        if not any(map(is_default, cases))
    ]


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
