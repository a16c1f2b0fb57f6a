"""Read rows from Parquet files and Hugging Face datasets. Needs the `datasets` extra.

A map becomes an object. Arrow fills missing names of nested objects with null. These nulls are removed, so that a chat
template does not write them into tools or tool calls. Dates and decimal numbers become strings, as in CSV. Contents of
parts stay encoded bytes (`lean_ft.data.parts`). Other values that are not text become an object that names their type.
"""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lean_ft.data.parts import FEATURES, is_encoded
from lean_ft.data.rows import Digest, Row, unpacked
from lean_ft.data.splits import is_sliced, rows_of_split
from lean_ft.data.text_files import EXPANDED_BYTES, MAX_EXPANSION, MAX_LINE_BYTES
from lean_ft.system.installation import install_command
from lean_ft.system.whole_files import why_unusable

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
        raise ValueError(
            f"{path} is a Parquet file, which needs a package. Run {install_command('datasets')}"
        ) from None
    if digest is not None:
        with path.open("rb") as file:
            while some := file.read(HASHED_BYTES_AT_A_TIME):
                digest.update(some)
    try:
        number = 0
        for batch in _parquet_batches(path):
            step = 1 if _num_bytes(batch) > EXPANDED_BYTES else ROWS_AT_A_TIME
            for start in range(0, batch.num_rows, step):
                rows = batch.slice(start, step)
                if step == 1 and _num_bytes(rows) > MAX_LINE_BYTES:
                    limit = MAX_LINE_BYTES >> 20
                    raise ValueError(f"{path}, row {number + 1} is larger than {limit} MiB, the limit for a row.")
                for fields in rows.to_pylist():
                    number += 1
                    yield _row(fields, f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def _parquet_batches(path: Path) -> Iterator[Any]:
    """Yield the rows of a Parquet file as Arrow batches. Raises ValueError for a file that expands too much.

    A small file can hold many values: it is compressed, repeats a value, or refers to one long text many times. The
    metadata show the size of the first two. For the third, texts are read as references, so that their size is known
    before they are copied.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        about, columns, size = file.metadata, [*file.schema], path.stat().st_size
        for i in range(about.num_row_groups):
            # Reads no rows, and raises for damaged metadata, on which `column` ends the process.
            next(file.reader.iter_batches(0, row_groups=[i], column_indices=None, use_threads=False), None)
    if about.num_rows == 0:
        raise ValueError(f"{path} has no rows.")
    if about.num_rows > max(MANY_ROWS, size):
        raise ValueError(f"{path} is damaged: it claims {about.num_rows:,} rows in {size:,} bytes.")
    budget = max(EXPANDED_BYTES, MAX_EXPANSION * size)
    too_large = ValueError(
        f"{path} expands to more than {budget:,} bytes, {MAX_EXPANSION} times its size, which rows of text do not do. "
        "If the file is correct, convert it to JSONL."
    )
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    chunks = [[group.column(i) for i in range(len(columns))] for group in groups]
    lengths = [max(8, column.length or 0) for column in columns]  # bytes of a value: of Python's reference, at least
    declared = (
        c.total_uncompressed_size + c.num_values * n for row in chunks for c, n in zip(row, lengths, strict=True)
    )
    if sum(declared) > budget:
        raise too_large
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    with ParquetFile(path) as plain, ParquetFile(path, read_dictionary=texts) as encoded:
        for i, group in enumerate(groups):
            has_delta = any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in chunks[i])
            first = () if has_delta else next(encoded.iter_batches(1, row_groups=[i]), ())
            entries = [length for _, length in map(_text_bytes, _leaves(first))]
            most = group.total_byte_size + max(entries, default=0) * sum(chunk.num_values for chunk in chunks[i])
            is_safe = has_delta or most <= max(EXPANDED_BYTES, 8 * group.total_byte_size)
            file = plain if is_safe else encoded
            for batch in file.iter_batches(1 if has_delta else ROWS_AT_A_TIME, row_groups=[i]):
                if (budget := budget - _num_bytes(batch)) < 0:
                    raise too_large
                yield batch


def _leaves(arrays: Any) -> Iterator[Any]:
    """Yield the arrays of values inside arrays of lists, maps and objects."""
    for array in arrays:
        if array.type.num_fields == 0 or hasattr(array, "dictionary"):
            yield array
        elif hasattr(array, "keys"):
            yield from _leaves((array.keys, array.items))
        else:
            inner = array.flatten()
            yield from _leaves(inner if isinstance(inner, list) else [inner])


def _num_bytes(arrays: Any) -> int:
    return sum(num_bytes for num_bytes, _ in map(_text_bytes, _leaves(arrays)))


def _text_bytes(array: Any) -> tuple[int, int]:
    """Return the bytes of an array's values, and of its dictionary's longest text (0 without one)."""
    from pyarrow import compute as functions
    from pyarrow import types

    compute: Any = functions  # its functions are made when it is imported
    if not hasattr(array, "dictionary") or types.is_primitive(array.dictionary.type):
        return array.nbytes, 0
    lengths = compute.binary_length(array.dictionary)
    return compute.sum(lengths.take(array.indices)).as_py() or 0, compute.max(lengths).as_py() or 0


def read_dataset(name: str, digest: Digest | None, *, subset: str | None, split: str, streaming: bool) -> Iterator[Row]:
    """Yield the rows of a Hugging Face dataset: a Hub id (`org/name`) or a folder written by `save_to_disk`.

    Raises ValueError if the dataset, subset or split does not exist.
    """
    with _explained(name, subset, split):
        for number, fields in enumerate(_open(name, subset, split, streaming), start=1):
            if digest is not None:
                digest.update(json.dumps(fields, default=str).encode())
            yield _row(fields, f"{name} ({split}), row {number}")


def dataset_files(name: str, *, subset: str | None, split: str) -> list[Path]:
    """Return the dataset's local files in order, downloading them if needed; [] if it has none.

    Raises ValueError as `read_dataset` does.
    """
    with _explained(name, subset, split):
        return [Path(file["filename"]) for file in _open(name, subset, split, streaming=False).cache_files]


def _open(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    import datasets

    if not Path(name).is_dir():
        return with_encoded_media(datasets.load_dataset(name, subset, split=split, streaming=streaming))
    dataset: Any = datasets.load_from_disk(name)
    if not isinstance(dataset, datasets.DatasetDict):
        dataset = {str(dataset.split or "train"): dataset}
    split_name = split.partition("[")[0]
    if split_name not in dataset:
        raise ValueError(f"no split {split_name}; the splits are {', '.join(map(str, dataset))}")
    dataset = dataset[split_name]
    first, last = rows_of_split(split, lambda: len(dataset))
    return with_encoded_media(dataset if not is_sliced(split) else dataset.select(range(len(dataset))[first:last]))


def with_encoded_media(dataset: Any) -> Any:
    """Return a dataset that gives encoded media as they are stored, and decodes none."""
    import datasets

    def encoded(feature: dict[str, Any]) -> dict[str, Any]:
        return feature | {"decode": False} if feature.get("_type") in FEATURES else feature

    if dataset.features is None:  # a streamed dataset that does not name them
        return dataset
    features = datasets.Features.from_dict(json.loads(json.dumps(dataset.features.to_dict()), object_hook=encoded))
    if features != dataset.features:
        dataset = copy.deepcopy(dataset)  # of its description; `cast` would copy the values
        dataset.info.features = features
    return dataset


@contextlib.contextmanager
def _explained(name: str, subset: str | None, split: str) -> Iterator[None]:
    """Context manager that adds the dataset's name to errors."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise ValueError(
            f"data source {name} is a Hugging Face dataset, which needs a package. Run {install_command('datasets')}"
        ) from None
    try:
        yield
    # Errors of the Hub, its files and their formats have no common base class.
    except Exception as error:
        raise ValueError(
            f"data source {name} could not be read as a Hugging Face dataset (data.split={split}, "
            f"data.subset={subset}): {why_unusable(error)}"
        ) from error


def _row(fields: dict[str, Any], place: str) -> Row:
    try:
        return Row(as_json(fields), place)
    except ValueError as error:
        return Row({}, place, problem=str(error))


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert values to JSON types and remove null entries of nested objects. Null fields of the row stay.

    Raises ValueError for a map that has a name more than once.
    """
    return {name: _value_as_json(value, name) for name, value in fields.items()}


def json_lines(rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield each row of a dataset or of mappings in memory as a line of JSON. Raises TypeError or ValueError for a
    value that JSON cannot hold."""
    convert = dict
    if hasattr(rows, "features"):  # a datasets.Dataset has dates, encoded files, and nulls for missing keys
        convert, rows = as_json, with_encoded_media(rows)
    for row in rows:
        yield json.dumps(convert(row), ensure_ascii=False, allow_nan=False, default=_as_data_url).encode() + b"\n"


def _as_data_url(value: Any) -> str:
    from lean_ft.images.reading import data_url  # here, since texts do not need Pillow

    return data_url(value)


def _value_as_json(value: Any, name: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(name): _value_as_json(inner, str(name)) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):  # a map
        found = {str(name): _value_as_json(inner, str(name)) for name, inner in value}
        if len(found) < len(value):
            raise ValueError(f"the map `{name}` has a name more than once")
        return found
    if isinstance(value, list | tuple):
        return [_value_as_json(inner, name) for inner in value]
    if isinstance(value, bytes) and is_encoded(name, value):
        return value
    try:
        return unpacked(value)
    except TypeError:
        return {"type": type(value).__name__}
