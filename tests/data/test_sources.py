"""What a source names, and its rows in their order, each with its place."""

import hashlib
import json
from collections.abc import Callable

import pytest

from lean_ft.data.sources import first_rows, read_rows
from lean_ft.settings import Source

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


def test_a_source_is_a_path_a_glob_or_a_list_of_them(write: Write, tmp_path):
    for i in (2, 0, 1):
        write([{"n": i}], f"part{i}.jsonl")
    rows = list(read_rows([f"{tmp_path}/part[12].jsonl", Source(path=f"{tmp_path}/part0.jsonl", weight=2)]))
    assert [(row.fields["n"], row.source) for row in rows] == [(1, 0), (2, 0), (0, 1)]
    firsts = first_rows([f"{tmp_path}/part*.jsonl", f"{tmp_path}/part2.jsonl"], 2)
    assert [(row.fields["n"], row.source) for row in firsts] == [(0, 0), (1, 0), (2, 1)]


def test_paths_that_are_no_source(write: Write, tmp_path):
    for source, message in (
        ("missing.jsonl", "missing.jsonl does not exist; expected a JSONL, JSON"),
        ("folder/missing.jsonl", "folder/missing.jsonl does not exist"),
        (f"{tmp_path}/*.jsonl", "no file matches this glob"),
        ([], "empty list"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_rows(source))
    write(ROWS)
    with pytest.raises(ValueError, match=r"is a folder \(it holds rows\.jsonl\).*/\*\.jsonl"):
        list(read_rows(str(tmp_path)))
