"""Tests in this folder run on the pretended GPU alone (`make test-pretended-gpu`), and each on the cards that it names."""

import os
from pathlib import Path

import pytest

collect_ignore_glob = [] if "PRETENDED_GPU" in os.environ else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cards(*names): the pretended cards that a test is for; H100 where left out")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by `-m gpu`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is here as for a GPU, and leaves out what is for other cards than the one that is pretended."""
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
