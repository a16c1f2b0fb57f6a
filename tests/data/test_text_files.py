"""All text file formats give the same rows; errors name the file, line and reason."""

import gzip
import hashlib
import json
import re
import time
from collections.abc import Callable

import pytest
import zstandard

from lean_ft.data import text_files
from lean_ft.data.text_files import parse_json
from tests.data.conftest import read_rows

Write = Callable[..., str]
ROWS = [{"q": 'a "b", c', "a": "1\n2"}, {"q": "ü\u2028", "a": ""}, {"q": "x" * 70_000, "a": "nul"}]


def csv_of(rows, comma: str) -> str:
    lines = [
        [f'"{value}"' for value in (row["q"].replace('"', '""'), row["a"])] for row in [{"q": "q", "a": "a"}, *rows]
    ]
    return "\r\n".join(comma.join(line) for line in lines) + "\r\n"


JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
PLAIN = {
    "rows.jsonl": JSONL,
    "rows.json": json.dumps(ROWS, indent=1),
    "rows.csv": csv_of(ROWS, ","),
    "rows.tsv": csv_of(ROWS, "\t"),
    "semicolons.csv": csv_of(ROWS, ";"),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
def test_all_kinds_give_the_same_rows(write: Write, name: str, compress: Callable[[bytes], bytes]):
    content = b"\xef\xbb\xbf" + PLAIN[name].encode()
    # Compression is not detected by suffix. Two concatenated frames (`cat a.gz b.gz`) are one text.
    half = content.index(b"\n") + 1
    packed = content if compress is bytes else compress(content[:half]) + compress(content[half:])
    digest = hashlib.sha256()
    rows = list(read_rows(write(packed, name if compress is bytes else f"{name}.gz"), digest))
    assert [row.fields for row in rows] == ROWS
    assert digest.digest() == hashlib.sha256(content).digest()


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        ("Call me\n\nIshmael.\n", "a.txt", [{"text": "Call me\n\nIshmael.\n"}]),
        ("[Chapter 1] {x}", "a.txt", [{"text": "[Chapter 1] {x}"}]),
        ("# Title", "a.md", [{"text": "# Title"}]),
        ('{"a": 1}\n{"a": 2}', "a.txt", [{"a": 1}, {"a": 2}]),
        ('{"data": [{"role": "user"}]}', "a.json", [{"data": [{"role": "user"}]}]),
        ("a;b\n1,5;2", "a.csv", [{"a": "1,5", "b": "2"}]),
    ],
)
def test_what_a_file_holds_is_told(write: Write, content: str, name: str, expected: list[dict[str, object]]):
    assert [row.fields for row in read_rows(write(content, name))] == expected


def test_a_cell_over_several_lines_counts_its_lines(write: Write):
    rows = read_rows(write('a,b\n"1\n2",x\n\ny,z\n', "rows.csv"))
    assert [row.place[-6:] for row in rows] == ["line 2", "line 5"]


AROUND = {"rows.jsonl": (b'{"a": 1}\n', b'{"a": 2}\n'), "rows.csv": (b"a,b\n1,2\n", b"3,4\n")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": ', "rows.jsonl, line 2: malformed JSON: Expecting value"),
        ("[1]", "line 2: expected a JSON object with named fields, found a list"),
        ("null", "found null"),
        (b'{"a": "caf\xe9"}', r"line 2: not UTF-8 \(byte 0xe9 at position 10\)"),
        ('{"a": NaN}', "NaN is not valid JSON"),
        ('{"a": [-Infinity]}', "-Infinity is not valid JSON"),
        ('{"a": {"b": 1, "b": 2}}', "an object has the key `b` more than once"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
        ('{"a": "\0"}', "Invalid control character"),
        ("1", "rows.csv, line 3: 1 cells, but the header has 2 columns"),
        ("1,2,3", "rows.csv, line 3: 3 cells, but the header has 2 columns"),
        (b"caf\xe9,1", r"rows.csv, line 3: not UTF-8 \(byte 0xe9\)"),
        ('[{"a": 1}, 7, {"a": 2}]', "row 2: expected a JSON object with named fields, found a number"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "line",
)
def test_a_bad_line_leaves_the_others(write: Write, line: str | bytes, message: str):
    line = line.encode() if isinstance(line, str) else line
    name = "rows.csv" if "line 3" in message else "rows.jsonl"
    before, after = (b"", b"") if "row 2" in message else AROUND[name]
    rows = list(read_rows(write(before + line + b"\n" + after, name)))
    assert [row.problem is None for row in rows] == [True, False, True]
    assert rows[1].fields == {}
    assert re.search(message, f"{rows[1].place}: {rows[1].problem}")


def test_an_empty_text_file_is_a_row_that_can_be_skipped(write: Write):
    for content, reason in (("", "the file is empty"), (" " * 5000 + "text", "its first 4,096 bytes are blank")):
        (row,) = read_rows(write(content, "a.txt"))
        assert (row.fields, row.problem) == ({}, reason)


LONG = "".join(f'{{"a": "{hashlib.sha256(bytes([i % 256, i // 256])).hexdigest()}"}}\n' for i in range(9999)).encode()


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "rows.jsonl", "rows.jsonl has no rows: the file is empty"),
        (" \n\n", "rows.jsonl", "has no rows: the file is empty"),
        ("[]", "rows.jsonl", "has no rows"),
        ("a,b\n", "rows.csv", "has no rows"),
        (gzip.compress(b"", mtime=0), "rows.jsonl", "the file is empty"),
        ('[{"a": 1},\n {"a" 2}]', "rows.json", "rows.json: malformed JSON: Expecting ':' delimiter .line 2"),
        (b'[{"a": "caf\xe9"}]', "rows.json", "rows.json: not UTF-8"),
        ('{"a": 1}\n'.encode("utf-16"), "rows.jsonl", "rows.jsonl looks like UTF-16.*iconv"),
        ('{"a": 1}\n'.encode("utf-16-le"), "rows.jsonl", "looks like UTF-16"),
        ('a,b\n"1,2\n', "rows.csv", "malformed CSV: unexpected end of data"),
        ("a,a\n1,2\n", "rows.csv", "duplicate column name"),
        ("a\rb,c\n1,2\n", "rows.csv", "malformed CSV"),
        (gzip.compress(LONG, mtime=0)[:-9], "rows.jsonl.gz", "rows.jsonl.gz cannot be read to its end"),
        (gzip.compress(LONG, mtime=0)[:90_000] + b"damaged" * 99, "rows.jsonl.gz", "cannot be read to its end"),
        (zstandard.compress(LONG)[:-9], "rows.jsonl.zst", "rows.jsonl.zst cannot be read to its end"),
        (zstandard.compress(LONG)[:-200_000] + b"damaged" * 99, "rows.jsonl.zst", "cannot be read to its end"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "content",
)  # fmt: skip
def test_a_file_that_cannot_be_read_on(write: Write, content: str | bytes, name: str, message: str):
    with pytest.raises(ValueError, match=message):
        list(read_rows(write(content, name)))


def test_zstd_without_its_package(write: Write, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"pip install -e .*\[zstd\]"):
        list(read_rows(write(zstandard.compress(b'{"a": 1}\n'))))


@pytest.mark.first(2)
@pytest.mark.parametrize("start", [b'{"a": "', b"[", b" "])
@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_an_archive_that_grows_without_end_is_refused_at_once(write: Write, start: bytes, kind: str, monkeypatch):
    monkeypatch.setattr(text_files, "EXPANDED_BYTES", 2**20)
    content = start + bytes([32]) * 2**24
    compress = gzip.compress if kind == "gzip" else zstandard.compress
    path = write(compress(content))
    del content
    began = time.process_time()
    expected = "expands to more than 200 times|first 4,096 bytes are blank"
    with pytest.raises(ValueError, match=expected):
        list(read_rows(path))
    assert time.process_time() - began < 5


def test_many_names_of_an_object_are_compared_in_linear_time():
    names = ",".join(f'"{i}": 1' for i in range(100_000))
    began = time.process_time()
    with pytest.raises(ValueError, match="the key `99999` more than once"):
        parse_json(f'{{{names}, "99999": 2}}')
    assert time.process_time() - began < 5


def test_a_line_without_end_is_refused(write: Write, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 2**20)
    with pytest.raises(ValueError, match=r"line 2 is longer than 1 MiB"):
        list(read_rows(write(b'{"a": "b"}\n' + b" " * 2**21)))


@pytest.mark.first
@pytest.mark.parametrize(("start", "end"), [(b'{"x": [', b"0]}"), (b'[{"x": [', b"0]}]")])
def test_a_small_archive_does_not_become_many_values(start: bytes, end: bytes, tmp_path):
    (tmp_path / "few.json").write_bytes(gzip.compress(start + b"[]," * 1000 + end))
    (tmp_path / "many.json").write_bytes(gzip.compress(start + b"[]," * 9_000_000 + end))
    assert [len(row.fields["x"]) for row in read_rows(str(tmp_path / "few.json"))] == [1001]
    try:
        problems = [row.problem for row in read_rows(str(tmp_path / "many.json"))]
    except ValueError as error:  # an array is read whole
        problems = [str(error)]
    assert len(problems) == 1 and "more than 8,388,608 values" in str(problems[0])
