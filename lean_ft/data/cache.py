"""Prepared data on disk: folders of plain arrays that are mapped into memory, each written once and then only read.

An entry is a folder named by its key, a hash of all that decides its content. It is written under another name and
renamed when it is whole and on the disk, so what a crash leaves is never taken for an entry; it is removed by a later
start. Of two processes of a machine that want the same data at once, one prepares it and the other waits; on two machines
both do the work, and the second to finish takes the first one's.
Entries are never changed, so readers need no lock, and deleting one takes nothing from a run that has it mapped.

In an entry: raw arrays in the machine's byte order, one a file, and `about.json` with their types and lengths. Nothing
is pickled. When all entries together exceed a bound, those that were not used for longest are deleted.

Keys tell files by a hash of their content. A file is read once; its hash is then remembered under its device, inode,
size, modification and change time: whatever writes to a file changes the last, which no ordinary program can set, so a
remembered hash is that of the present content. There are two exceptions. A file that was changed less than two seconds
before it was read is not remembered, since a second change could fall on the same tick of the clock. And a file system
that does not keep change times (some network shares) or a clock set back can hide a change that leaves the size as it was.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lean_ft.system.whole_files import sync, write_whole

FORMAT = 1  # of entries; part of every key
ABOUT = "about.json"
UNFINISHED = ".unfinished"
SETTLED_SECONDS = 2.0  # the coarsest clock that a common file system has
READ_BYTES = 2**20
JUST_BEGUN_SECONDS = 60.0  # a folder as young as this may not be locked yet

Entry = tuple[dict[str, np.ndarray], dict[str, Any]]
"""Arrays by name, read-only and mapped from files, and what was noted about them."""


def cache_folder(setting: Path | None) -> Path:
    """The folder for prepared data: `data.cache_dir`, else LEAN_FT_CACHE, else lean_ft/data in the user's cache.

    Makes it. Raises ValueError where that is not possible.
    """
    if setting is not None:
        folder = setting.expanduser()
    elif named := os.environ.get("LEAN_FT_CACHE"):
        folder = Path(named).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lean_ft" / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(
            f"prepared data cannot be kept in {folder}: no such folder can be made or written there. Set data.cache_dir, "
            "or LEAN_FT_CACHE in the environment, to one that can."
        )
    return folder


class EntryWriter:
    """Arrays of an entry, growing on disk; at most a part of them is in memory."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, tuple[BinaryIO, np.dtype]] = {}
        self.about: dict[str, Any] = {}

    def append(self, arrays: dict[str, np.ndarray]) -> None:
        """Adds to each array named the values (n,); all parts of one are of one type."""
        for name, values in arrays.items():
            if name not in self._files:
                self._files[name] = (self._folder / name).open("wb"), values.dtype
            file, dtype = self._files[name]
            assert values.dtype == dtype
            file.write(np.ascontiguousarray(values).data)

    def finish(self) -> None:
        """Puts everything on the disk; the description last."""
        lengths = {name: file.tell() // dtype.itemsize for name, (file, dtype) in self._files.items()}
        arrays = {name: {"dtype": self._files[name][1].str, "length": length} for name, length in lengths.items()}
        self.close()
        description = {"format": FORMAT, "byte_order": sys.byteorder, "arrays": arrays, **self.about}
        (self._folder / ABOUT).write_text(json.dumps(description, indent=2), encoding="utf-8")
        for name in (*arrays, ABOUT):
            sync(self._folder / name)

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()


def load_entry(folder: Path, key: str | None, write: Callable[[EntryWriter], None]) -> Entry:
    """The entry `key`, which `write` makes where there is none.

    Without a key, one that no later start may use: its files are mapped and then deleted at once, so they take space for
    as long as this process runs and no longer.
    """
    entry = read_entry(folder, key) if key is not None else None
    if entry is not None:
        return entry
    name = key or f"unkept-{os.getpid()}-{time.time_ns()}"
    with _one_at_a_time(folder / f".{name}.lock"):
        entry = read_entry(folder, key) if key is not None else None  # another may have made it meanwhile
        if entry is None:
            with write_entry(folder, name) as writer:
                write(writer)
            entry = read_entry(folder, name)
            assert entry is not None
            if key is None:
                _remove(folder / name)
    return entry


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Lets in one process of the machine after another, such as the ranks of a run; all, where nothing can be locked."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        file.unlink(missing_ok=True)  # who waits for it has it open
        os.close(lock)


def read_entry(folder: Path, key: str) -> Entry | None:
    """The entry `key` with its arrays mapped, or None where there is no whole one."""
    path = folder / key
    try:
        about = json.loads((path / ABOUT).read_bytes())
        arrays = {name: _mapped(path / name, **shape) for name, shape in about["arrays"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or one that is being deleted or was damaged: it is made again
    with contextlib.suppress(OSError):  # somebody else's
        os.utime(path / ABOUT)  # the time of its last use
    return arrays, about


@contextlib.contextmanager
def write_entry(folder: Path, key: str) -> Iterator[EntryWriter]:
    """Writes the entry `key`: it is there when the block ends, and leaves nothing behind when the block fails."""
    _remove_abandoned(folder)
    path = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=UNFINISHED, dir=folder))
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer = EntryWriter(path)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()
        if read_entry(folder, key) is None:
            _remove(folder / key)  # a damaged one
        # Fails where another run put a whole one there meanwhile: the two are equal, and that one stays.
        with contextlib.suppress(OSError):
            path.rename(folder / key)
        sync(folder)
    finally:
        os.close(lock)
        _remove(path)


def growing_array(folder: Path, key: str, length: int) -> np.ndarray:
    """The float32 values (length,) of the entry `key`, which is made of NaN where there is none, to be written to in place.

    What is written stays for the next start. Two runs that fill it at once must write the same.
    """
    name = "values"
    load_entry(folder, key, lambda writer: writer.append({name: np.full(length, np.nan, dtype=np.float32)}))
    return np.memmap(folder / key / name, dtype=np.float32, mode="r+", shape=(length,))


def limit_size(folder: Path, max_bytes: float, keep: set[str]) -> list[str]:
    """Deletes the entries that were not used for longest until all take at most `max_bytes`; returns their keys.

    Those in `keep` stay, even if they alone are larger.
    """
    entries = []
    for about in folder.glob(f"*/{ABOUT}"):
        if about.parent.name.endswith(UNFINISHED):
            continue
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in about.parent.iterdir())
            entries.append((about.stat().st_mtime, about.parent.name, size))
    for rows in folder.glob("rows/*.jsonl"):  # of Python, written again when they are given again
        with contextlib.suppress(OSError):
            entries.append((rows.stat().st_mtime, f"rows/{rows.name}", rows.stat().st_size))
    total = sum(size for _, _, size in entries)
    deleted = []
    for _, key, size in sorted(entries):
        if total <= max_bytes:
            break
        if key not in keep:
            _remove(folder / key)
            deleted.append(key)
            total -= size
    return deleted


def _mapped(file: Path, dtype: str, length: int) -> np.ndarray:
    if file.stat().st_size != length * np.dtype(dtype).itemsize:
        raise ValueError(f"{file} is not as long as it was written")
    if length == 0:
        return np.empty(0, dtype=dtype)  # nothing can be mapped of an empty file
    # A plain view of the mapping: slices of np.memmap itself cost microseconds more each.
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(length,)))


def _remove_abandoned(folder: Path) -> None:
    """Deletes what runs that were killed left half written; what is being written is locked."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < JUST_BEGUN_SECONDS:
                continue
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(lock)


def _remove(path: Path) -> None:
    # The description first: without it what is left is no entry, whenever this is interrupted.
    with contextlib.suppress(OSError):
        (path if path.is_file() else path / ABOUT).unlink()
    shutil.rmtree(path, ignore_errors=True)


def content_digest(file: Path, remembered: Path) -> str:
    """Hex hash of what is in `file`; `remembered` is a folder for the hashes of files that were read before.

    Raises OSError where it cannot be read.
    """
    before = file.stat()
    identity = (before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
    note = remembered / hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError):
        known = note.read_text(encoding="ascii")
        if len(known) == 32:
            return known
    read_at = time.time()
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb", buffering=0) as content:
        buffer = memoryview(bytearray(READ_BYTES))
        while size := content.readinto(buffer):
            digest.update(buffer[:size])
    after = file.stat()
    unchanged = identity == (after.st_dev, after.st_ino, after.st_size, after.st_mtime_ns, after.st_ctime_ns)
    if unchanged and read_at - max(after.st_mtime, after.st_ctime) > SETTLED_SECONDS:
        _remember(note, digest.hexdigest())
    return digest.hexdigest()


def _remember(note: Path, digest: str) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(note) as temporary:
        temporary.write_text(digest, encoding="ascii")
