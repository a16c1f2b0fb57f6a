"""The format is told from the fields that the first rows have, for each source by itself."""

from typing import Any

import pytest

from lean_ft.data.formats import formats_of
from lean_ft.data.rows import Row
from lean_ft.settings import SFTDataConfig

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def detect(*fields: dict[str, Any], **settings: Any) -> str:
    rows = [Row(one, f"a.jsonl, line {i}") for i, one in enumerate(fields, start=1)]
    return formats_of(SFTDataConfig(source="a.jsonl", **settings), rows)[0].name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": MESSAGES, "text": "x"}, "messages"),
        ({"conversations": [], "id": 3}, "sharegpt"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference"),
        ({"chosen": "a", "rejected": "b"}, "preference"),
        ({"prompt": "q", "completion": "a", "instruction": "q", "output": "a"}, "prompt_completion"),
        ({"instruction": "q", "output": "a", "text": "x"}, "alpaca"),
        ({"input_ids": [1], "text": "x"}, "tokens"),
        ({"text": "x", "prompt": "q"}, "text"),
    ],
)
def test_detection(fields: dict[str, Any], name: str):
    assert detect(fields) == name
    # A format fits only if it fits every row that is looked at.
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the format cannot be told from the fields other"):
        detect(fields, {"other": 1})
    assert detect(fields, {"other": 1}, on_bad_row="skip") == name
    assert detect({"other": 1}, format=name) == name


def test_every_source_has_a_format():
    rows = [Row({"text": "x"}, "a", 0), Row({"prompt": "q", "completion": "a"}, "b", 2)]
    assert formats_of(SFTDataConfig(source=["a", "b", "c"]), rows) == {0: ("text", {}), 2: ("prompt_completion", {})}


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"question": "q"}, {}, r"line 1: the format cannot be told from the fields question.*data\.columns\.prompt=question"),
        ({}, {}, "from the fields no fields"),
        ({"text": "x"}, {"columns": {"promt": "x"}}, "data.columns.promt: no format has such a field.*mean 'prompt'"),
    ],
)  # fmt: skip
def test_what_cannot_be_told(fields, settings, message):
    with pytest.raises(ValueError, match=message):
        detect(fields, **settings)


def test_rows_that_could_not_be_read_tell_nothing():
    config = SFTDataConfig(source="a.jsonl", on_bad_row="skip")
    bad, good = Row({}, "a.jsonl, line 1", problem="malformed JSON"), Row({"text": "x"}, "a.jsonl, line 2")
    assert formats_of(config, [bad, good]) == {0: ("text", {})}
    with pytest.raises(ValueError, match=r"line 1: malformed JSON\. None of the first rows"):
        formats_of(config, [bad])
