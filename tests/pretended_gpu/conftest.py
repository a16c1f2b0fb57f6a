"""Tests in this folder run only on the simulated GPU (`make test-pretended-gpu`), each on the cards that it names."""

import os
from pathlib import Path

import pytest

collect_ignore_glob = [] if "PRETENDED_GPU" in os.environ else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cards(*names): the simulated cards that a test is for; H100 where left out")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by `-m gpu`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as GPU tests, and deselect those for other cards."""
    card, kept, others = os.environ.get("PRETENDED_GPU"), [], []
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            kept.append(item)
            continue
        item.add_marker("gpu")
        marker = item.get_closest_marker("cards")
        (kept if card in (marker.args if marker is not None else ("H100",)) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept
