"""Tests in this folder run on the simulated GPU (`make test-pretended-gpu`), each on the cards that it names, and on a
real GPU those
that compare values or count waits: they are not marked `simulated`."""

from pathlib import Path

import pytest

from tests.pretended_gpu.cards import IS_SIMULATED, card

collect_ignore_glob = [] if card() is not None else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cards(*names): the cards that a test is for; H100 where left out")
    config.addinivalue_line("markers", "simulated: needs what only the simulated GPU counts, orders or limits")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by `-m gpu`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as GPU tests, and deselect those for other cards."""
    here, own, kept, others = Path(__file__).parent, card(), [], []
    for item in items:
        if here not in item.path.parents:
            kept.append(item)
            continue
        item.add_marker("gpu")
        marker = item.get_closest_marker("cards")
        runs = IS_SIMULATED or item.get_closest_marker("simulated") is None
        (kept if runs and own in (marker.args if marker is not None else ("H100",)) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


@pytest.fixture(autouse=True)
def _compiler_starts_anew() -> None:
    """All tests of a process share one recompilation limit."""
    import torch

    torch._dynamo.reset()
