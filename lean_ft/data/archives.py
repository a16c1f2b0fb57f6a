"""Files to bytes, decompressed where they are gzip or zstd: told by their first bytes, not by their names."""

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CHUNK_BYTES = 1 << 18


def open_decompressed(path: Path) -> IO[bytes]:
    """Opens `path` for reading; reading raises ValueError where an archive is damaged or ends too early."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic.startswith(GZIP):
        archive = gzip.open(path, "rb")  # noqa: SIM115 - its reader closes it
        return io.BufferedReader(_Reader(path, archive.read, archive.close), CHUNK_BYTES)
    if magic == ZSTD:
        frames = _ZstdFrames(path)
        return io.BufferedReader(_Reader(path, frames.read, frames.close), CHUNK_BYTES)
    return path.open("rb")


class _Reader(io.RawIOBase):
    """A file over a function that reads, which tells what is wrong with an archive in our words."""

    def __init__(self, path: Path, read: Callable[[int], bytes], close: Callable[[], object]):
        self._path, self._read, self._close = path, read, close

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._read(len(buffer))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{self._path} cannot be read to its end: the archive is cut off or damaged ({error}). Copy or "
                "download it again."
            ) from None
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._close()
        super().close()


class _ZstdFrames:
    """The frames of a zstd file, one after another. zstandard's own reader takes a file that is cut off for one
    that is complete."""

    def __init__(self, path: Path):
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"{path} is compressed with zstd, which needs a package: pip install 'lean-ft[zstd]'."
            ) from None
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor()
        self._file = path.open("rb")
        self.close = self._file.close
        self._frame: Any = None
        self._waiting = b""  # decompressed, not yet asked for

    def read(self, size: int) -> bytes:
        try:
            while not self._waiting:
                unused = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
                compressed = unused or self._file.read(CHUNK_BYTES)
                if not compressed:
                    if self._frame is not None and not self._frame.eof:
                        raise EOFError("the last frame is not complete")
                    return b""
                if self._frame is None or self._frame.eof:
                    self._frame = self._decompressor.decompressobj()
                self._waiting = self._frame.decompress(compressed)
        except self._error as error:
            raise EOFError(str(error)) from None
        content, self._waiting = self._waiting[:size], self._waiting[size:]
        return content
