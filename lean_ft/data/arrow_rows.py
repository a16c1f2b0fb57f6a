"""Rows of Parquet files and of Hugging Face datasets, which both hold columns. Needs the `datasets` extra.

A column has one type for all rows, so an object that lacks a name gets it with null there. In what a chat template
writes out (tools, tool calls) such nulls were never said, and are taken out again. Dates and decimal numbers become
text, as CSV has them; bytes, pictures and the like are no values that a row of text can have, and become an object that
names their type.
"""

import contextlib
import json
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from lean_ft.data.rows import Digest, Row
from lean_ft.data.splits import is_sliced, rows_of_split

ROWS_AT_A_TIME = 1024
MANY_ROWS = 100_000
PARQUET = b"PAR1"
HASHED_BYTES_AT_A_TIME = 1 << 20


def is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PARQUET)) == PARQUET


def read_parquet_file(path: Path, digest: Digest | None) -> Iterator[Row]:
    """Rows of a Parquet file, a group at a time. Raises ValueError for a file that cannot be read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} is a Parquet file, which needs a package: pip install 'lean-ft[datasets]'.") from None
    if digest is not None:
        with path.open("rb") as file:
            while some := file.read(HASHED_BYTES_AT_A_TIME):
                digest.update(some)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            num_rows, size = file.metadata.num_rows, path.stat().st_size
            if num_rows == 0:
                raise ValueError(f"{path} has no rows.")
            if num_rows > max(MANY_ROWS, size):
                raise ValueError(
                    f"{path} tells of {num_rows:,} rows in {size:,} bytes, as no file of different rows has."
                )
            number = 0
            for batch in file.iter_batches(ROWS_AT_A_TIME):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(as_json(fields), f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def read_dataset(name: str, digest: Digest | None, *, subset: str | None, split: str, streaming: bool) -> Iterator[Row]:
    """Rows of the Hugging Face dataset `name`, on the hub (`org/name`) or in a folder that `save_to_disk` wrote.

    Raises ValueError where it is not there, or has no such subset or split.
    """
    with _explained(name, subset, split):
        for number, fields in enumerate(_open(name, subset, split, streaming), start=1):
            if digest is not None:
                digest.update(json.dumps(fields, default=str).encode())
            yield Row(as_json(fields), f"{name} ({split}), row {number}")


def dataset_files(name: str, *, subset: str | None, split: str) -> list[Path]:
    """The files on the disk that the dataset's rows lie in, in order, fetched if need be; none where it has no files.

    Raises ValueError as `read_dataset` does.
    """
    with _explained(name, subset, split):
        return [Path(file["filename"]) for file in _open(name, subset, split, streaming=False).cache_files]


def _open(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    if not Path(name).is_dir():
        return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    dataset: Any = datasets.load_from_disk(name)
    if not isinstance(dataset, datasets.DatasetDict):
        dataset = {str(dataset.split or "train"): dataset}
    split_name = split.partition("[")[0]
    if split_name not in dataset:
        raise ValueError(f"it has the splits {', '.join(map(str, dataset))}, and no {split_name}")
    dataset = dataset[split_name]
    first, last = rows_of_split(split, lambda: len(dataset))
    return dataset if not is_sliced(split) else dataset.select(range(len(dataset))[first:last])


@contextlib.contextmanager
def _explained(name: str, subset: str | None, split: str) -> Iterator[None]:
    """Says of any error which dataset it is about."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise ValueError(
            f"data source {name} is a Hugging Face dataset, which needs a package: pip install 'lean-ft[datasets]'."
        ) from None
    try:
        yield
    # What a hub, its files and their formats can raise has no common ancestor.
    except Exception as error:
        raise ValueError(
            f"data source {name} could not be read as a Hugging Face dataset (data.split={split}, "
            f"data.subset={subset}): {type(error).__name__}: {error}"
        ) from error


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` as JSON would have them, without the entries of nested objects that are null; a row keeps its own."""
    return {name: _value_as_json(value) for name, value in fields.items()}


def _value_as_json(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(name): _value_as_json(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_value_as_json(inner) for inner in value]
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    return {"type": type(value).__name__}
