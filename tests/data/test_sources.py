"""Rows of each kind of source, in order, with their places."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lean_ft.data import documents
from lean_ft.data.documents import renderer_of
from lean_ft.data.sources import RowSources, source_files
from lean_ft.settings import DataSource, PreferenceDataConfig, SFTDataConfig
from lean_ft.system import log
from lean_ft.tokenizers import Tokenizer
from tests.data.conftest import first_rows, prepare, read_rows

Write = Callable[..., str]
ROWS = [{"text": "first"}, {"text": "zweite ü"}, {"text": "third\u2028still third"}]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows"])
def test_json_lines_and_arrays_whatever_the_name(write: Write, name: str):
    arrays = [json.dumps(ROWS, indent=indent) for indent in (None, 2)]
    for content, unit in ((ROWS, "line"), (arrays[0], "row"), (arrays[1], "row")):
        path = write(content, name)
        expected = [(fields, f"{path}, {unit} {i}") for i, fields in enumerate(ROWS, start=1)]
        assert [(row.fields, row.place) for row in read_rows(path)] == expected


def test_byte_order_mark_blank_lines_and_windows_line_ends(write: Write):
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(row) for row in ROWS)
    assert [(row.fields, row.place[-6:]) for row in read_rows(write(text))] == list(
        zip(ROWS, ["line 1", "line 3", "line 5"], strict=True)
    )


def test_a_source_is_a_path_a_glob_or_a_list_of_them(write: Write, tmp_path):
    for i in (2, 0, 1):
        write([{"n": i}], f"part{i}.jsonl")
    rows = list(read_rows([f"{tmp_path}/part[12].jsonl", DataSource(path=f"{tmp_path}/part0.jsonl", weight=2)]))
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
    with pytest.raises(ValueError, match=r"is a folder \(it has rows\.jsonl\).*/\*\.jsonl"):
        list(read_rows(str(tmp_path)))
    (tmp_path / "rows.jsonl").unlink()
    for name in ("a.txt", "b.v2.txt", "README"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match=r"pass a glob: \S+/\*\.txt$"):
        list(read_rows(str(tmp_path)))


CONVERTERS = """
def pairs(row): return {"prompt": row["q"], "completion": row["a"]}
def chat(row): return [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]
def text(row): return row["q"] + row["a"]
def odd(row): return pairs(row) if row["n"] % 2 else None
def number(row): return row["n"]
def fails(row): return 1 / (row["n"] - 2) and pairs(row)
def preference(row): return {"prompt": row["q"], "chosen": row["a"], "rejected": "no"}
"""


class TestAFunctionOfOnesOwn:
    """`data.format=FILE.py:FUNCTION`."""

    ROWS = [{"q": f"{n}?", "a": f"{n}!", "n": n} for n in range(1, 5)]  # noqa: RUF012

    @pytest.fixture
    def settings(self, write: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
        (tmp_path / "own.py").write_text(CONVERTERS)
        source = write(self.ROWS)
        return lambda name, **more: {"source": source, "format": f"{tmp_path / 'own.py'}:{name}", **more}

    def test_a_call_that_takes_long_is_reported(self, write: Any, tmp_path: Path, monkeypatch: Any, capsys: Any):
        monkeypatch.setattr(log, "SLOW_SECONDS", 0.2)
        (tmp_path / "slow.py").write_text(
            "import time\ndef f(row):\n    time.sleep(0.5 * (row['n'] == 2))\n    return row['q'] if row['n'] < 4 "
            "else 1 / 0\n"
        )
        config = SFTDataConfig(source=write(self.ROWS), format=f"{tmp_path / 'slow.py'}:f")
        for row in read_rows(config.source, config=config):
            time.sleep(0.5)  # the time of the reader does not count
            assert row.fields or row.problem
        assert capsys.readouterr().out.count(f"waiting     data.format={tmp_path / 'slow.py'}:f has run for") == 2

    def test_it_gets_copies_and_returns_copies(self, write: Any, tmp_path: Path):
        """Rows that wait for others keep what the function returned for them, and the folder stays."""
        (tmp_path / "copies.py").write_text(
            "import os\nmade = {'text': ['']}\n"
            "async def f(row):\n    made['text'][0] = row['q'].pop()\n    os.chdir('/')\n    return made\n"
            "def g(row):\n    return {'text': (one for one in 'ab')}\n"
        )
        source, here = write([{"q": [str(n)]} for n in range(3)]), Path.cwd()
        for _ in range(2):
            config = SFTDataConfig(source=source, format=f"{tmp_path / 'copies.py'}:f")
            rows = list(read_rows(config.source, config=config))
            assert [row.fields for row in rows] == [{"text": [str(n)]} for n in range(3)]
            assert Path.cwd() == here
        config = SFTDataConfig(source=source, format=f"{tmp_path / 'copies.py'}:g")
        problem = next(read_rows(config.source, config=config)).problem
        assert (
            problem is not None
            and "copies.py:g returned a value that cannot be copied (TypeError: cannot pickle" in problem
        )

    @pytest.mark.first
    @pytest.mark.parametrize("num_processes", [1, 2])
    def test_its_rows_are_those_of_a_file_that_has_them(
        self, num_processes: int, settings: Any, write: Any, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(documents, "FEW_ROWS", 1)
        converters: dict[str, Any] = {}
        exec(CONVERTERS, converters)
        for name in ("pairs", "chat", "text", "odd") if num_processes == 1 else ("pairs",):
            made = [value for row in self.ROWS if (value := converters[name](row)) is not None]
            wrapped = [{"chat": {"messages": row}, "text": {"text": row}}.get(name, row) for row in made]
            expected, _ = prepare(SFTDataConfig(source=write(wrapped, "made.jsonl"), num_processes=1), chat_tokenizer)
            found, report = prepare(SFTDataConfig(**settings(name, num_processes=num_processes)), chat_tokenizer)
            assert found.content() == expected.content()
            assert report.rows == len(made)
        render = renderer_of(PreferenceDataConfig(**settings("preference")), chat_tokenizer)
        assert render.reader.format == "preference"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fails", r"rows.jsonl, line 2: data.format: .*own.py, line 7: ZeroDivisionError"),
            ("number", r"rows.jsonl, line 1: data.format=.*own.py:number returned a number; expected a dict of fields"),
        ],
    )
    def test_a_row_that_it_cannot_convert_is_a_bad_row(
        self, name: str, message: str, settings: Any, chat_tokenizer: Tokenizer
    ):
        with pytest.raises(ValueError, match=message):
            prepare(SFTDataConfig(**settings(name)), chat_tokenizer)
        if name == "fails":
            _, report = prepare(SFTDataConfig(**settings(name, on_bad_row="skip")), chat_tokenizer)
            assert (report.kept, report.bad_rows) == (3, 1)

    def test_what_is_kept_is_found_again_until_the_file_changes(self, settings: Any, tmp_path: Path):
        def content() -> tuple[str | None, str]:
            config = SFTDataConfig(**settings("pairs"))
            read_rows_into = hashlib.blake2b()
            list(read_rows(config.source, read_rows_into, config))
            return RowSources.of(config).content(tmp_path), read_rows_into.hexdigest()

        before = content()
        assert content() == before
        (tmp_path / "own.py").write_text(CONVERTERS.replace('"completion": row["a"]', '"completion": row["q"]'))
        after = content()
        assert before[0] != after[0] and before[1] != after[1]


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "my_chats.jsonl").touch()
    with pytest.raises(ValueError, match=r"my_chat.jsonl does not exist; .* Did you mean '.*/my_chats.jsonl'\?"):
        source_files(str(tmp_path / "my_chat.jsonl"))
