"""Files to bytes, decompressed where they are gzip or zstd: told by their first bytes, not by their names."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CHUNK_BYTES = 1 << 16  # compressed


def open_decompressed(path: Path) -> IO[bytes]:
    """Opens `path` for reading; reading raises ValueError where an archive is damaged or ends too early."""
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
                f"{path} is compressed with zstd, which needs a package: pip install 'lean-ft[zstd]'."
            ) from None
        begin = zstandard.ZstdDecompressor().decompressobj
        return io.BufferedReader(_Archive(file, begin, zstandard.ZstdError))
    return file


class _Archive(io.RawIOBase):
    """The members of a gzip file, or the frames of a zstd file, one after another.

    zstandard's own reader takes a file that is cut off for one that is complete.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any], error: type[Exception]):
        self._file, self._begin, self._error = file, begin, error
        self._member = begin()
        self._waiting = b""  # decompressed, not yet asked for

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._waiting:
                compressed = self._file.read(CHUNK_BYTES) if not self._member.eof else self._behind_member()
                if not compressed and self._member.eof:
                    return 0
                if not compressed:
                    raise self._error("its last part is not complete")
                if self._member.eof:
                    self._member = self._begin()
                self._waiting = self._member.decompress(compressed)
        except self._error as error:
            raise ValueError(
                f"{self._file.name} cannot be read to its end: the archive is cut off or damaged ({error}). Copy or "
                "download it again."
            ) from None
        content, self._waiting = self._waiting[: len(buffer)], self._waiting[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)

    def _behind_member(self) -> bytes:
        """What follows a complete member; archives may be filled up with zeros."""
        return self._member.unused_data.lstrip(b"\0") or self._file.read(CHUNK_BYTES).lstrip(b"\0")

    def close(self) -> None:
        self._file.close()
        super().close()
