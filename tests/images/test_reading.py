"""References, headers and decoding of images, and hostile files."""

import base64
import io
import os
import resource
import struct
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from lean_ft.images.forms import MAX_BYTES
from lean_ft.images.reading import decoded, open_image, reference, size_of
from tests.images.pictures import odd_picture

COLORS = np.random.default_rng(0).integers(0, 256, (23, 40, 3), dtype=np.uint8)


def picture(kind: str = "PNG", **settings: Any) -> bytes:
    Image.fromarray(COLORS).save(file := io.BytesIO(), kind, **settings)
    return file.getvalue()


PNG = picture()
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def test_all_forms_of_an_image_are_read(tmp_path):
    (tmp_path / "a b.png").write_bytes(PNG)
    (tmp_path / "link.png").symlink_to(tmp_path / "a b.png")
    encoded: list[Any] = [
        PNG,
        bytearray(PNG),
        DATA_URL,
        {"bytes": PNG, "path": "gone.png"},
        {"base64": DATA_URL.split(",")[1]},
    ]
    encoded += [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "image", "image": PNG}]
    paths: list[Any] = [
        "a b.png",
        tmp_path / "a b.png",
        f"file://{tmp_path}/a b.png",
        {"bytes": None, "path": "a b.png"},
    ]
    paths += [{"image": "a b.png"}, {"url": "./a b.png"}]
    assert len({reference(form, tmp_path) for form in encoded}) == 1
    assert len({reference(form, tmp_path) for form in paths}) == 1
    for form in (*encoded, *paths, "link.png", Image.fromarray(COLORS)):
        with open_image(reference(form, tmp_path)) as image:
            assert size_of(image) == (40, 23)
            assert decoded(image).tobytes() == COLORS.tobytes()


def test_an_image_of_pillow_keeps_its_pixels(tmp_path):
    for mode in ("1", "L", "P", "LA", "PA", "RGBA", "CMYK", "YCbCr", "HSV", "I;16"):
        gray = (
            Image.fromarray(COLORS[..., 0].astype(np.uint16))
            if mode == "I;16"
            else Image.fromarray(COLORS).convert("L")
        )
        image = (
            gray if mode == "I;16" else Image.fromarray(COLORS).convert("RGBA" if "A" in mode else "RGB").convert(mode)
        )
        with open_image(reference(image, tmp_path)) as again:
            assert decoded(again).tobytes() == decoded(image).tobytes()


@pytest.mark.first(24)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_an_image_is_upright_and_its_size_needs_no_pixels(tmp_path, kind, mode, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(COLORS).convert("L" if mode == "CMYK" and kind in ("PNG", "WEBP") else mode)
    stored.save(tmp_path / "a", kind, exif=exif)
    encoded = (tmp_path / "a").read_bytes()
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    for form in ("a", encoded):
        with open_image(reference(form, tmp_path)) as image:
            assert size_of(image) == expected.size
            assert image._im is None  # nothing is decoded
            assert decoded(image).tobytes() == expected.tobytes()


def test_strips_are_put_on_white_like_the_whole_image(tmp_path, monkeypatch):
    monkeypatch.setattr("lean_ft.images.pixels._STRIP_PIXELS", 100)
    for number in (3, 8, 9, 13, 17, 18, 19):  # pictures with transparency that stand upright
        with open_image(reference(odd_picture(number), tmp_path)) as image:
            whole = image.convert("RGBA")
            expected = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")
        with open_image(reference(odd_picture(number), tmp_path)) as image:
            assert decoded(image).tobytes() == expected.tobytes()


def test_a_changed_or_deleted_file_is_noticed(tmp_path):
    (file := tmp_path / "a.png").write_bytes(PNG)
    known = reference("a.png", tmp_path)
    os.utime(file, ns=(0, 1))
    with pytest.raises(ValueError, match=r"a\.png: the image changed after"):
        open_image(known)
    file.unlink()
    with pytest.raises(ValueError, match=r"cannot read the image .*a\.png': No such file"):
        open_image(known)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes, colors: int = 2) -> bytes:
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colors, 0, 0, 0))
    return start + b"".join(chunks) + chunk(b"IDAT", zlib.compress(bytes(400))) + chunk(b"IEND", b"")


def tiff(num_strips: int) -> bytes:
    """A TIFF file that has a list of so many places of pixels."""
    tags = [
        (256, 4, 1, 100),
        (257, 4, 1, 100),
        (258, 3, 1, 8),
        (259, 3, 1, 5),
        (262, 3, 1, 1),
        (273, 4, num_strips, 126),
    ]
    tags += [(277, 3, 1, 1), (278, 4, 1, 1), (279, 4, 1, 1)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + b"\1" * (4 * num_strips)


def made(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def value(folder: Path) -> str:
        make(folder / "x")
        return "x"

    return value


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_BYTES + 1)


@cache
def bomb() -> bytes:
    return zlib.compress(bytes(1 << 28))


TOO_LARGE = "pixels; expected between 1 and 67108864"
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing file": (lambda folder: "gone.png", "No such file"),
    "a folder": (lambda folder: ".", "not a regular file"),
    "a pipe": (made(os.mkfifo), "not a regular file"),
    "a device": (lambda folder: "/dev/zero", "not a regular file"),
    "a loop of links": (made(lambda path: path.symlink_to(path)), "symbolic links"),
    "a huge file": (made(sparse), "bytes; the limit is 128 MiB"),
    "a long name": (
        lambda folder: "a" * 5000,
        "a text of 5000 characters, .*: neither a path nor base64 of an image file",
    ),
    "a zero byte": (lambda folder: "a\0b", "null byte"),
    "half a surrogate pair": (lambda folder: "\ud800", "cannot read the image"),
    "a web page": (lambda folder: {"image_url": {"url": "HTTPS://x/a.png"}}, "download the image first"),
    "a number": (lambda folder: 5, "an image is 5; expected a path"),
    "an empty text": (lambda folder: "", "an image is ''; expected a path"),
    "nothing": (lambda folder: {"bytes": None, "path": None}, "expected bytes, base64, url, path or image"),
    "deep nesting": (lambda folder: nested(5000), r"an image is \[None\]"),
    "base64 of a number": (lambda folder: {"base64": 5}, "not valid base64"),
    "cut base64": (lambda folder: DATA_URL[:-3], "not valid base64"),
    "a data URL without base64": (lambda folder: "data:image/png,x", "expected data:image/png;base64"),
    "a huge data URL": (lambda folder: "data:image/png;base64," + "A" * (MAX_BYTES * 4 // 3 + 8), "more than 128 MiB"),
    "no bytes": (lambda folder: b"", "in none of the formats"),
    "text": (lambda folder: b"GIF89a", "broken or incomplete|in none of"),
    "another format": (lambda folder: picture("PPM"), "in none of the formats"),
    "cut": (lambda folder: picture("JPEG")[:-300], "broken or incomplete: .*truncated"),
    "cut in the header": (lambda folder: PNG[:20], "in none of|broken or incomplete"),
    "no pixels": (lambda folder: png(0, 5), "in none of the formats"),
    "too many pixels": (lambda folder: png(1 << 15, 1 << 14), TOO_LARGE),
    "too wide": (lambda folder: png((1 << 31) - 1, 1), TOO_LARGE),
    "a small file of many pixels": (
        lambda folder: png(1 << 13, 1 << 13),
        "would take 256 MiB of memory; the limit for a file of 71 bytes is 192 MiB",
    ),
    "as many pixels as allowed, and none in the file": (lambda folder: png(1 << 13, 1 << 12), "truncated"),
    "a compressed text": (lambda folder: png(10, 10, chunk(b"zTXt", b"x\0\0" + bomb())), "too large"),
    "a compressed profile": (lambda folder: png(10, 10, chunk(b"iCCP", b"x\0\0" + bomb())), "too large"),
    "a long list of strips": (lambda folder: tiff(1 << 20), "broken or incomplete"),
}


def nested(depth: int) -> Any:
    value: Any = {"image": [None]}
    for _ in range(depth):
        value = {"image": value}
    return value


def read(value: Any, folder: Path) -> None:
    with open_image(reference(value, folder)) as image:
        size_of(image)
        decoded(image)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case == "a huge data URL" else ()) for case in HOSTILE]
)
def test_a_hostile_image_is_refused_with_a_reason(tmp_path, case):
    make, expected = HOSTILE[case]
    value, before, start = make(tmp_path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=expected) as raised:
        read(value, tmp_path)
    assert len(str(raised.value)) < 500
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10
