"""Rows keep their order and their place; whatever is wrong with a file is said with its name and line."""

import hashlib
import json
from collections.abc import Callable

import pytest

from lean_ft.data.sources import read_rows

Write = Callable[..., str]
ROWS = [{"text": "first"}, {"text": "zweite ü"}, {"text": "third\u2028still third"}]


def test_jsonl(write: Write):
    path = write(ROWS)
    assert [(row.fields, row.place) for row in read_rows(path)] == [
        (fields, f"{path}, line {i}") for i, fields in enumerate(ROWS, start=1)
    ]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_whatever_the_name(write: Write, name: str, indent: int | None):
    path = write(json.dumps(ROWS, indent=indent), name)
    assert [(row.fields, row.place) for row in read_rows(path)] == [
        (fields, f"{path}, row {i}") for i, fields in enumerate(ROWS, start=1)
    ]


def test_jsonl_whatever_the_name(write: Write):
    assert [row.fields for row in read_rows(write(ROWS, "rows.json"))] == ROWS


def test_several_files_in_order(write: Write):
    paths = [write(ROWS[:1], "b.jsonl"), write(json.dumps(ROWS[1:]), "a.json")]
    assert [row.fields for row in read_rows(paths)] == ROWS


def test_byte_order_mark_blank_lines_and_windows_line_ends(write: Write):
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(row) for row in ROWS)
    assert [(row.fields, row.place[-6:]) for row in read_rows(write(text))] == list(
        zip(ROWS, ["line 1", "line 3", "line 5"], strict=True)
    )


def test_digest_sees_every_byte(write: Write):
    for name, text in (("rows.jsonl", '{"a": 1}\n\n{"a": 2}\n'), ("rows.json", '[{"a": 1}]\n')):
        digest = hashlib.sha256()
        list(read_rows(write(text, name), digest))
        assert digest.digest() == hashlib.sha256(text.encode()).digest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": \n', "rows.jsonl, line 2: malformed JSON: Expecting value"),
        ('{"a": 1}\n[1]\n', "line 2: expected a JSON object with named fields, found a list"),
        ('[{"a": 1},\n {"a" 2}]', "line 2: malformed JSON: Expecting ':' delimiter"),
        ('[{"a": 1}, 7]', "row 2: expected a JSON object with named fields, found a int"),
        ("[]", "has no rows: its JSON array is empty"),
        ("", "has no rows: the file is empty"),
        (" \n\n", "has no rows: the file is empty"),
        (b'{"a": "ok"}\n{"a": "caf\xe9"}\n', "line 2: not UTF-8 \\(byte 0xe9 at position 10\\)"),
        (b'[{"a": "caf\xe9"}]', "not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file(write: Write, content: str | bytes, message: str):
    with pytest.raises(ValueError, match=message):
        list(read_rows(write(content)))


def test_another_kind_of_file(write: Write):
    with pytest.raises(ValueError, match=r"rows.csv, line 1: malformed JSON.*Expected JSONL .* or a JSON array"):
        list(read_rows(write("question,answer\n1,2\n", "rows.csv")))


def test_paths_that_are_no_file(write: Write, tmp_path):
    with pytest.raises(ValueError, match=r"missing.jsonl does not exist"):
        list(read_rows("missing.jsonl"))
    write(ROWS)
    with pytest.raises(ValueError, match=r"is a folder.*it holds rows\.jsonl"):
        list(read_rows(str(tmp_path)))
    with pytest.raises(ValueError, match="empty list"):
        list(read_rows([]))
