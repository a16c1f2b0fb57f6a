import enum
import json
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_ft.system.foreign_values import MAX_DEPTH, plain, valid_text


class Word(enum.StrEnum):
    A = "a"


class Pretender(str):
    def __str__(self) -> str:
        return "other"


def nested(depth: int) -> Any:
    value: Any = "x"
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


@pytest.mark.parametrize("number", [20, pytest.param(100, marks=pytest.mark.long)])
def test_json_passes_unchanged_as_a_copy(number: int):
    @settings(max_examples=number)
    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters=map(chr, range(0xFDD0, 0xFDF0)))), lambda x: st.lists(x) | st.dictionaries(st.sampled_from("abc"), x)))  # fmt: skip  # noqa: E501
    def check(value: Any):
        found = plain(value, "the row")
        assert found == value and json.dumps(found) == json.dumps(value)
        assert found is not value or not isinstance(value, list | dict)

    check()


def test_other_containers_and_subclasses_become_exact_types():
    odd = OrderedDict(a=(1, 2), b=MappingProxyType({Word.A: np.float64(0.5)}), c=Pretender("mine"), d=True)
    found = plain({7: odd}, "the row")
    assert found == {"7": {"a": [1, 2], "b": {"a": 0.5}, "c": "mine", "d": True}}
    assert [type(one) for one in found["7"].values()] == [list, dict, str, bool]
    assert plain(np.arange(3), "a result", lambda one: one.tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": [{"b": "x\ud800"}]}, r"the row: `a\[0\].b` has half a surrogate pair \(\\ud800\) at character 1"),
        ({"a": {"\udfff": 1}}, r"the row: `a` has a name that has half a surrogate pair"),
        ({"a": "\ufdd4"}, r"the row: `a` contains one of the Unicode noncharacters U\+FDD0 to U\+FDEF"),
        ({"a": {"\ufdd0": 1}}, r"the row: `a` has a name that contains one of the Unicode noncharacters"),
        ([{1, 2}], r"the row: `\[0\]` is a set; expected text"),
        ({"a": b"x"}, "the row: `a` is a bytes; expected text"),
        ({(1, 2): 1}, "the row has a name that is a tuple; expected text"),
        ({1: "a", "1": "b"}, "the row has a name that is '1' twice"),
        ([float("nan")], r"the row: `\[0\]` is nan, which is not JSON"),
        (nested(MAX_DEPTH + 1), "is nested too deeply: more than 100 containers"),
        ([0] * ((1 << 25) + 1), "the row has more than 33,554,432 values"),
    ],
)
def test_what_is_refused(value: Any, reason: str):
    with pytest.raises(ValueError, match=reason) as error:
        plain(value, "the row", finite=True)
    assert len(str(error.value)) < 300


def test_the_limit_of_depth_is_our_own(monkeypatch: pytest.MonkeyPatch):
    endless: list[Any] = []
    endless += [endless, endless]
    for value in (endless, nested(100_000)):
        with pytest.raises(ValueError, match="nested too deeply"):
            plain(value, "the row")
    plain(nested(MAX_DEPTH), "the row")


def test_text_that_must_not_end_a_run_is_repaired():
    assert valid_text("a\ud83dé\ufdd3b") == "a\ufffdé\ufffdb"
    assert valid_text("a\U0001f600") == "a\U0001f600"
