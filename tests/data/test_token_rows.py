"""Rows that were tokenised elsewhere."""

from typing import Any

import pytest

from lean_ft.data.formats import read_token_row


def read(vocab_size: int = 10, **fields: Any) -> tuple[list[int], list[bool]]:
    ids, mask = read_token_row(fields, vocab_size)
    return ids.tolist(), mask.tolist()


def test_ids_and_labels():
    assert read(input_ids=[1, 2, 3]) == ([1, 2, 3], [True] * 3)
    assert read(input_ids=[1, 2, 3], labels=[-100, 2, -100]) == ([1, 2, 3], [False, True, False])
    assert read(input_ids="[1, 2]", labels="[-100, 2]") == ([1, 2], [False, True])  # as in CSV


@pytest.mark.parametrize("attention_mask", [[0, 1, 1, 0, 0], [0, 1, 1, False, 0]])
def test_padding_is_left_out(attention_mask: list[int]):
    row = read(input_ids=[0, 1, 2, 0, 0], labels=[-100, 1, 2, 0, 0], attention_mask=attention_mask)
    assert row == ([1, 2], [True, True])
    assert read(input_ids=[0, 0], attention_mask=[0, 0]) == ([], [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "`labels` has 1 values for 2 `input_ids`"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "`attention_mask` has 1 values"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "zeros between ones"),
        ({"input_ids": [1, 10]}, "`input_ids` has 10 at position 1; this tokenizer's ids are 0 to 9"),
        ({"input_ids": [1, -1]}, "`input_ids` has -1"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "`labels` has 2 at position 0, where `input_ids` has 1.*not shifted"),
        ({"input_ids": "text"}, "`input_ids` is a string"),
        ({"input_ids": [1, 2.0]}, "`input_ids` holds 2.0"),
        ({"input_ids": [1, None]}, "`input_ids` holds None"),
        ({"input_ids": [1 << 70]}, "`input_ids` holds"),
    ],
)  # fmt: skip
def test_rows_that_are_something_else(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read(**fields)
