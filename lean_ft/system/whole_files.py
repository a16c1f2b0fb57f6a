"""Files that a stranger or a power cut may have left: replaced whole, appended to without following links, read with a bound.

A file or folder is whole or not there: it is written under another name, which then becomes its own.

That name is `.NAME.tmp-NUMBER`; what is replaced is called `.NAME.old-NUMBER` while it is deleted. A process that is
killed leaves these behind, and never half of anything under its own name.
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

MAX_JSON_BYTES = 3 * 2**24  # 48 MiB, which Python holds in a GiB; the largest tokenizer.json has 33 MiB
LEFTOVER = re.compile(r"\..+\.(tmp|old)-\d+")


@contextmanager
def write_whole(path: Path, *, on_disk: bool = False) -> Iterator[Path]:
    """Yields the name under which to write a file, or to make a folder, which becomes `path` when the block ends.

    It takes the place of what was there; where the block fails, that stays and nothing is left behind. `on_disk` sees
    all of it onto the disk first, so that a power cut leaves the one or the other.
    """
    temporary, aside = _beside(path, "tmp"), _beside(path, "old")
    remove(temporary)  # a killed process of the same number left it
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file as those of a model's folder are."""
    with write_whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, purpose: str | None = None) -> dict[str, Any]:
    """Return the object in a JSON file: an empty one if there is no such file, unless a `purpose` says why it is needed.

    Raises ValueError, with the path, for a missing file that is needed and for a file that holds anything else.
    """
    if not path.is_file():  # a pipe would never end
        if purpose is None:
            return {}
        raise ValueError(f"{path.parent} has no {path.name}: {purpose}")
    data = read_bounded(path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # no Unicode, no JSON, nested too deeply, a number too long
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(content).__name__}.")
    return content


def read_bounded(path: Path) -> bytes:
    """Return a file's content; ValueError if it is larger than any file of this kind."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, more than such a file holds.")
    return path.read_bytes()


def open_in_place(path: Path, mode: str) -> IO[Any]:
    """Open a file of a run folder to append to it or to cut it, made where it is missing.

    Raises ValueError for a link, whose target belongs to somebody else, and for anything but a regular file.
    """

    def open_itself(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    if path.is_symlink() or (path.exists() and not path.is_file()):
        what = "a link" if path.is_symlink() else "no regular file"
        raise ValueError(
            f"{path} is {what}, and a run does not write through it. Delete it, or set another output_dir."
        )
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=open_itself)


def delete_whole(folder: Path) -> None:
    """Delete a folder; when that is cut short, what is left of it does not have its name."""
    aside = _beside(folder, "old")
    folder.rename(aside)
    remove(aside)


def sync(path: Path) -> None:
    """See a file's content, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a folder that may not be there; of a link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, kind: str) -> Path:
    # A thread's number is unlike those of all others on the machine, and a process's first thread has the process's.
    return path.with_name(f".{path.name}.{kind}-{threading.get_native_id()}")
