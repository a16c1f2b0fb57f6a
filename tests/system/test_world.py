"""The real world does the work that it gets, and few places ask which world they are in."""

import re
from pathlib import Path

import pytest

import lean_ft
from lean_ft.system.world import World, in_chunks, inside, world

MOST_PLACES = 16


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 4), (9, 4), (3, 4)])
def test_chunks_cover_everything_once(total: int, size: int) -> None:
    chunks = [range(total)[chunk] for chunk in in_chunks(total, size)]
    assert [place for chunk in chunks for place in chunk] == list(range(total))
    assert all(len(chunk) == size for chunk in chunks[:-1])


def test_another_world_answers_inside_its_context_only() -> None:
    class Other(World):
        def read(self, contents, instead):
            return instead()

    def asked() -> str:
        return world().read(lambda: "real", lambda: "planned")

    before = asked()
    with inside(Other()):
        during = asked()
    assert (before, during, asked()) == ("real", "planned", "real")


def test_few_places_ask() -> None:
    """A change that adds a place should ask where the decision is made, or let an object of the world differ."""
    package = Path(lean_ft.__file__).parent
    folders = (package, package.parent / "recipes")
    files = [file for folder in folders for file in folder.rglob("*.py") if file.parent.name != "plan"]
    asking = [file for file in files if file.name != "world.py" for _ in re.findall(r"\bworld\(\)", file.read_text())]
    assert 0 < len(asking) <= MOST_PLACES, asking
