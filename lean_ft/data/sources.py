"""Read the rows of `data.source`, in order: files, globs and Hugging Face datasets."""

import glob
import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, Self

from lean_ft.data.arrow_rows import dataset_files, is_parquet, read_dataset, read_parquet_file
from lean_ft.data.keys import hash_of
from lean_ft.data.rows import Digest, Row, kind, part_of, through_gate
from lean_ft.data.splits import is_sliced, read_split, rows_of_split
from lean_ft.data.text_files import read_text_file
from lean_ft.hub.paths import resolve_data_path
from lean_ft.settings import DataConfig, DataSource, Sources
from lean_ft.system.cache import content_digest
from lean_ft.system.contents import Content, Contents, name_of_file
from lean_ft.system.log import slow_calls_reported
from lean_ft.system.spelling import nearest
from lean_ft.system.user_code import Caller, Failed, copied
from lean_ft.system.user_functions import PASSED, file_digest, is_function_path, line_in, load_function

EXPECTED = "a JSONL, JSON, CSV, TSV, TXT or Parquet file, a glob, or a Hugging Face dataset (org/name)"
OF_ALL_SOURCES = ("format", "columns", "subset", "split")  # sources inherit these from `data`
_DATA_FILE = r"(\.\w+)?\.(gz|zst|zstd)$|\.(jsonl?|csv|tsv|txt|md|parquet)$"
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")  # files written by save_to_disk


class SourceContent(NamedTuple):
    """What the sources of some rows hold."""

    digest: str
    parts: Contents
    """By the names that messages show."""


@dataclass(frozen=True)
class RowSources:
    """The sources of some rows, in order, and the settings of `data` that say how to read them."""

    config: DataConfig
    source: Sources
    """As in the settings, for messages."""
    sources: list[DataSource]
    """Each with the settings of `data` that it omits."""

    @classmethod
    def of(cls, config: DataConfig, source: Sources | None = None) -> Self:
        """The sources of `source` (default: `config.source`). Raises ValueError for an empty list."""
        source = config.source if source is None else source
        listed = [source] if isinstance(source, str) else source
        if not listed:
            raise ValueError(f"data.source is an empty list; expected {EXPECTED}, or a list of them.")
        sources = [DataSource(path=one) if isinstance(one, str) else one for one in listed]
        missing = [[name for name in OF_ALL_SOURCES if getattr(one, name) is None] for one in sources]
        filled = [
            one.model_copy(update={name: getattr(config, name) for name in names})
            for one, names in zip(sources, missing, strict=True)
        ]
        return cls(config, source, filled)

    def rows(self, digest: Digest | None = None) -> Iterator[Row]:
        """Yield the rows of each source in order; update `digest` with all content read.

        An unreadable row has a `problem`. Raises ValueError with the name and the reason for a source that is missing,
        empty or cannot be read to its end.
        """
        self._check_streaming()
        for number, source in enumerate(self.sources):
            for row in _read_source(source, digest, streaming=self.config.streaming):
                yield row._replace(source=number) if number else row

    def first_rows(self, count: int) -> list[Row]:
        """Return the first `count` rows of every source, for format detection."""
        self._check_streaming()
        rows: list[Row] = []
        for number, source in enumerate(self.sources):
            some = _read_source(source, None, streaming=self.config.streaming)
            rows += [row._replace(source=number) for row in islice(some, count)]
        return rows

    def _check_streaming(self) -> None:
        """Raise ValueError if `data.streaming` is set and `data.source` has no Hugging Face dataset."""
        trained = RowSources.of(self.config).sources if self.config.streaming else []
        if trained and all(source_files(one.path) is not None for one in trained):
            raise ValueError(
                f"data.streaming=true applies to Hugging Face datasets, but {trained[0].path} is a file. Leave it out."
            )

    def content(self, folder: Path) -> SourceContent | None:
        """Hashes of the content of the files, in order; None if a part of the sources is not stored in files.

        folder: of the cache, where the hashes of files are stored. The hash includes file suffixes, which determine how
        CSV is read, and the results of a function from Python. Raises ValueError if a file does not exist.
        """
        parts, named = list[Any](), list[Content]()
        for one in self.sources:
            files, part, start = files_of(one), one.split if is_sliced(one.split or "") else None, ""
            if files is None and not self.config.streaming:
                assert one.split is not None
                files = dataset_files(str(resolve_data_path(one.path)), subset=one.subset, split=one.split)
                part = [one.subset, one.split]  # `train` and `train[:10%]` have the same files
                start = f"{_name_of_dataset(one)}: "
            if not files:
                return None
            convert, code = self._content_of_format(one)
            contents = [(file.suffixes, content_digest(file, folder / "files")) for file in files]
            parts.append([convert, one.columns, part, *contents])
            names = [start + file.name if start else name_of_file(str(file)) for file in files]
            sizes = [file.stat().st_size for file in files]
            digests = [digest for _, digest in contents]
            named += map(Content, names, digests, sizes)
            named += code
        return SourceContent(hash_of(parts), Contents(named))

    def _content_of_format(self, source: DataSource) -> tuple[Any, list[Content]]:
        """What decides how rows are read, and the code or its results by name."""
        if source.format in PASSED:
            digest = hashlib.blake2b(digest_size=16)
            for _ in replace(self, sources=[source]).rows(digest):
                pass
            results = f"what {source.format.rpartition(':')[2]} returns (data.format)"
            return digest.hexdigest(), [Content(results, digest.hexdigest())]
        if not is_function_path(source.format):
            return source.format, []
        digest = file_digest(source.format)
        return [source.format, digest], [Content(f"{source.format.rpartition(':')[0]} (data.format)", digest)]

    def folders(self) -> list[str]:
        """The folders of the files, to which paths in rows are relative."""
        files = [file for one in self.sources for file in files_of(one) or ()]
        return [str(folder) for folder in dict.fromkeys(file.parent.resolve() for file in files)]


def shown_names(sources: Sequence[DataSource]) -> list[str]:
    """Return the name of each source for messages and tables: its path, with subset and split where paths repeat."""
    paths = [source.path for source in sources]
    names = [
        source.path if paths.count(source.path) == 1 else f"{source.path} ({_selected(source)})" for source in sources
    ]
    number_of = Counter[str]()
    for i, name in enumerate(names):
        number_of[name] += 1
        names[i] += f" [{number_of[name]}]" if number_of[name] > 1 else ""
    return names


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
            f"data source {source} is a folder (it has {found}); expected {EXPECTED}. To read all files of one kind, "
            f"pass a glob: {source.rstrip('/')}/*{most_common}"
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
    if "," in source:
        listed = quote(f"data.source=[{source}]")
        hint = f" A text with a comma is one path. A list has brackets, and quotes for the shell, such as {listed}."
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
    file, _, name = source.format.rpartition(":")
    if not is_passed and (code := part_of(digest, f"{file} (data.format)")) is not None:
        code.update(file_digest(source.format).encode())
    results = part_of(digest, f"what {name} returns (data.format)") if is_passed else None
    return map(through_gate, _converted(rows, source.format, results))


def _converted(rows: Iterator[Row], name: str, digest: Digest | None = None) -> Iterator[Row]:
    """Apply the user's function to each row. It returns fields, a text, messages, or None to skip the row. Update
    `digest` with the results."""
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
        digest, name = part_of(digest, f"the rows of {_name_of_dataset(source)}"), str(resolve_data_path(source.path))
        yield from read_dataset(name, digest, subset=source.subset, split=source.split, streaming=streaming)
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
        name = name_of_file(str(file))
        # Rows passed as Python objects are in a file of the cache, and their paths are relative to the current folder.
        folder = file.parent if name == str(file) else Path.cwd()
        part = part_of(digest, name)
        for row in read_parquet_file(file, part) if is_parquet(file) else read_text_file(file, part):
            yield row._replace(folder=folder, place=row.place.replace(str(file), name, 1))


def _name_of_dataset(source: DataSource) -> str:
    return f"{source.path} ({_selected(source)})"


def _selected(source: DataSource) -> str:
    return ", ".join(filter(None, (source.subset, source.split)))
