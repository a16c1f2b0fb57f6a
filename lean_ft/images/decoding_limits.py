"""Limits of the memory for images: an estimate from an image's header, and one budget for all threads of a process.

A file of a few bytes can hold an image of gigabytes. The header states the image's size and form, which determine how
much memory Pillow and its libraries need. `SMALL_BYTES` are always allowed, and more in proportion to the size of the
file. All images that a process decodes at a time share `BUDGET_BYTES`. A JPEG beyond the limits is decoded at a half, a
quarter or an eighth of its sides. Any other image beyond them is refused before it is decoded.

Not limited: the memory of several processes together. A process of data preparation decodes one image at a time.

Source of the numbers: peak resident memory of fresh processes with Pillow 13.0, libjpeg-turbo 3.2, libwebp 1.6 and
libtiff 4.7.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from threading import Condition

from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from lean_ft.images.cuts import Size

MAX_PIXELS = 1 << 26  # of a decoded image
MAX_JPEG_PIXELS = 1 << 28  # of a JPEG, which can be decoded at a lower size
MAX_SIDE = 1 << 20
SMALL_BYTES = 192 << 20  # every image may take this much memory
EXPANSION = 200  # bytes of memory for each byte of the file of a larger image; photos need 20 to 120
BUDGET_BYTES = 1 << 30  # of all images that a process decodes at a time
_MAX_SCANS = 64  # of a progressive JPEG: each takes time for the whole image
_MAX_RUN_LENGTH_PIXELS = 1 << 22  # of a run-length BMP, which Pillow decodes pixel by pixel in Python
_WEBP_BYTES = 16  # per pixel: two canvases of the decoder, a frame, and the image
_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # per pixel by mode; others have 4
_TIFF_FORMS = {
    "raw", "tiff_ccitt", "group3", "group4", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "zstd",
    "lzma", "jpeg",
    "tiff_jpeg",
}  # fmt: skip
_JPEG_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)  # with a length behind it
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_START_BYTES = 1 << 16  # usually enough to find the first scan


class RefusedImage(ValueError):
    """An image that is refused although its file may be intact. The message does not name the image."""


def webp_canvas(start: bytes) -> Size | None:
    """The size of a WebP image from the first 30 bytes of its file. Pillow allocates its canvas when it opens the file.

    Source: https://developers.google.com/speed/webp/docs/riff_container.
    """
    number = int.from_bytes
    if start[12:16] == b"VP8X" and len(start) >= 30:
        return Size(1 + number(start[24:27], "little"), 1 + number(start[27:30], "little"))
    if start[12:16] == b"VP8 " and len(start) >= 30:
        return Size(number(start[26:28], "little") & 0x3FFF, number(start[28:30], "little") & 0x3FFF)
    if start[12:16] == b"VP8L" and len(start) >= 25:
        bits = number(start[21:25], "little")
        return Size(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    return None


def check_size(size: tuple[int, int], most: int = MAX_PIXELS) -> None:
    """Raise RefusedImage if an image has too many pixels, or none."""
    width, height = size
    if not 0 < width * height <= most or max(size) > MAX_SIDE:
        raise RefusedImage(
            f"it has {width} x {height} pixels; expected between 1 and {most} pixels, and at most {MAX_SIDE} on a "
            "side. Scale it down."
        )


def fit(image: ImageFile, num_file_bytes: int) -> None:
    """Choose a lower size for a JPEG that needs it. Raises RefusedImage if decoding an image would take too much
    time."""
    is_jpeg = isinstance(image, JpegImageFile)
    check_size(image.size, MAX_JPEG_PIXELS if is_jpeg else MAX_PIXELS)
    if isinstance(image, JpegImageFile):
        _fit_jpeg(image, num_file_bytes)
    if isinstance(image, BmpImageFile) and image.tile[0][0] == "bmp_rle":
        check_size(image.size, _MAX_RUN_LENGTH_PIXELS)
    if isinstance(image, TiffImageFile) and image.info["compression"] not in _TIFF_FORMS:
        raise RefusedImage(f"its compression {image.info['compression']} is not read. Save it as PNG.")
    boxes = (tile[1] or (0, 0, 0, 0) for tile in image.tile)
    areas = ((right - left) * (bottom - top) for left, top, right, bottom in boxes)
    if sum(areas) > 4 * image.width * image.height:  # at most each of four colors by itself
        raise RefusedImage("it has more tiles than pixels need.")


def check_need(num_bytes: int, num_file_bytes: int) -> None:
    """Raise RefusedImage if an image needs more memory than its file may take."""
    if num_bytes > (most := _most_bytes(num_file_bytes)):
        raise RefusedImage(
            f"it would take {num_bytes >> 20:,} MiB of memory; the limit for a file of {num_file_bytes:,} bytes is "
            f"{most >> 20:,} MiB. Scale it down."
        )


def _most_bytes(num_file_bytes: int) -> int:
    return max(SMALL_BYTES, min(EXPANSION * num_file_bytes, BUDGET_BYTES))


def decoding_bytes(image: Image.Image) -> int:
    """Estimate the peak memory of Pillow and its libraries while they decode an image. It must not be decoded yet."""
    pixels = image.width * image.height
    stored = pixels * stored_bytes(image.mode)
    if isinstance(image, WebPImageFile):
        return _WEBP_BYTES * pixels
    if isinstance(image, JpegImageFile):
        return stored + _coefficient_bytes(image)
    if isinstance(image, TiffImageFile):
        copy = 0 if image.tag_v2.get(_ORIENTATION, 1) == 1 else stored  # Pillow turns it
        return stored + max(copy, _piece_bytes(image) if image.use_load_libtiff else 0)
    if isinstance(image, BmpImageFile) and image.tile[0][0] == "bmp_rle":
        return stored + 3 * pixels
    return stored


def stored_bytes(mode: str) -> int:
    """Bytes of a pixel in an image of Pillow."""
    return _BYTES.get(mode, 4)


class _Budget:
    """Memory that threads reserve and release. A thread that needs all of it works alone."""

    def __init__(self, num_bytes: int) -> None:
        self._all = self._free = num_bytes
        self._changed = Condition()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        num_bytes = min(num_bytes, self._all)
        with self._changed:
            self._changed.wait_for(lambda: num_bytes <= self._free)
            self._free -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._free += num_bytes
                self._changed.notify_all()


memory = _Budget(BUDGET_BYTES).take
"""Context manager that waits until a number of bytes of the budget is free, and reserves them. Never nest it."""


# JPEG -----------------------------------------------------------------------------------------------------------------


def _fit_jpeg(image: JpegImageFile, num_file_bytes: int) -> None:
    """Draft a JPEG at the largest size that has few enough pixels, and memory for it and two copies of its size."""
    if len(_scans(image, _MAX_SCANS)) > _MAX_SCANS:
        raise RefusedImage(f"it is a JPEG of more than {_MAX_SCANS} scans. Save it again.")
    (width, height), coefficients = image.size, _coefficient_bytes(image)

    def need(scale: int) -> int:
        stored = ceil(width / scale) * ceil(height / scale) * stored_bytes(image.mode)
        return stored + max(coefficients, 2 * stored)  # the coefficients are gone when it is resized

    has_detail = need(1) <= EXPANSION * num_file_bytes
    most = BUDGET_BYTES if has_detail else SMALL_BYTES
    fitting = (n for n in (1, 2, 4) if width * height <= MAX_PIXELS * n**2 and need(n) <= most)
    scale = next(fitting, 8)
    if scale > 1 and min(width, height) >= scale:
        image.draft(None, (width // scale, height // scale))
    check_size(image.size)


def _coefficient_bytes(image: JpegImageFile) -> int:
    """Bytes of the coefficients, which libjpeg holds for the whole image if it has several scans."""
    if _scans(image, 1) == [image.layers]:
        return 0
    scale = image.decoderconfig[0] if image.decoderconfig else 1
    most = [max(layer[i] for layer in image.layer) for i in (1, 2)]
    across, down = (ceil(n * scale / 8 / blocks) for n, blocks in zip(image.size, most, strict=True))
    return 2 * 64 * across * down * sum(layer[1] * layer[2] for layer in image.layer)


def _scans(image: JpegImageFile, most: int) -> list[int]:
    """The number of colors in each scan, up to one more than `most` scans; of a JPEG in one scan, the first scan
    alone."""
    assert image.fp is not None
    found = list[int]()
    for amount in (_START_BYTES, -1):
        image.fp.seek(0)
        content, found, place = image.fp.read(amount), list[int](), 0
        while len(found) <= most and (marker := _JPEG_MARKER.search(content, place)):
            place = marker.end()
            if marker[1][0] == _END_OF_IMAGE:
                break
            if marker[1][0] == _START_OF_SCAN:
                found += content[place + 2 : place + 3]
                if found == [image.layers] and not image.info.get("progressive"):
                    return found
            place += int.from_bytes(content[place : place + 2], "big")
    return [*found, *([0] if len(found) < 2 else [])]


# TIFF -----------------------------------------------------------------------------------------------------------------

# Tags.
_WIDTH, _HEIGHT, _BITS, _COLORS, _ORIENTATION = 256, 257, 258, 262, 274
_SAMPLES, _ROWS_OF_STRIP, _PLANES, _TILE_WIDTH, _TILE_HEIGHT = 277, 278, 284, 322, 323
# Values of tags.
_YCBCR, _SEPARATE = 6, 2
_MOST_OF_JPEG = 100 << 20  # libtiff's own limit


def _piece_bytes(image: TiffImageFile) -> int:
    """Bytes that libtiff takes for the largest piece, a strip or a tile, which it decompresses whole."""
    tags, compression = image.tag_v2, image.info["compression"]
    if _TILE_WIDTH in tags:
        width, height = tags[_TILE_WIDTH], tags[_TILE_HEIGHT]
    else:
        width, height = tags[_WIDTH], min(tags.get(_ROWS_OF_STRIP, tags[_HEIGHT]), tags[_HEIGHT])
    samples = 1 if tags.get(_PLANES) == _SEPARATE else tags.get(_SAMPLES, 3)
    num_bytes = height * ceil(width * samples * max(tags.get(_BITS, (1,))) / 8)
    if compression in ("zstd", "lzma"):  # their windows of earlier bytes take as much again
        num_bytes *= 2
    if compression == "jpeg":
        num_bytes += min(_MOST_OF_JPEG, 6 * width * height)
    elif tags.get(_COLORS) == _YCBCR:  # libtiff converts it
        num_bytes += 4 * width * height
    return num_bytes
