"""A pytest plugin for `scripts/time_tests.py`: one line of JSON with the CPU seconds of each test, in `$STOPWATCH.PID`.

A fixture that several tests share counts for the first one that needs it. Child processes count for the test that waits
for them.
"""

import json
import os
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = sum(os.times()[:4])
    result = yield
    with open(f"{os.environ['STOPWATCH']}.{os.getpid()}", "a") as file:
        file.write(json.dumps([item.nodeid, sum(os.times()[:4]) - before]) + "\n")
    return result
