"""Open the images of rows, on paths or as bytes.

A reference names an image in stored data: a path with the file's size and time, or the encoded image itself. Equal references
are equal images.
"""

from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageOps

MAX_PIXELS = 1 << 28  # of an image's header; a larger image is refused before it is decoded
_TURNED = range(5, 9)  # EXIF orientations that swap width and height


class Size(NamedTuple):
    width: int
    height: int


def reference(value: Any, folder: Path) -> bytes:
    """The reference of an image in a row: a path relative to `folder`, a data URL, encoded bytes, or an image as `datasets` stores
    it.

    Raises ValueError for any other value, a missing file and an http URL.
    """
    raise NotImplementedError


def open_image(reference: bytes) -> Image.Image:
    """Open an image and decode nothing. Raises ValueError if it is unreadable or too large, or if its file changed."""
    raise NotImplementedError


def size_of(image: Image.Image) -> Size:
    """The upright size, from the header alone."""
    width, height = image.size
    return Size(height, width) if image.getexif().get(0x0112) in _TURNED else Size(width, height)


def decoded(image: Image.Image) -> Image.Image:
    """The upright image in RGB, on white where it is transparent."""
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
