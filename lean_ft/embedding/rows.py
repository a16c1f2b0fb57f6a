"""Vectors of the rows of a file: written as an array or a table, or searched.

Rows are read, embedded and written some at a time, so memory does not grow with the file.
"""

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, NamedTuple

import numpy as np
from torch.nn.functional import normalize

from lean_ft.data.rows import Row, kind, names_of
from lean_ft.data.sources import RowSources
from lean_ft.embedding.encode import Embedder, UsedAs
from lean_ft.settings import DataConfig
from lean_ft.system.foreign_values import check_text
from lean_ft.system.installation import install_command
from lean_ft.system.log import say
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.units import counted
from lean_ft.system.whole_files import write_whole

ENDINGS = (".npy", ".parquet")
ROWS_AT_A_TIME = 2048
SECONDS_BETWEEN_LINES = 30.0
_HEADER_BYTES = 128

Write = Callable[[list[str], np.ndarray], None]
"""Writes texts and their vectors (M, D), float32."""


class Embedded(NamedTuple):
    """Some rows with their texts and vectors."""

    rows: list[Row]
    texts: list[str]
    vectors: np.ndarray  # (M, D) float32


class Match(NamedTuple):
    """A row that is similar to a question."""

    similarity: float
    """Cosine of the angle between the vectors."""
    number: int
    """Of the row, from 0."""
    place: str
    text: str


def embed_rows(
    embedder: Embedder,
    data: DataConfig,
    field: str = "text",
    used_as: UsedAs | None = None,
    dimensions: int | None = None,
) -> Iterator[Embedded]:
    """Yield the rows of `data` in order with the vectors of their texts.

    field: the name of the text in a row; used_as and dimensions: as in `Embedder.encode`. Raises ValueError with the
    place of a row that cannot be read or has no such text, and if a vector is not finite.
    """
    rows, count, begun = RowSources.of(data).rows(), 0, time.monotonic()
    told = begun
    while some := list(islice(rows, ROWS_AT_A_TIME)):
        texts = [_text_of(row, field) for row in some]
        vectors = embedder.encode(texts, used_as, dimensions).numpy()
        if not np.isfinite(vectors).all():
            bad = some[int(np.isfinite(vectors).all(1).argmin())]
            dtype = str(embedder.model.dtype).removeprefix("torch.")
            raise ValueError(f"{bad.place}: the vector is not finite in {dtype}. Use --dtype bfloat16 or float32.")
        count += len(some)
        if (now := time.monotonic()) - told > SECONDS_BETWEEN_LINES:
            say("embedded", f"{counted(count, 'texts')}, {count / (now - begun):.0f} per second")
            told = now
        yield Embedded(some, texts, vectors)


def _text_of(row: Row, field: str) -> str:
    if row.problem is not None:
        raise ValueError(f"{row.place}: {row.problem}")
    row.check(field)
    if field not in row.fields:
        raise ValueError(
            f"{row.place}: no field `{field}`; the row has {names_of(row.fields)}.{did_you_mean(field, row.fields)} "
            "Name the field of the text by --field."
        )
    text = row.fields[field]
    if not isinstance(text, str):
        raise ValueError(f"{row.place}: the field `{field}` is {kind(text)}; expected a text.")
    if not text.strip():
        raise ValueError(f"{row.place}: the field `{field}` is empty. Remove the row, or add a text.")
    return check_text(text, f"{row.place}: the field `{field}`")


class RowSearch:
    """The rows that are most similar to a question, of those that were added."""

    def __init__(self, embedder: Embedder, question: str, top: int, dimensions: int | None = None) -> None:
        """top: the number of rows to keep. The question gets the prompt of queries."""
        self._question = normalize(embedder.encode([question], "query", dimensions), dim=-1).numpy()[0]
        self._top, self._count, self._found = top, 0, list[tuple[float, int, str, str]]()

    def add(self, some: Embedded) -> None:
        lengths = np.maximum(np.linalg.norm(some.vectors, axis=1), np.finfo(np.float32).tiny)
        similarities = some.vectors @ self._question / lengths
        likely = np.argsort(-similarities, kind="stable")[: self._top]
        for i in likely.tolist():
            entry = (float(similarities[i]), -(self._count + i), some.rows[i].place, some.texts[i])
            push = heapq.heappush if len(self._found) < self._top else heapq.heappushpop
            push(self._found, entry)
        self._count += len(some.texts)

    @property
    def matches(self) -> list[Match]:
        """The most similar row first; of equally similar ones the earlier one."""
        return [Match(similarity, -number, *rest) for similarity, number, *rest in sorted(self._found, reverse=True)]


def check_destination(destination: Path, force: bool) -> None:
    """Raise ValueError unless vectors may be written there."""
    if destination.suffix not in ENDINGS:
        raise ValueError(
            f"{destination} is not the name of a file of vectors; expected one that ends in .npy or .parquet."
        )
    if destination.is_dir():
        raise ValueError(f"{destination} is a folder. Choose the name of a file.")
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists already. Choose another name, or overwrite it with --force.")
    if destination.suffix == ".parquet":
        _pyarrow(destination)


@contextmanager
def new_file(destination: Path, size: int, field: str) -> Iterator[Write]:
    """Yield a function that appends texts and vectors to a new file, which is complete or absent.

    A `.npy` file has an array (rows, D) of float32; a `.parquet` file has the columns `field` and `embedding`. size: D.
    """
    with write_whole(destination) as temporary:
        if destination.suffix == ".parquet":
            with _table(temporary, size, field) as write:
                yield write
            return
        with temporary.open("wb") as file:
            count = 0
            file.write(bytes(_HEADER_BYTES))

            def write(texts: list[str], vectors: np.ndarray, /) -> None:
                nonlocal count
                count += len(vectors)
                file.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())

            yield write
            _write_header(file, count, size)


def _write_header(file: IO[bytes], count: int, size: int) -> None:
    """Write the header of NumPy's format 1.0, in a fixed size: the number of rows is known last."""
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {size}), }}".ljust(_HEADER_BYTES - 11) + "\n"
    file.seek(0)
    file.write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode())


@contextmanager
def _table(file: Path, size: int, field: str) -> Iterator[Write]:
    pyarrow = _pyarrow(file)
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema([(field, pyarrow.string()), ("embedding", pyarrow.list_(pyarrow.float32(), size))])
    with ParquetWriter(file, schema) as writer:

        def write(texts: list[str], vectors: np.ndarray, /) -> None:
            flat = pyarrow.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
            lists = pyarrow.FixedSizeListArray.from_arrays(flat, size)
            writer.write_table(pyarrow.table([pyarrow.array(texts, pyarrow.string()), lists], schema=schema))

        yield write


def _pyarrow(file: Path) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{file} is a Parquet file, which needs a package. Run {install_command('datasets')}, or write a .npy file."
        ) from None
    return pyarrow
