"""Read rows from Parquet files and Hugging Face datasets. Needs the `datasets` extra.

Arrow fills missing names of nested objects with null. These nulls are removed, so that a chat template does not write
them into tools or tool calls. Dates and decimal numbers become strings, as in CSV. Values that are not text, such as
bytes and images, become an object that names their type.
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
    """Yield the rows of a Parquet file, read in groups. Raises ValueError if the file cannot be read."""
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
                raise ValueError(f"{path} is damaged: it claims {num_rows:,} rows in {size:,} bytes.")
            number = 0
            for batch in file.iter_batches(ROWS_AT_A_TIME):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(as_json(fields), f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def read_dataset(name: str, digest: Digest | None, *, subset: str | None, split: str, streaming: bool) -> Iterator[Row]:
    """Yield the rows of a Hugging Face dataset: a Hub id (`org/name`) or a folder written by `save_to_disk`.

    Raises ValueError if the dataset, subset or split does not exist.
    """
    with _explained(name, subset, split):
        for number, fields in enumerate(_open(name, subset, split, streaming), start=1):
            if digest is not None:
                digest.update(json.dumps(fields, default=str).encode())
            yield Row(as_json(fields), f"{name} ({split}), row {number}")


def dataset_files(name: str, *, subset: str | None, split: str) -> list[Path]:
    """Return the dataset's local files in order, downloading them if needed; [] if it has none.

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
        raise ValueError(f"no split {split_name}; the splits are {', '.join(map(str, dataset))}")
    dataset = dataset[split_name]
    first, last = rows_of_split(split, lambda: len(dataset))
    return dataset if not is_sliced(split) else dataset.select(range(len(dataset))[first:last])


@contextlib.contextmanager
def _explained(name: str, subset: str | None, split: str) -> Iterator[None]:
    """Context manager that adds the dataset's name to errors."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise ValueError(
            f"data source {name} is a Hugging Face dataset, which needs a package: pip install 'lean-ft[datasets]'."
        ) from None
    try:
        yield
    # Errors of the Hub, its files and their formats have no common base class.
    except Exception as error:
        raise ValueError(
            f"data source {name} could not be read as a Hugging Face dataset (data.split={split}, "
            f"data.subset={subset}): {type(error).__name__}: {error}"
        ) from error


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert values to JSON types and remove null entries of nested objects. Null fields of the row stay."""
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
