"""Safe file access in folders that a stranger or a power failure may have touched.

A file or folder is complete or absent: it is written under a temporary name and then renamed. Files of a run are opened
without following links, and JSON files are read up to a maximum size.

The temporary name is `.NAME.tmp-NUMBER`; a replaced file is `.NAME.old-NUMBER` while it is deleted. A killed process
may leave such files, but never a partial file under the final name.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lean_ft.system.foreign_values import JSON

MAX_JSON_BYTES = 3 * 2**24  # 48 MiB, about 1 GiB as Python objects; the largest tokenizer.json has 33 MiB
LEFTOVER = re.compile(r"\..+\.(tmp|old)-\d+")


@contextmanager
def write_whole(path: Path, *, on_disk: bool = False) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder, which replaces `path` when the block ends.

    If the block fails, the old file stays and nothing else is left. `on_disk` first syncs the new content to disk, so
    that a power failure leaves either the old or the new file.
    """
    temporary, aside = _beside(path, "tmp"), _beside(path, "old")
    remove(temporary)  # may be left by a killed process with the same number
    try:
        yield temporary
        if on_disk:
            for part in (temporary, *(temporary.rglob("*") if temporary.is_dir() else ())):
                sync(part)
        if path.is_dir():  # a folder cannot replace another in one move
            path.rename(aside)
        temporary.replace(path)
        if on_disk:
            sync(path.parent)
        remove(aside)
    finally:
        remove(temporary)


def write_json(path: Path, content: "dict[str, Any] | JSON", indent: int | None = 2, *, on_disk: bool = False) -> None:
    """Write a JSON file, by default in the format of model folders. None is faster. `on_disk` as in `write_whole`."""
    with write_whole(path, on_disk=on_disk) as temporary:
        temporary.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, purpose: str | None = None) -> dict[str, Any]:
    """Return the object in a JSON file. A missing file gives an empty object, or with a `purpose` (why it is needed) an
    error.

    Raises ValueError, with the path, for a missing file that is needed and for any other content.
    """
    if not path.is_file():  # reading a pipe would never end
        if purpose is None:
            return {}
        raise ValueError(f"{path.parent} has no {path.name}: {purpose}")
    content: object = read_json_value(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {kind(content)}.")
    return content


def read_json_value(path: Path) -> JSON:
    """Return the value in a JSON file, an object or any other. Raises ValueError, with the path, for other content."""
    data = read_bounded(path)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:  # not Unicode, not JSON, a number with too many digits
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def kind(value: object) -> str:
    """Describe the type of a JSON value: `null`, `a number`."""
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value)) or ("a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def why_unusable(error: Exception) -> str:
    """Describe in words what is wrong with foreign values, because Python's own errors name types and operations of our
    code."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, TypeError | AttributeError | IndexError | AssertionError | ArithmeticError):
        return "a value has another type or size than expected"
    return f"{error}".partition("\n")[0][:300]


def read_bounded(path: Path) -> bytes:
    """Return a file's content. Raises ValueError if it is larger than `MAX_JSON_BYTES`."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, the limit for such files.")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return a file's text, with `\n` for its line ends. Raises ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}).") from None


def open_in_place(path: Path, mode: str, permissions: int = 0o666) -> IO[Any]:
    """Open a file of a run folder to append to it or truncate it; a missing file is created with these permissions.

    Raises ValueError for a link, whose target may be any file, and for anything else but a regular file.
    """

    def open_itself(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, permissions)

    if path.is_symlink() or (path.exists() and not path.is_file()):
        what = "a link" if path.is_symlink() else "not a regular file"
        raise ValueError(f"{path} is {what}, so the run does not write to it. Delete it, or set another output_dir.")
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=open_itself)


def delete_whole(folder: Path) -> None:
    """Delete a folder. If the deletion is interrupted, the rest no longer has the folder's name."""
    aside = _beside(folder, "old")
    folder.rename(aside)
    remove(aside)


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, folder or link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, ending: str) -> Path:
    # Thread ids are unique on the machine; the id of a process's first thread is the process id.
    return path.with_name(f".{path.name}.{ending}-{threading.get_native_id()}")
