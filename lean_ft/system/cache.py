"""On-disk cache of prepared data: folders of memory-mapped arrays, written once.

An entry is a folder named by its key, a hash of everything that determines its content. The entry is written under a
temporary name, synced to disk and then renamed, so a crash never leaves a partial entry; a later start removes the
remains. If two processes on one machine need the same entry, one prepares it and the other waits. Two machines both
prepare it, and the second to finish uses the first one's entry. Entries are immutable, so readers need no lock.
Deleting an entry does not affect a run that has it mapped.

An entry contains one file per array (raw values in native byte order), and `about.json` with dtypes and shapes.
Nothing is pickled. When the cache exceeds its size limit, the least recently used entries are deleted.

Keys identify input files by a hash of their content. The hash of a file is stored under its device, inode, size,
modification time and change time. Every write updates the change time, and ordinary programs cannot set it, so a stored
hash is valid. There are two exceptions. The hash of a file changed less than 2 s before reading is not stored, since
another change could get the same timestamp. A change that keeps the file size can stay undetected if the file system
does not keep change times (some network shares) or the clock is set back.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lean_ft.system.environment import user_cache
from lean_ft.system.whole_files import sync, write_whole

FORMAT = 2  # version of the entry format; part of every key
ABOUT = "about.json"
UNFINISHED = ".unfinished"
SETTLED_SECONDS = 2.0  # coarsest timestamp resolution of common file systems
READ_BYTES = 2**20
JUST_BEGUN_SECONDS = 5.0  # a newer folder may not be locked yet

Entry = tuple[dict[str, np.ndarray], dict[str, Any]]
"""Read-only memory-mapped arrays by name, and the entry's metadata."""


def cache_folder(setting: Path | None) -> Path:
    """Return the cache folder: `data.cache_dir`, else LEAN_FT_CACHE, else lean_ft/data in the user's cache.

    Creates the folder. Raises ValueError if it cannot be created or written.
    """
    if setting is not None:
        folder = setting.expanduser()
    elif named := os.environ.get("LEAN_FT_CACHE"):
        folder = Path(named).expanduser()
    else:
        folder = user_cache() / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(
            f"cannot write prepared data to {folder}: the folder cannot be created or written. Set data.cache_dir, or "
            "the environment variable LEAN_FT_CACHE, to a writable folder."
        )
    return folder


class EntryWriter:
    """Writes the arrays of an entry to disk in parts."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, tuple[BinaryIO, np.dtype, tuple[int, ...]]] = {}
        self.about: dict[str, Any] = {}

    def append(self, arrays: dict[str, np.ndarray]) -> None:
        """Append values (n, ...) to each named array. All parts of an array have the same dtype and the same further
        dimensions.

        Raises ValueError if they do not.
        """
        for name, values in arrays.items():
            if name not in self._files:
                self._files[name] = (self.folder / name).open("wb"), values.dtype, values.shape[1:]
            file, dtype, shape = self._files[name]
            if (values.dtype, values.shape[1:]) != (dtype, shape):
                raise ValueError(
                    f"the column `{name}` has values of {values.dtype} {values.shape[1:]} in one row, and of {dtype} "
                    f"{shape} in an earlier one. All rows must have the same."
                )
            file.write(np.ascontiguousarray(values).data)

    def finish(self) -> None:
        """Write the description last and sync everything to disk."""
        arrays = {
            name: {"dtype": dtype.str, "shape": [file.tell() // (dtype.itemsize * math.prod(further) or 1), *further]}
            for name, (file, dtype, further) in self._files.items()
        }
        self.close()
        description = {"format": FORMAT, "byte_order": sys.byteorder, "arrays": arrays, **self.about}
        (self.folder / ABOUT).write_text(json.dumps(description, indent=2), encoding="utf-8")
        for name in (*arrays, ABOUT):
            sync(self.folder / name)

    def close(self) -> None:
        for file, *_ in self._files.values():
            file.close()


def load_entry(folder: Path, key: str | None, write: Callable[[EntryWriter], None]) -> Entry:
    """Load the entry `key`, or create it with `write`.

    Without a key, the entry is temporary: its files are mapped and deleted at once, so they use disk space only while
    this process runs.
    """
    entry = read_entry(folder, key) if key is not None else None
    if entry is not None:
        return entry
    name = key or f"unkept-{os.getpid()}-{time.time_ns()}"
    with _one_at_a_time(folder / f".{name}.lock"):
        entry = read_entry(folder, key) if key is not None else None  # created while waiting
        if entry is None:
            with write_entry(folder, name) as writer:
                write(writer)
            entry = read_entry(folder, name)
            assert entry is not None
            if key is None:
                _remove(folder / name)
    return entry


def forget_entry(folder: Path, key: str) -> None:
    """Delete an entry. Its arrays stay readable where they are mapped."""
    _remove(folder / key)


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Lock between processes of one machine, such as the ranks of a run; no lock if the file system has none."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        file.unlink(missing_ok=True)  # waiting processes have it open
        os.close(lock)


def read_entry(folder: Path, key: str) -> Entry | None:
    """Return the entry `key` with its arrays mapped, or None if it is missing or incomplete."""
    path = folder / key
    try:
        about = json.loads((path / ABOUT).read_bytes())
        arrays = {name: _mapped(path / Path(name).name, **layout) for name, layout in about["arrays"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None  # missing, damaged or being deleted: made again
    with contextlib.suppress(OSError):  # owned by another user
        os.utime(path / ABOUT)  # time of last use
    return arrays, about


@contextlib.contextmanager
def write_entry(folder: Path, key: str) -> Iterator[EntryWriter]:
    """Context manager that writes the entry `key`. If the block raises, nothing is left on disk."""
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
            _remove(folder / key)  # damaged entry
        # Fails if another run finished the entry first. Both are equal, so keep that one.
        with contextlib.suppress(OSError):
            path.rename(folder / key)
        sync(folder)
    finally:
        os.close(lock)
        _remove(path)


def growing_array(folder: Path, key: str, length: int) -> np.ndarray:
    """Return a writable float32 array (length,) of the entry `key`, initialized with NaN.

    Values persist for later starts. Concurrent runs must write the same values.
    """
    name = "values"
    load_entry(folder, key, lambda writer: writer.append({name: np.full(length, np.nan, dtype=np.float32)}))
    return np.memmap(folder / key / name, dtype=np.float32, mode="r+", shape=(length,))


def limit_size(folder: Path, max_bytes: float, keep: set[str]) -> list[str]:
    """Delete the least recently used entries until the rest uses at most `max_bytes`; return the deleted keys.

    Entries in `keep` stay, even if they alone exceed the limit.
    """
    entries = []
    for about in folder.glob(f"*/{ABOUT}"):
        if about.parent.name.endswith(UNFINISHED):
            continue
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in about.parent.iterdir())
            entries.append((about.stat().st_mtime, about.parent.name, size))
    for rows in folder.glob("rows/*.jsonl"):  # rows passed as Python objects; written again when needed
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


def _mapped(file: Path, dtype: str, shape: list[int]) -> np.ndarray:
    if file.stat().st_size != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{file} is not as long as it was written")
    if not math.prod(shape):
        return np.empty(shape, dtype=dtype)  # an empty file cannot be mapped
    # A plain view: each slice of np.memmap costs microseconds more.
    return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=tuple(shape)))


def _remove_abandoned(folder: Path) -> None:
    """Delete partial entries of killed runs. Entries being written are locked and stay."""
    for path in folder.glob(f"*{UNFINISHED}*"):
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
    # Delete the description first: without it, an interrupted deletion leaves no valid entry.
    with contextlib.suppress(OSError):
        (path if path.is_file() else path / ABOUT).unlink()
    shutil.rmtree(path, ignore_errors=True)


def content_digest(file: Path, remembered: Path) -> str:
    """Hex hash of the content of `file`; `remembered` is the folder of stored hashes.

    Raises OSError if the file cannot be read.
    """
    before = file.stat()
    identity = (before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
    note = remembered / hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        noted = note.read_text(encoding="ascii")
        if len(noted) == 32:
            return noted
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
