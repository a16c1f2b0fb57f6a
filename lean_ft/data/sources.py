"""Read the rows of `data.source`, in order: files, globs and Hugging Face datasets."""

import glob
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lean_ft.data.arrow_rows import is_parquet, read_dataset, read_parquet_file
from lean_ft.data.rows import Digest, Row, kind, through_gate
from lean_ft.data.splits import is_sliced, read_split, rows_of_split
from lean_ft.data.text_files import read_text_file
from lean_ft.hub.paths import resolve_data_path
from lean_ft.settings import DataSource, RowsConfig, Sources
from lean_ft.system.log import slow_calls_reported
from lean_ft.system.spelling import nearest
from lean_ft.system.user_code import Caller, Failed, copied
from lean_ft.system.user_functions import PASSED, file_digest, is_function_path, line_in, load_function

EXPECTED = "a JSONL, JSON, CSV, TSV, TXT or Parquet file, a glob, or a Hugging Face dataset (org/name)"
OF_ALL_SOURCES = ("format", "columns", "subset", "split")  # sources inherit these from `data`
_DATA_FILE = r"(\.\w+)?\.(gz|zst|zstd)$|\.(jsonl?|csv|tsv|txt|md|parquet)$"
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")  # files written by save_to_disk


def read_rows(source: Sources, digest: Digest | None = None, config: RowsConfig | None = None) -> Iterator[Row]:
    """Yield the rows of each source in order; update `digest` with all content read.

    `config` holds the defaults of sources, such as the split. An unreadable row has a `problem`. Raises ValueError with
    the name and the reason for a source that is missing, empty or cannot be read to its end.
    """
    for number, one in enumerate(_checked_sources(source, config)):
        for row in _read_source(one, digest, streaming=config is not None and config.streaming):
            yield row._replace(source=number) if number else row


def first_rows(source: Sources, count: int, config: RowsConfig | None = None) -> list[Row]:
    """Return the first `count` rows of every source, for format detection."""
    rows: list[Row] = []
    for number, one in enumerate(_checked_sources(source, config)):
        some = _read_source(one, None, streaming=config is not None and config.streaming)
        rows += [row._replace(source=number) for row in islice(some, count)]
    return rows


def list_sources(source: Sources, config: RowsConfig | None = None) -> list[DataSource]:
    """Return `source` as a list, with settings that a source omits filled in from `config`."""
    given = [source] if isinstance(source, str) else source
    if not given:
        raise ValueError(f"data.source is an empty list; expected {EXPECTED}, or a list of them.")
    sources = [DataSource(path=one) if isinstance(one, str) else one for one in given]
    common = config or RowsConfig.model_validate({"source": source})
    missing = [[name for name in OF_ALL_SOURCES if getattr(one, name) is None] for one in sources]
    return [
        one.model_copy(update={name: getattr(common, name) for name in names})
        for one, names in zip(sources, missing, strict=True)
    ]


def _checked_sources(source: Sources, config: RowsConfig | None) -> list[DataSource]:
    """Call `list_sources`. Raises ValueError if `data.streaming` is set and `data.source` has no Hugging Face dataset."""
    trained = list_sources(config.source, config) if config is not None and config.streaming else []
    if trained and all(source_files(one.path) is not None for one in trained):
        raise ValueError(
            f"data.streaming=true applies to Hugging Face datasets, but {trained[0].path} is a file. Leave it out."
        )
    return list_sources(source, config)


def source_files(source: str) -> list[Path] | None:
    """Return the files of a path or glob in order, or None for a Hugging Face dataset.

    Raises ValueError if nothing is found, or for a folder that is not a saved dataset.
    """
    path = resolve_data_path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        if any((path / name).is_file() for name in SAVED_DATASET):
            return None
        inside = sorted(child.name for child in path.iterdir() if child.is_file())
        found = ", ".join(inside[:5]) + (" ..." if len(inside) > 5 else "") if inside else "no files"
        endings = Counter(ending[0] for name in inside if (ending := re.search(_DATA_FILE, name)))
        most_common = endings.most_common(1)[0][0] if endings else ".jsonl"
        raise ValueError(
            f"data source {source} is a folder (it has {found}); expected {EXPECTED}. To read all files of one kind, pass a "
            f"glob: {source.rstrip('/')}/*{most_common}"
        )
    if any(sign in source for sign in "*?["):
        files = [Path(found) for found in sorted(glob.glob(str(path), recursive=True)) if Path(found).is_file()]
        if not files:
            raise ValueError(f"data source {source}: no file matches this glob.")
        return files
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source)
    if is_name and not re.search(_DATA_FILE, source):
        return None
    beside = {child.stem: child for child in path.parent.iterdir() if child.is_file()} if path.parent.is_dir() else {}
    close = nearest(path.stem, beside)  # without the endings, which most files share
    hint = f" Did you mean '{beside[close]}'?" if close else ""
    raise ValueError(f"data source {source} does not exist; expected {EXPECTED}.{hint}")


def files_of(source: DataSource) -> list[Path] | None:
    """Call `source_files`. Raises ValueError if files have a subset, or a split other than `train` or a slice of it."""
    files, split = source_files(source.path), "train" if source.split is None else source.split
    if files is None or (source.subset is None and (read_split(split) or ("",))[0] == "train"):
        return files
    given = f"data.split={split}" if source.subset is None else f"data.subset={source.subset}"
    raise ValueError(
        f"{given}: {source.path} is a file, which has only the split `train`. Use train or a slice: train[:95%], "
        "train[100:200]. To set the split of another source, put it into that source's entry: {path, subset, split}."
    )


def _read_source(source: DataSource, digest: Digest | None, *, streaming: bool) -> Iterator[Row]:
    rows = map(through_gate, _rows_as_stored(source, digest, streaming=streaming))
    if not is_function_path(source.format):
        return rows
    assert source.format is not None
    is_passed = source.format in PASSED  # its results may follow from values outside its source, so they count
    if digest is not None and not is_passed:
        digest.update(file_digest(source.format).encode())
    return map(through_gate, _converted(rows, source.format, digest if is_passed else None))


def _converted(rows: Iterator[Row], name: str, digest: Digest | None = None) -> Iterator[Row]:
    """Apply the user's function to each row. It returns fields, a text, messages, or None to skip the row. Update `digest` with
    the results."""
    with slow_calls_reported(f"data.format={name}") as began:
        convert, caller = load_function(name), Caller(f"data.format={name}")
        began[0] = math.inf
        for row in rows:
            if row.problem is not None:
                yield row
                continue
            began[0], made, problem = time.monotonic(), None, None
            try:
                made = copied(caller.call(convert, row.fields))
            except Failed as failed:
                file = Path(name.rpartition(":")[0]).expanduser().resolve()
                place = line_in(Path(PASSED[name].file) if name in PASSED else file, failed.error)
                problem = f"data.format: {place}: {failed}"
            except Exception as error:  # the result cannot be copied
                problem = f"data.format={name} returned a value that cannot be copied ({type(error).__name__}: {error})"
            began[0] = math.inf
            if problem is not None:
                yield row._replace(fields={}, problem=problem)
                continue
            if digest is not None:
                digest.update(json.dumps(made, default=_plain, skipkeys=True).encode() + b"\n")
            if made is None:
                continue
            fields = {"text": made} if isinstance(made, str) else {"messages": made} if isinstance(made, list) else made
            if isinstance(fields, dict):
                yield row._replace(fields=fields)
            else:
                problem = (
                    f"data.format={name} returned {kind(made)}; expected a dict of fields, a text, messages or None"
                )
                yield row._replace(fields={}, problem=problem)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)  # the text of a long array leaves numbers out


def _rows_as_stored(source: DataSource, digest: Digest | None, *, streaming: bool) -> Iterator[Row]:
    files = files_of(source)
    if files is None:
        assert source.split is not None
        yield from read_dataset(
            str(resolve_data_path(source.path)), digest, subset=source.subset, split=source.split, streaming=streaming
        )
        return
    split = source.split or "train"
    if not is_sliced(split):
        yield from _rows_of_files(files, digest)
        return
    if digest is not None:
        digest.update(split.encode())
    first, last = rows_of_split(split, lambda: sum(1 for _ in _rows_of_files(files, None)))
    rows = islice(_rows_of_files(files, digest), first, last)
    if (beginning := next(rows, None)) is None:
        raise ValueError(f"data.split={split}: {source.path} has no rows in this slice.")
    yield beginning
    yield from rows


def _rows_of_files(files: list[Path], digest: Digest | None) -> Iterator[Row]:
    for file in files:
        # Rows passed as Python objects are in a file of the cache, and their paths are relative to the current folder.
        folder = Path.cwd() if re.fullmatch(r"rows/[0-9a-f]{32}\.jsonl", "/".join(file.parts[-2:])) else file.parent
        for row in read_parquet_file(file, digest) if is_parquet(file) else read_text_file(file, digest):
            yield row._replace(folder=folder)
