"""Rows of Parquet files and Hugging Face datasets. Datasets are local folders; nothing is downloaded."""

import hashlib
import importlib
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lean_ft.data.arrow_rows import as_json, read_dataset, read_parquet_file
from lean_ft.data.prepare import Preparation, prepare_batches
from lean_ft.settings import SFTDataConfig
from tests.data.conftest import read_rows

datasets = pytest.importorskip("datasets", reason="needs the `datasets` extra")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
OTHER = {"role": "assistant", "content": "b", "tool_calls": [{"name": "g", "arguments": {"y": "z"}}]}
ROWS: list[dict[str, Any]] = [{"messages": [CALL], "note": None}, {"messages": [OTHER], "note": "n"}]


def expected() -> list[dict[str, Any]]:
    # Arrow fills missing names with null; nulls in nested objects are treated as absent.
    return [{"messages": [{k: v for k, v in CALL.items() if v is not None}], "note": None}, ROWS[1]]


def test_parquet(tmp_path: Path):
    path = tmp_path / "rows"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    digest = hashlib.sha256()
    rows = list(read_rows(str(path), digest))
    assert [row.fields for row in rows] == expected()
    assert rows[1].place == f"{path}, row 2"
    assert digest.digest() == hashlib.sha256(path.read_bytes()).digest()


def test_a_map_is_an_object(tmp_path: Path):
    maps = pyarrow.map_("string", pyarrow.map_("string", "int64"))
    values = [[("f", [("x", 1), ("y", None)])], [], [("f", [("x", 1), ("x", 2)])]]
    parquet.write_table(pyarrow.table({"id": ["a"] * 3, "m": pyarrow.array(values, maps)}), tmp_path / "rows")
    rows = list(read_rows(str(tmp_path / "rows")))
    assert rows[0].fields["m"] == {"f": {"x": 1, "y": None}}
    assert rows[1].problem is None
    assert rows[2].problem == "the map `m` has a name more than once" or "`f`" in str(rows[2].problem)


LONG = "a" * 5_000_000


def referring(text: str, number: int) -> Any:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * number, "int32"), [text])


# Tables whose file is a few KB long, and what they expand to.
BOMBS = {
    "references to one long text": lambda: {"text": referring(LONG, 20)},
    "references inside a list": lambda: {"messages": [[{"role": "user", "content": LONG}] * 20]},
    "references inside a map": lambda: {"x": pyarrow.array([[("k", LONG)] * 20], pyarrow.map_("string", "string"))},
    "texts that compress": lambda: {"text": [LONG + str(i) for i in range(20)]},
    "one text per group": lambda: {"text": [LONG] * 20},
    "a run of numbers": lambda: {"input_ids": [[1] * 9_000_000]},
    "nulls": lambda: {f"c{i}": pyarrow.nulls(90_000, "string") for i in range(100)},
    "bytes": lambda: {"image": [LONG.encode()] * 20, "text": ["a"] * 20},
    "blocks of a fixed size": lambda: {"x": pyarrow.array([LONG.encode()] * 20, pyarrow.binary(len(LONG)))},
    "texts that begin alike": lambda: {"text": [LONG] * 20},
}


@pytest.mark.first
@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_does_not_become_large(case: str, tmp_path: Path):
    settings: dict[str, Any] = {"compression": "zstd", "row_group_size": 1 if "group" in case else 100_000}
    if case == "texts that begin alike":
        settings |= {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}
    parquet.write_table(pyarrow.table(BOMBS[case]()), tmp_path / "rows", **settings)
    assert (tmp_path / "rows").stat().st_size < 200_000
    before, read = pyarrow.total_allocated_bytes(), list[int]()
    with pytest.raises(ValueError, match="rows expands to more than 67,108,864 bytes, 200 times its size"):
        read += (pyarrow.total_allocated_bytes() - before for _ in read_rows(str(tmp_path / "rows")))
    assert len(read) <= 2**26 // len(LONG) and all(num_bytes < 2**26 for num_bytes in read)


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.long)])
def test_damaged_metadata_do_not_end_the_process(tmp_path: Path, step: int):
    """The library's `column` ends the process if the levels that a column counts do not fit its type."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"a": ["x"] * 3, "b": ["y", None, "z"]}), path)
    whole, num_refused = path.read_bytes(), 0
    for place in range(len(whole) - 900, len(whole) - 8, step):
        for bit in (1, 2, 4):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            try:
                list(read_rows(str(path)))
            except ValueError:
                num_refused += 1
    assert num_refused > 1000 / step


def test_a_long_text_among_many_short_ones_is_read(tmp_path: Path):
    """Its length times the number of values is over the limit, so texts are read as references."""
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "a", "content": f"{i % 7}é"}]} for i in range(3000)
    ]
    rows[1500] = {"messages": [{"role": "user", "content": LONG}, {"role": "a", "content": None}]}
    kinds = {
        "kind": pyarrow.array(["x", None, "y"] * 1000).dictionary_encode(),
        "n": pyarrow.array([3, 4, 5] * 1000).dictionary_encode(),
    }
    table = pyarrow.Table.from_pylist(rows)
    for name, column in kinds.items():
        table = table.append_column(name, column)
    parquet.write_table(table, tmp_path / "rows", row_group_size=2000)
    read = [row.fields for row in read_rows(str(tmp_path / "rows"))]
    del rows[1500]["messages"][1]["content"]
    assert read == [{**row, "kind": ["x", None, "y"][i % 3], "n": 3 + i % 3} for i, row in enumerate(rows)]


def test_values_that_json_lacks(tmp_path: Path):
    row = {"day": date(2026, 1, 2), "price": Decimal("1.50"), "raw": b"x", "deep": [{"at": datetime(2026, 1, 2, 3)}]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows")
    [read] = read_rows(str(tmp_path / "rows"))
    deep = [{"at": "2026-01-02 03:00:00"}]
    assert read.fields == {"day": "2026-01-02", "price": "1.50", "raw": {"type": "bytes"}, "deep": deep}


def test_parquet_that_cannot_be_read(tmp_path: Path, monkeypatch):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"rows.parquet cannot be read as Parquet"):
        list(read_rows(str(path)))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), path)
    with pytest.raises(ValueError, match=r"rows.parquet has no rows"):
        list(read_rows(str(path)))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install -e .*\[datasets\]"):
        list(read_rows(str(path)))


def test_a_saved_dataset(tmp_path: Path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk(tmp_path / "splits")
    assert [row.fields for row in read_rows(str(tmp_path / "one"))] == expected()
    path = str(tmp_path / "splits")
    assert len(list(read_rows(path))) == 2
    rows = list(read_rows(path, None, SFTDataConfig(source=path, split="test")))
    assert [(row.fields, row.place) for row in rows] == [(expected()[1], f"{path} (test), row 1")]
    half = SFTDataConfig(source=path, split="train[50%:]")
    assert [row.fields for row in read_rows(path, None, half)] == expected()[1:]
    with pytest.raises(ValueError, match=r"data.split=dev.*no split dev; the splits are train, test"):
        list(read_rows(path, None, SFTDataConfig(source=path, split="dev")))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> str:
    """A local dataset in the layout of a Hub repository, with two subsets, loaded as `org/name`."""
    folder = tmp_path / "org" / "name"
    for subset, rows in (("main", ROWS), ("other", ROWS[1:])):
        (folder / subset).mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / subset / "train-00000.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: main/*.parquet\n- config_name: other\n"
        "  data_files: other/*.parquet\n---\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load = datasets.load_dataset  # mocked boundary: `org/name` is a local folder, not on the Hub
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *a, **k: load(str(tmp_path / name), *a, **k))
    return "org/name"


@pytest.mark.parametrize("streaming", [False, True])
def test_the_hub(hub: str, streaming: bool):
    config = SFTDataConfig(source=hub, subset="main", streaming=streaming)
    assert [row.fields for row in read_rows(hub, None, config)] == expected()
    source = SFTDataConfig(source=[{"path": hub, "subset": "other"}]).source  # pyright: ignore
    digests = [hashlib.sha256(), hashlib.sha256()]
    assert [row.fields for row in read_rows(source, digests[0], config)] == expected()[1:]
    list(read_rows(hub, digests[1], config))
    assert digests[0].digest() != digests[1].digest()


def test_a_streamed_dataset_with_a_local_validation_file(hub: str, tmp_path: Path, plain_tokenizer):
    (tmp_path / "held_out.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    datasets.Dataset.from_list([{"text": f"row {i}"} for i in range(3)]).save_to_disk(str(tmp_path / "texts"))
    settings = {"validation_source": f"{tmp_path}/held_out.jsonl", "cache_dir": tmp_path / "prepared"}
    found = []
    for streaming in (False, True):
        config = SFTDataConfig(source=str(tmp_path / "texts"), streaming=streaming, **settings)  # pyright: ignore
        batches, held_out = prepare_batches(config, plain_tokenizer, 1, seed=0)
        assert held_out is not None
        found.append((batches.layout.columns.values["ids"].tolist(), held_out.layout.columns.values["ids"].tolist()))
        assert (batches.report.kept, held_out.report.kept) == (3, 2)
    assert found[0] == found[1]
    config = SFTDataConfig(source=settings["validation_source"], streaming=True, validation_source=hub)
    with pytest.raises(ValueError, match="data.streaming=true applies to Hugging Face datasets, but .*held_out.jsonl"):
        prepare_batches(config, plain_tokenizer, 1, seed=0)


def test_a_dataset_that_is_not_there(hub: str):
    with pytest.raises(ValueError, match=r"org/nane could not be read as a Hugging Face dataset"):
        list(read_rows("org/nane"))
    with pytest.raises(ValueError, match=r"data.subset=third.*main"):
        list(read_dataset(hub, None, subset="third", split="train", streaming=False))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"org/name is a Hugging Face dataset.*pip install -e .*\[datasets\]"):
        list(read_rows("org/name"))


def test_another_split_or_dataset_is_prepared_anew(tmp_path: Path, plain_tokenizer):
    def key(name: str, split: str = "train") -> str | None:
        data = SFTDataConfig(source=str(tmp_path / name), split=split, cache_dir=tmp_path)
        return Preparation(data, plain_tokenizer, batch_size=1, seed=0).documents(data.source).key

    first = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    datasets.DatasetDict(train=first, test=first.select([1])).save_to_disk(tmp_path / "data")
    datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "three"}])).save_to_disk(tmp_path / "other")
    assert key("data") == key("data") is not None
    assert len({key("data"), key("data", "test"), key("other")}) == 3


def test_parquet_whose_text_is_not_utf8(tmp_path: Path):
    offsets, values = pyarrow.array([0, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xec\x00")
    column = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, values])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="rows.parquet cannot be read as Parquet: 'utf-8' codec"):
        list(read_rows(str(tmp_path / "rows.parquet")))


def test_parquet_that_tells_of_more_rows_than_bytes(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    importlib.import_module("pyarrow.parquet").write_table(
        pyarrow.table({"text": pyarrow.repeat("a", 2_000_000)}), file
    )
    with pytest.raises(ValueError, match=r"2,000,000 rows in [\d,]+ bytes"):
        next(read_parquet_file(file, None))


def test_encoded_images_are_kept_under_any_name():
    gif = b"GIF89a\1\0\1\0\0\0\0;"
    row = {"photo": gif, "nested": [{"picture": gif, "blob": b"GIF"}], "bytes": b"x"}
    assert as_json(row) == {"photo": gif, "nested": [{"picture": gif, "blob": {"type": "bytes"}}], "bytes": b"x"}
