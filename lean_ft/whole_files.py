"""Files and folders that are whole or not there: written under another name, which then becomes theirs.

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
from typing import Any

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
    """Delete a file or a folder that may not be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, kind: str) -> Path:
    # A thread's number is unlike those of all others on the machine, and a process's first thread has the process's.
    return path.with_name(f".{path.name}.{kind}-{threading.get_native_id()}")
