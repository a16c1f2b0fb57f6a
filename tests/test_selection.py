"""Which tests are default, and that they fit the limit of CPU time."""

import pytest

from tests import selection

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.filterwarnings("ignore:Unknown pytest.mark")

A_FILE = """
import pytest

@pytest.mark.first(2)
@pytest.mark.parametrize("case", "abc")
def test_first(case): pass

@pytest.mark.long
@pytest.mark.parametrize("case", "ab")
def test_long(case): pass
"""


def test_the_default_tests_fit_their_limit(request: pytest.FixtureRequest):
    """Counts the tests that this run selected: all default ones with `make test`. Shorten a test, or mark it `long`."""
    seconds = selection.seconds_of(filter(selection.is_default, request.session.items))
    assert seconds + selection.IMPORTS <= selection.LIMIT


def test_cases_that_are_not_the_first_are_long(pytester: pytest.Pytester):
    items = pytester.getitems(A_FILE)
    selection.mark_long(items)
    chosen = [item.name for item in items if selection.is_default(item)]
    assert chosen == ["test_first[a]", "test_first[b]"]


def test_the_covering_set_has_a_case_of_each_test_without_a_default_case(pytester: pytest.Pytester):
    items = pytester.getitems(A_FILE)
    selection.mark_long(items)
    assert [item.name for item in selection.covering(items)] == ["test_long[a]"]


def test_lanes_are_disjoint_and_hold_every_test(request: pytest.FixtureRequest):
    items = request.session.items
    lanes = [selection.lane(items, number, 3) for number in (1, 2, 3)]
    assert sorted(item.nodeid for lane in lanes for item in lane) == sorted(item.nodeid for item in items)
