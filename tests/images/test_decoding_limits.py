"""Memory of images: what decoding needs is known from the header, files that need too much are refused, and threads
take turns."""

import io
import json
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lean_ft.images import decoding_limits as limits
from lean_ft.images.cuts import Size, always, within_longest
from lean_ft.images.reading import decoded, open_image, reference, size_of, thumbnail
from lean_ft.images.rules import ImageRules, image_rules
from tests.images.their_processors import write_folder

MIB = 1 << 20


def saved(image: Image.Image, kind: str, **settings: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **settings)
    return file.getvalue()


def solid(side: int, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (side, side))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, depth: int = 8, colors: int = 0) -> bytes:
    """A whole PNG file of zeros, of which no image is made."""
    packer = zlib.compressobj()
    row = bytes(1 + width * depth * {0: 1, 2: 3}[colors] // 8)
    content = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colors, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def webp(form: bytes, width: int, height: int) -> bytes:
    """The first bytes of a WebP file, as much of it as has its size."""
    w, h = width - 1, height - 1
    headers = {
        b"VP8X": bytes(4) + w.to_bytes(3, "little") + h.to_bytes(3, "little"),
        b"VP8L": b"\x2f" + (w | h << 14).to_bytes(4, "little") + bytes(5),
        b"VP8 ": b"\x10\0\0\x9d\x01\x2a" + width.to_bytes(2, "little") + height.to_bytes(2, "little"),
    }
    return b"RIFF" + struct.pack("<I", 22) + b"WEBP" + form + struct.pack("<I", 10) + headers[form]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> ImageRules:
    return image_rules(write_folder(tmp_path_factory.mktemp("model"), "qwen3_vl"))


def test_the_canvas_of_a_webp_image_is_in_its_first_bytes():
    for settings in ({}, {"lossless": True}, {"save_all": True, "append_images": [Image.new("RGB", (70, 333), "red")]}):
        encoded = saved(Image.new("RGB", (70, 333)), "WEBP", **settings)
        assert limits.webp_canvas(encoded[:30]) == (70, 333)
    for form in (b"VP8X", b"VP8L", b"VP8 "):
        assert limits.webp_canvas(webp(form, 16383, 12345)) == (16383, 12345)
        with pytest.raises(ValueError, match="has 16383 x 16383 pixels; expected between 1 and 67108864"):
            open_image(b"data:" + webp(form, 16383, 16383))
    with pytest.raises(ValueError, match="broken or incomplete"):
        open_image(b"data:RIFF\0\0\0\0WEBPXXXX" + bytes(20))


def many_scans() -> bytes:
    scans = saved(solid(64), "JPEG", progressive=True)
    last = scans[scans.rindex(b"\xff\xda") : -2]
    return scans[: -2 - len(last)] + last * 70 + b"\xff\xd9"


def bmp_of_runs() -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, 9999, 999, 1, 8, 1, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 1078) + header + bytes(range(256)) * 4 + b"\0\1"


GROWING: dict[str, Callable[[], bytes]] = {
    "a small WebP": lambda: saved(solid(4096), "WEBP", lossless=True),
    "a small GIF": lambda: saved(solid(8192, "P"), "GIF"),
    "a small PNG": lambda: png(8192, 8192, colors=2),
    "a small TIFF in one strip": lambda: saved(
        solid(8192, "L"), "TIFF", compression="tiff_adobe_deflate", strip_size=1 << 30
    ),
    "a small progressive JPEG": lambda: saved(solid(8192), "JPEG", progressive=True),
    "a small BMP of runs": bmp_of_runs,
    "a JPEG of many scans": many_scans,
}


@pytest.mark.parametrize("name", GROWING)
def test_a_small_file_that_grows_is_refused_by_its_header(tmp_path: Path, name: str):
    (tmp_path / "a.img").write_bytes(GROWING[name]())
    began = time.process_time()
    with pytest.raises(
        ValueError, match=r"a\.img is not read: it (would take \d+ MiB|has 9999 x 999|is a JPEG of more than 64)"
    ):
        open_image(reference("a.img", tmp_path))
    assert time.process_time() - began < 0.5


def test_sides_that_grow_when_they_are_resized_are_refused(rules: ImageRules):
    found = reference(png(64, 1 << 16, colors=2), Path())
    open_image(found, rules=replace(rules, cut=partial(within_longest, multiple=32))).close()
    with pytest.raises(ValueError, match="the image is not read: it would take 276 MiB"):
        open_image(found, rules=replace(rules, cut=partial(always, target=Size(1024, 1024))))


@pytest.mark.long
def test_images_that_people_have_are_read(rules: ImageRules):
    large = [
        saved(solid(3500), "WEBP", lossless=True, method=0),
        saved(solid(4500), "BMP"),
        png(4960, 7016, depth=1),  # a scanned page of 600 dots per inch
        png(3840, 2160, colors=2),  # a plain screenshot
    ]
    for encoded in large:
        with open_image(reference(encoded, Path()), rules) as image:
            assert size_of(image) == image.size


@pytest.mark.long
def test_a_jpeg_beyond_the_limits_is_read_at_a_lower_size(rules: ImageRules):
    full = saved(Image.linear_gradient("L").resize((8200, 8200)), "JPEG")
    with open_image(reference(full, Path()), rules) as image:
        assert size_of(image) == (4100, 4100)
        theirs = Image.open(io.BytesIO(full))
        theirs.draft(None, (4100, 4100))
        assert decoded(image).tobytes() == theirs.convert("RGB").tobytes()
    padded = full[:-2] + b"\xff\xfe\xff\xff" + bytes(65533) + full[-2:]
    with open_image(reference(padded, Path())) as image:
        assert size_of(image) == (4100, 4100)
    with open_image(reference(saved(solid(3900), "JPEG"), Path())) as image:
        assert size_of(image) == (3900, 3900)


PEAK = """
import io, json, sys, time
from pathlib import Path
import numpy as np
from PIL import Image
from lean_ft.images import decoding_limits as limits
from lean_ft.images.reading import decoded, open_image, read_patches, reference, size_of
from lean_ft.images.rules import image_rules

rules, folder = image_rules(Path(sys.argv[1])), Path(sys.argv[2])
Image.new("RGB", (64, 64)).save(file := io.BytesIO(), "PNG")
with open_image(reference(file.getvalue(), folder), rules) as image:
    decoded(image)
peak = lambda: int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
before, began, needed, loaded, refused = peak(), time.process_time(), 0, 0, ""
try:
    with open_image(reference("image", folder), rules) as image:
        needed = limits.decoding_bytes(image)
        image.load()
        loaded = peak() - before
    with open_image(reference("image", folder), rules) as image:
        grids = rules.layout(size_of(image)).grids
        shape = sum(rows * columns for rows, columns in grids), 3, rules.patch_size, rules.patch_size
        read_patches(image, rules, np.empty(shape, np.uint8))
except ValueError as error:
    refused = str(error)
found = {"needed": needed, "loaded": loaded, "grown": peak() - before, "seconds": time.process_time() - began, "refused": refused}
print(json.dumps(found))
"""  # noqa: E501


def measured(encoded: bytes, model: Path, folder: Path) -> dict[str, Any]:
    """The memory and time of an image in a fresh process."""
    (folder / "image").write_bytes(encoded)
    command = [sys.executable, "-c", PEAK, str(model), str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.long
def test_no_image_takes_more_than_its_share(tmp_path: Path):
    """The largest images that are read, and bombs: at most 200 MiB more in a fresh process, and the memory that was
    foretold."""
    model = write_folder(tmp_path, "qwen3_vl")
    one, red = solid(8192, "1"), Image.new("RGB", (4096, 4096), "red")
    largest = {
        "PNG of 1 bit": saved(one, "PNG"),
        "TIFF, group 4": saved(one, "TIFF", compression="group4"),
        "BMP of 1 bit": saved(one, "BMP"),
        "PNG of 16 bits": png(8192, 8192, depth=16),
        "gray PNG": png(8192, 8192),
        "JPEG": saved(solid(16384), "JPEG"),
        "CMYK JPEG": saved(red.convert("CMYK"), "JPEG"),
        "progressive JPEG": saved(red, "JPEG", progressive=True, subsampling=0),
        "color PNG": saved(red, "PNG"),
        "WebP": saved(Image.new("RGBA", (3500, 3500), (1, 2, 3, 4)), "WEBP"),
        "GIF": saved(red.convert("P"), "GIF"),
        "transparent PNG": saved(red.convert("RGBA"), "PNG"),
        "TIFF in one strip": saved(red, "TIFF", compression="tiff_lzw", strip_size=1 << 30),
    } | {name: made() for name, made in GROWING.items()}
    found = {name: measured(encoded, model, tmp_path) for name, encoded in largest.items()}
    assert {name: one for name, one in found.items() if one["grown"] > 200 * MIB or one["seconds"] > 3} == {}
    assert {name for name, one in found.items() if one["refused"]} == set(GROWING)
    # Decoding takes what is foretold. On top come a file that is mapped and what the allocator keeps.
    rest = {name: (found[name]["loaded"] - found[name]["needed"]) / MIB for name in found.keys() - GROWING.keys()}
    assert {name: mib for name, mib in rest.items() if not -24 < mib < 24} == {}


def test_threads_that_decode_take_turns(monkeypatch: pytest.MonkeyPatch):
    budget, held, most = limits._Budget(10), [0], [0]
    lock = threading.Lock()

    def work(num_bytes: int) -> None:
        with budget.take(num_bytes):
            with lock:
                held[0] += num_bytes
                most[0] = max(most[0], held[0])
            time.sleep(0.002)
            with lock:
                held[0] -= num_bytes

    threads = [threading.Thread(target=work, args=(n,)) for n in [3, 7, 4, 6, 5, 10, 1, 9] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (held, most) == ([0], [10])
    with budget.take(99):  # more than all of it works alone
        waiting = threading.Thread(target=work, args=(1,))
        waiting.start()
        waiting.join(0.02)
        assert waiting.is_alive()
    waiting.join(10)
    with pytest.raises(KeyError), budget.take(10):
        raise KeyError
    with budget.take(10):  # an error gives back what it took
        pass


def test_a_thumbnail_of_an_image_that_is_refused_is_gray():
    small = Image.open(io.BytesIO(thumbnail(b"data:" + GROWING["a small WebP"]())))
    assert small.getpixel((9, 9)) == (128, 128, 128)
