"""Read rows from text files, plain or compressed: JSONL, JSON arrays, CSV, TSV, and plain text.

Format and compression are detected from the first bytes, except that CSV, TSV and plain text are recognized by the file
suffix. JSON is parsed strictly: duplicate names in an object, NaN and Infinity are errors, although Python's parser
accepts them.

An unreadable row becomes a `Row` with a `problem`, and reading continues. A file that cannot be read further (a
truncated archive, a malformed array) raises ValueError.
"""

import csv
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from lean_ft.data.rows import Digest, Row, kind
from lean_ft.system.installation import install_command

_HEADER_BYTES = 2**16  # enough for column names, and below csv's limit for one cell
BOM = b"\xef\xbb\xbf"
NUM_BYTES_TO_DETECT = 4096
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CHUNK_BYTES = 1 << 12  # compressed; expands to at most 4 MiB (gzip) or 128 MiB (zstd: 4 bytes can encode 128 KiB)
MAX_LINE_BYTES = 1 << 29
MAX_COMMAS = 1 << 23  # of a row: a value between two may be 2 bytes here and 64 in memory
MAX_EXPANSION, EXPANDED_BYTES = 200, 1 << 26  # above both limits, assume a decompression bomb
PLAIN_TEXT = (".txt", ".md")
_JSON_ROWS = re.compile(rb'\s*(\[\s*)?\{\s*"')


def read_text_file(path: Path, digest: Digest | None) -> Iterator[Row]:
    """Yield the rows of a JSONL, JSON, CSV, TSV or text file in order; update `digest` with the decompressed bytes.

    Empty lines are skipped. A text file is one row with the field `text`, which an empty file lacks. Raises ValueError
    if another file is empty, or a file cannot be read to its end.
    """
    start = _start(path)
    ending = next((e.lower() for e in reversed(path.suffixes) if e.lower() not in (".gz", ".zst", ".zstd")), "")
    if not start.strip():
        what = f"its first {len(start):,} bytes are blank" if len(start) == NUM_BYTES_TO_DETECT else "the file is empty"
        if ending in PLAIN_TEXT:
            yield Row({}, str(path), problem=what)
            return
        raise ValueError(f"{path} has no rows: {what}.")
    _check_encoding(start, path)
    lines = _lines(path, digest)
    if ending in (".csv", ".tsv"):
        rows = _csv_rows(lines, path, "\t" if ending == ".tsv" else _delimiter(start))
    elif ending in PLAIN_TEXT and not _JSON_ROWS.match(start):
        rows = iter([_text_row(b"".join(lines), path)])
    elif start.lstrip()[:1] == b"[":
        rows = _array_rows(b"".join(lines), path)
    else:
        rows = _json_lines(lines, path)
    any_row = False
    for row in rows:
        any_row = True
        yield row
    if not any_row:
        raise ValueError(f"{path} has no rows.")


def parse_json(text: str) -> Any:
    """Parse strict JSON. Raises ValueError with the reason."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"malformed JSON: {error.msg} ({place})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"an object has the key `{twice}` more than once")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON; write null, or leave the field out")


def _json_lines(lines: Iterable[bytes], path: Path) -> Iterator[Row]:
    hint = "" if ".jsonl" in path.suffixes else ". Expected JSONL (one object per line) or a JSON array"
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        place = f"{path}, line {number}"
        try:
            yield Row(_object(parse_json(_decode_json(line.rstrip(b"\r\n"), MAX_COMMAS))), place)
        except ValueError as error:
            yield Row({}, place, problem=f"{error}{hint if 'malformed' in str(error) else ''}")


def _text_row(content: bytes, path: Path) -> Row:
    try:
        return Row({"text": _decode(content)}, str(path))
    except ValueError as error:
        return Row({}, str(path), problem=str(error))


def _array_rows(content: bytes, path: Path) -> Iterator[Row]:
    try:
        values = parse_json(_decode_json(content, max(MAX_COMMAS, len(content) // 8)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for number, value in enumerate(values, start=1):
        place = f"{path}, row {number}"
        try:
            yield Row(_object(value), place)
        except ValueError as error:
            yield Row({}, place, problem=str(error))


def _delimiter(start: bytes) -> str:
    """Detect the header's delimiter: comma, semicolon (written by spreadsheets with decimal commas) or tab."""
    header = re.split(rb"[\r\n]", start, maxsplit=1)[0][:_HEADER_BYTES].decode("utf-8", "replace")
    return next((sign for sign in ",;\t" if len(next(csv.reader([header], delimiter=sign), ())) > 1), ",")


def _csv_rows(lines: Iterable[bytes], path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # allow cells of any size
    # Invalid UTF-8 bytes become lone surrogates, which valid text cannot contain; detected below.
    text = (line.decode("utf-8", "surrogateescape") for line in lines)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader)
        if len(set(names)) != len(names):
            raise ValueError(f"{path}, line 1: duplicate column name ({', '.join(names)}).")
        line = reader.line_num + 1
        for cells in reader:
            place = f"{path}, line {line}"
            line = reader.line_num + 1
            undecoded = next((c for cell in cells for c in cell if "\udc80" <= c <= "\udcff"), None)
            if undecoded is not None:
                problem = f"not UTF-8 (byte 0x{ord(undecoded) - 0xDC00:02x}){CONVERT}"
                yield Row({}, place, problem=problem)
            elif cells and len(cells) != len(names):
                problem = f"{len(cells)} cells, but the header has {len(names)} columns ({', '.join(names)})"
                yield Row({}, place, problem=problem)
            elif cells:
                yield Row(dict(zip(names, cells, strict=True)), place)
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: malformed CSV: {error}. Expected column names in the first line, and "
            "doubled quotes inside a quoted cell."
        ) from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object with named fields, found {kind(value)}")
    return value


def _decode_json(content: bytes, max_commas: int) -> str:
    if len(content) > max_commas and content.count(b",") > max_commas:
        raise ValueError(f"more than {max_commas:,} values, the limit for its size")
    return _decode(content)


CONVERT = "; convert the file, for example with `iconv -f LATIN1 -t UTF-8`"


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{content[error.start]:02x} at position {error.start}){CONVERT}") from None


def _start(path: Path) -> bytes:
    with open_decompressed(path) as file:
        return file.read(NUM_BYTES_TO_DETECT).removeprefix(BOM)


def _lines(path: Path, digest: Digest | None) -> Iterator[bytes]:
    with open_decompressed(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}, line {number + 1} is longer than {MAX_LINE_BYTES >> 20} MiB, the limit for a row."
                )
            if digest is not None:
                digest.update(line)
            yield line.removeprefix(BOM) if number == 0 else line


def _check_encoding(start: bytes, path: Path) -> None:
    # UTF-16 and UTF-32 text starts with a BOM, or has a zero byte in an ASCII character such as `{`.
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start[:4]:
        raise ValueError(
            f"{path} looks like UTF-16 or UTF-32, or is not text; expected JSON, JSONL or CSV in UTF-8. "
            "Convert it, for example with `iconv -f UTF-16 -t UTF-8`."
        )


def open_decompressed(path: Path) -> IO[bytes]:
    """Open `path` for reading, decompressed. Reading raises ValueError if the archive is damaged or truncated."""
    file = path.open("rb")
    magic = file.peek(len(ZSTD))
    if magic.startswith(GZIP):
        return io.BufferedReader(_Archive(file, lambda: zlib.decompressobj(wbits=31), zlib.error))
    if magic.startswith(ZSTD):
        try:
            import zstandard
        except ImportError:
            file.close()
            raise ValueError(
                f"{path} is compressed with zstd, which needs a package. Run {install_command('zstd')}"
            ) from None
        begin = zstandard.ZstdDecompressor().decompressobj
        return io.BufferedReader(_Archive(file, begin, zstandard.ZstdError))
    return file


class _Archive(io.RawIOBase):
    """Concatenated members of a gzip file, or frames of a zstd file.

    zstandard's own reader accepts truncated files.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any], error: type[Exception]):
        self._file, self._begin, self._error = file, begin, error
        self._member = begin()
        self._waiting = memoryview(b"")  # decompressed, not yet read
        self._num_read = self._num_made = 0  # bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._waiting:
                compressed = self._read() if not self._member.eof else self._behind_member()
                if not compressed and self._member.eof:
                    return 0
                if not compressed:
                    raise self._error("its last part is not complete")
                if self._member.eof:
                    self._member = self._begin()
                self._waiting = memoryview(self._member.decompress(compressed))
                self._num_made += len(self._waiting)
                if self._num_made > max(EXPANDED_BYTES, MAX_EXPANSION * self._num_read):
                    raise ValueError(
                        f"{self._file.name} expands to more than {MAX_EXPANSION} times its size, which text does not "
                        "do. If the file is correct, decompress it first."
                    )
        except self._error as error:
            raise ValueError(
                f"{self._file.name} cannot be read to its end: the archive is incomplete or damaged ({error}). Copy or "
                "download it again."
            ) from None
        num_bytes = min(len(buffer), len(self._waiting))
        buffer[:num_bytes], self._waiting = self._waiting[:num_bytes], self._waiting[num_bytes:]
        return num_bytes

    def _read(self) -> bytes:
        compressed = self._file.read(CHUNK_BYTES)
        self._num_read += len(compressed)
        return compressed

    def _behind_member(self) -> bytes:
        """Bytes after a complete member, without zero padding."""
        return self._member.unused_data.lstrip(b"\0") or self._read().lstrip(b"\0")

    def close(self) -> None:
        self._file.close()
        super().close()
