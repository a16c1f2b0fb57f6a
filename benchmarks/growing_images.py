"""Images for `fuzzing.py`: files of all formats that hold or claim far more pixels than bytes, and changes that make
them claim others.

seeds = growing_images()
case = break_image(seeds[0], random.Random(0), break_bytes)
"""

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

SIDE = 3000  # so that most seeds are read
SIZES = (0, 1, 2, 7, 255, 3000, 4095, 8192, 16383, 65535, 1 << 20, 1 << 26, (1 << 31) - 1, (1 << 32) - 1)
PADDINGS = (
    0,
    0,
    0,
    1 << 10,
    1 << 16,
)  # bytes behind an image; files stay below the size from which more memory is allowed
NUMBERS = ("<H", ">H", "<I", ">I")
HEADER_BYTES = 64
PNG = b"\x89PNG\r\n\x1a\n"
# Where files have a width and a height, behind these bytes: PNG, GIF, BMP, WebP, JPEG.
BEFORE_SIZES = ((b"IHDR", 0), (b"GIF89a", 0), (b"GIF87a", 0), (b"BM", 16), (b"VP8L", 5), (b"VP8X", 8), (b"VP8 ", 10),
    (b"\xff\xc0", 3), (b"\xff\xc2", 3))  # fmt: skip


def growing_images() -> list[bytes]:
    """Return whole images of one color, which are a few kilobytes each, and small ones in further forms."""

    def saved(mode: str, kind: str, side: int = SIDE, **settings: Any) -> bytes:
        plain = mode in ("1", "P", "I;16")  # others would be dithered
        image = Image.new(mode, (side, side)) if plain else Image.new("RGB", (side, side), "red").convert(mode)
        image.save(file := io.BytesIO(), kind, **settings)
        return file.getvalue()

    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [Image.new("RGB", (64, 64), color) for color in ("red", "blue")]
    large = [
        ("1", "PNG"),
        ("RGBA", "PNG"),
        ("I;16", "PNG"),
        ("P", "GIF"),
        ("1", "BMP"),
        ("RGB", "JPEG"),
        ("CMYK", "JPEG"),
    ]
    found = [saved(mode, kind) for mode, kind in large]
    found += [saved("RGB", "JPEG", progressive=True, subsampling=0, exif=exif), saved("RGB", "WEBP", lossless=True)]
    found += [saved("RGB", "WEBP", method=0), saved("1", "TIFF", compression="group4")]
    found += [
        saved("RGB", "TIFF", compression=form, strip_size=1 << 30)
        for form in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")
    ]
    small = [
        ("LA", "PNG"),
        ("P", "PNG"),
        ("L", "JPEG"),
        ("L", "BMP"),
        ("RGB", "BMP"),
        ("LAB", "TIFF"),
        ("YCbCr", "TIFF"),
        ("I;16", "TIFF"),
    ]
    found += [saved(mode, kind, 64) for mode, kind in small]
    found += [saved("RGB", "TIFF", 64, compression=form) for form in ("packbits", "zstd", "lzma")]
    for kind in ("GIF", "WEBP", "PNG", "TIFF", "MPO"):
        frames[0].save(file := io.BytesIO(), kind, save_all=True, append_images=frames[1:])
        found.append(file.getvalue())
    scans = saved("RGB", "JPEG", 512, progressive=True)
    last = scans[scans.rindex(b"\xff\xda") : -2]
    return [*found, scans[:-2] + last * 40 + b"\xff\xd9", _runs(1, 2000), _runs(2, 2000), _tiles()]


def break_image(content: bytes, chance: random.Random, break_bytes: Callable[[bytes, random.Random], bytes]) -> bytes:
    """Change sizes that an image claims, and sometimes other bytes, and keep the checksums of a PNG right."""
    for _ in range(chance.choice((0, 1, 1, 2))):
        if chance.random() < 0.6:
            known = [content.find(mark) + len(mark) + skip for mark, skip in BEFORE_SIZES if mark in content[:4096]]
            place = chance.choice(known or [8]) + chance.choice((0, 0, 2, 4))
        else:
            place = chance.randrange(HEADER_BYTES)
        number = chance.choice(NUMBERS)
        size = struct.calcsize(number)
        changed = struct.pack(number, chance.choice(SIZES) & (256**size - 1))
        content = content[:place] + changed + content[place + size :]
    if chance.random() < 0.3:
        content = break_bytes(content, chance)
    if chance.random() < 0.8 and content.startswith(PNG):
        content = _with_checksums(content)
    return content + bytes(chance.choice(PADDINGS))


def _with_checksums(content: bytes) -> bytes:
    parts, place = [PNG], len(PNG)
    while place + 12 <= len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        chunk = content[place + 4 : place + 8 + length]
        parts += [content[place : place + 4], chunk, struct.pack(">I", zlib.crc32(chunk))]
        place += 12 + length
    return b"".join(parts)


def _runs(form: int, side: int) -> bytes:
    """A BMP file of runs: of 8 bits (1), or of 4 bits (2)."""
    bits = 8 // form
    palette = bytes(4 << bits)
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, bits, form, 0, 0, 0, 1 << bits, 0)
    rows = (b"\xff\x01" * (side // 255 + 1) + b"\0\0") * side + b"\0\1"
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + len(palette)) + header + palette + rows


def _tiles() -> bytes:
    """A TIFF file of compressed tiles that are larger than its image."""
    tile = zlib.compress(bytes(256 * 256))
    tags = [
        (256, 100),
        (257, 100),
        (258, 8),
        (259, 8),
        (262, 1),
        (277, 1),
        (322, 256),
        (323, 256),
        (324, 0),
        (325, len(tile)),
    ]
    start = 10 + 12 * len(tags)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, start if tag == 324 else value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + tile
