"""Colors of images: 16 bits are scaled to 8, transparent pixels become white, and values without a known range are
refused."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from lean_ft.images.reading import decoded, open_image, reference

RAMP = np.tile(np.linspace(0, 1, 96), (8, 1))
IN_8_BITS, IN_16_BITS = (RAMP * 255).astype(np.uint8), (RAMP * 65535).astype(np.uint16)


def pixels(value: Any) -> np.ndarray:
    with open_image(reference(value, Path())) as image:
        return np.asarray(decoded(image))


def saved(image: Image.Image, kind: str, **settings: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **settings)
    return file.getvalue()


def png(depth: int, color: int, row: bytes, *chunks: tuple[bytes, bytes], width: int = 2) -> bytes:
    """A PNG file of one row."""
    header = struct.pack(">IIBBBBB", width, 1, depth, color, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    encoded = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(encoded)


def tiff(values: np.ndarray, **tags: int) -> bytes:
    """A TIFF file in 16 bits, with other tags than Pillow writes."""
    directory = ImageFileDirectory_v2()
    for tag, value in tags.items():
        directory[int(tag[1:])] = value
    return saved(Image.fromarray(values), "TIFF", tiffinfo=directory)


def test_a_ramp_of_16_bits_is_the_ramp_of_8_bits():
    big_endian = Image.frombytes("I;16B", (96, 8), IN_16_BITS.astype(">u2").tobytes())
    ramps = [
        saved(Image.fromarray(IN_16_BITS), "PNG"),
        *(saved(Image.fromarray(IN_16_BITS), "TIFF", compression=form) for form in (None, "tiff_lzw")),
        saved(big_endian, "TIFF"),
        big_endian,
        Image.fromarray(IN_16_BITS),
        tiff(65535 - IN_16_BITS, t262=0),  # white is zero
    ]
    for ramp in ramps:
        found = pixels(ramp)
        assert found.shape == (8, 96, 3)
        assert np.abs(found.astype(int) - IN_8_BITS[..., None]).max() <= 1
    orientation = Image.Exif()
    orientation[0x0112] = 6
    turned = pixels(saved(Image.fromarray(IN_16_BITS), "PNG", exif=orientation))
    assert np.abs(np.rot90(turned, 1)[..., 0].astype(int) - IN_8_BITS).max() <= 1


def test_colors_of_16_bits_and_their_transparency():
    assert pixels(png(16, 2, struct.pack(">6H", 40000, 256, 65535, 0, 1, 2))).tolist() == [[[156, 1, 255], [0, 0, 0]]]
    half = pixels(png(16, 4, struct.pack(">4H", 0, 32768, 65535, 65535)))  # gray with alpha
    assert half.tolist() == [[[127] * 3, [255] * 3]]


@pytest.mark.parametrize(
    ("depth", "row", "value"), [(16, b"\x40\0\x40\1", 16384), (4, b"\x01", 0), (2, b"\x10", 0), (1, b"\x40", 0)]
)
def test_the_transparent_gray_of_a_png_becomes_white(depth: int, row: bytes, value: int):
    """The first of two pixels is transparent; the other has the next value."""
    found = pixels(png(depth, 0, row, (b"tRNS", struct.pack(">H", value))))[0, :, 0].tolist()
    assert found == [255, {16: 64, 4: 17, 2: 85, 1: 255}[depth]]


@pytest.mark.parametrize(
    ("image", "kind", "reason"),
    [
        (Image.fromarray((RAMP * 65535).astype(np.int32), mode="I"), "TIFF",
            "its values are signed integers or integers of 32 bits"),
        (Image.fromarray(RAMP.astype(np.float32), mode="F"), "TIFF", "its values are fractions"),
    ],
)  # fmt: skip
def test_values_without_a_known_range_are_refused(tmp_path: Path, image: Image.Image, kind: str, reason: str):
    image.save(tmp_path / "ramp.tif", kind)
    with pytest.raises(ValueError, match=rf"ramp\.tif is not read: {reason}.* Scale them"):
        open_image(reference("ramp.tif", tmp_path))
    with pytest.raises(ValueError, match=f"the image is not read: {reason}"):
        reference(image, tmp_path)


def test_other_modes_equal_those_of_pillow():
    colors = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8))
    for mode, kind in (
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
        ("YCbCr", "TIFF"),
        ("LAB", "TIFF"),
        ("1", "PNG"),
        ("P", "GIF"),
    ):
        encoded = saved(Image.new("LAB", (9, 11), (120, 200, 30)) if mode == "LAB" else colors.convert(mode), kind)
        assert pixels(encoded).tobytes() == Image.open(io.BytesIO(encoded)).convert("RGB").tobytes()
    premultiplied = colors.convert("RGBA").convert("RGBa")
    assert pixels(premultiplied).tobytes() == colors.tobytes()
    assert pixels(colors.convert("LA").convert("La")).tobytes() == colors.convert("L").convert("RGB").tobytes()
