"""The content of files in a short hash, read again only when a file may have changed.

A file is read once. Its hash is then remembered under its device, inode, size, modification and change time: whatever
writes to a file changes the last, which no ordinary program can set, so a remembered hash is that of the present content.
There are two exceptions. A file that was changed less than two seconds before it was read is not remembered, since a
second change could fall on the same tick of the clock. And a file system that does not keep change times (some network
shares) or a clock set back can hide a change that leaves the size as it was.
"""

import contextlib
import hashlib
import time
from pathlib import Path

from lean_ft.whole_files import write_whole

SETTLED_SECONDS = 2.0  # the coarsest clock that a common file system has
READ_BYTES = 2**20


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
