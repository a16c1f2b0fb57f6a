"""Open the images of rows, from paths or bytes.

A reference names an image in stored data: a path with the file's size and time, or the encoded image itself. Equal
references are equal images. Every fault of an image (missing, changed, broken, too large) is a ValueError.

Left out: URLs, which are never fetched, and an EXIF orientation stored after the pixels of a PNG file, because reading
it takes as long as decoding the image.
"""

import base64
import errno
import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from lean_ft.images import decoding_limits as limits
from lean_ft.images.cuts import Size
from lean_ft.images.decoding_limits import RefusedImage
from lean_ft.images.forms import MAX_BYTES, image_in, short
from lean_ft.images.pixels import Upright, check_colors, is_gray, is_upright, orientation
from lean_ft.images.rules import ImageRules

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # JPEG opens MPO too
_WEBP = (b"RIFF", b"WEBP")

Image.MAX_IMAGE_PIXELS = None  # open_image has its own limit, and needs no warning
warnings.filterwarnings("ignore", module=r"PIL\.")  # broken metadata, which nothing here reads


def reference(value: Any, folder: Path) -> bytes:
    """The reference of an image in a row.

    value: a path, relative to `folder`; a data URL; base64 text; encoded bytes; an image of Pillow, which is stored as
    PNG; or an object that has one of these (`lean_ft.images.forms`).

    The image is not opened. Raises ValueError for any other value, a missing file and an http URL.
    """
    value = image_in(value)
    if isinstance(value, Image.Image):
        value = _as_png(value)
    if isinstance(value, bytes | bytearray | memoryview):
        if len(value) > MAX_BYTES:
            raise ValueError(f"an image has {len(value)} bytes; the limit is {MAX_BYTES >> 20} MiB.")
        return b"data:" + bytes(value)
    if isinstance(value, str) and value.lower().startswith(("http://", "https://")):
        raise ValueError(f"an image is the URL {short(value)}. URLs are not fetched: download the image first.")
    if not isinstance(value, str | Path) or value == "":
        raise ValueError(
            f"an image is {short(value)}; expected a path, a data URL, base64 text or the bytes of an image file."
        )
    path = os.path.abspath(folder / str(value).removeprefix("file://"))
    status = _file_status(path)
    return b"file:%d:%d:%s" % (status.st_size, status.st_mtime_ns, os.fsencode(path))


def data_url(value: Any) -> str:
    """The data URL of the encoded bytes of an image, or of an image of Pillow, for rows as JSON. Raises TypeError for
    other values, as `json.dumps` does."""
    if not isinstance(value, bytes) and not hasattr(value, "getexif"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    encoded = reference(value, Path()).removeprefix(b"data:")
    return f"data:image;base64,{base64.b64encode(encoded).decode()}"


def open_image(reference: bytes, rules: ImageRules | None = None) -> Image.Image:
    """Open an image without decoding it. Close it, or use it as a context manager.

    rules: of the model's family, to count the memory for resizing too. A JPEG beyond the limits is opened at a lower
    size. Raises ValueError if the image is unreadable or takes too much memory, or if its file changed since its
    reference was made.
    """
    kind, _, rest = reference.partition(b":")
    if kind == b"data":
        name, num_bytes = "the image", len(rest)
    else:
        size, time, path = rest.split(b":", 2)
        name, num_bytes = os.fsdecode(path), int(size)
        status = _file_status(name)
        if (status.st_size, status.st_mtime_ns) != (num_bytes, int(time)):
            raise ValueError(f"{name}: the image changed after the data was prepared. Prepare the data again.")
    with _plain_errors(name):
        _check_canvas(rest[:30] if kind == b"data" else _start_of(name))
        image = Image.open(io.BytesIO(rest) if kind == b"data" else name, formats=FORMATS)
    try:
        with _plain_errors(name):
            check_colors(image)
            limits.fit(image, num_bytes)
            limits.check_need(_whole_bytes(image), num_bytes)
        if rules is not None:
            needed = _working_bytes(image, rules)  # raises the family's own errors
            with _plain_errors(name):
                limits.check_need(needed, num_bytes)
    except BaseException:
        image.close()
        raise
    return image


def path_of(reference: bytes) -> str | None:
    """The path of an image, or None if the reference is the encoded image."""
    return os.fsdecode(reference.split(b":", 3)[3]) if reference.startswith(b"file:") else None


def size_of(image: Image.Image) -> Size:
    """The upright size, from the header alone."""
    width, height = image.size
    return Size(height, width) if orientation(image) >= 5 else Size(width, height)


def check(image: Image.Image) -> None:
    """Raise ValueError if an image is broken behind its header, at less than the cost of decoding it. The image cannot
    be used then.

    A JPEG is decoded at an eighth of its size, the checksums of a PNG are compared, and any other image is decoded.
    """
    with _plain_errors(_name_of(image)):
        if isinstance(image, PngImageFile):
            image.verify()
        else:
            image.draft(None, (1, 1))
            with limits.memory(limits.decoding_bytes(image)):
                image.load()


def decoded(image: Image.Image) -> Image.Image:
    """The upright image in RGB, on white where it is transparent. Raises ValueError if it is broken."""
    with _plain_errors(_name_of(image)), limits.memory(_whole_bytes(image)):
        return _in_rgb(Upright(image))


def resized(image: Image.Image, rules: ImageRules, size: Size) -> bytes:
    """A PNG file of the upright image in RGB in this size, resized as the rules say: its pixels are those of
    `read_patches`. Raises ValueError if the image is broken."""
    file, encoding_bytes = io.BytesIO(), 8 * size.width * size.height  # the pixels in RGB, and the file
    with _plain_errors(_name_of(image)), limits.memory(_working_bytes(image, rules) + encoding_bytes):
        _in_rgb(Upright(image).resized(size, rules.resample)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def read_patches(image: Image.Image, rules: ImageRules, patches: np.ndarray) -> None:
    """Write an image's patches by the rules of a family. Raises ValueError if it is broken."""
    with _plain_errors(_name_of(image)), limits.memory(_working_bytes(image, rules)):
        rules.patches(Upright(image), patches)


def thumbnail(reference: bytes, side: int = 160) -> bytes:
    """A small JPEG of an image, or of a gray square if it cannot be read."""
    try:
        with open_image(reference) as image, _plain_errors(""), limits.memory(_whole_bytes(image)):
            whole = Upright(image).whole()
            whole.thumbnail((side, side))
            small = whole.convert("RGB")
    except ValueError:
        small = Image.new("RGB", (side, side), "gray")
    small.save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def thumbnail_url(reference: bytes) -> str:
    """The data URL of an image's `thumbnail`."""
    return f"data:image/jpeg;base64,{base64.b64encode(thumbnail(reference)).decode()}"


def _whole_bytes(image: Image.Image) -> int:
    """The most memory that an image takes until it is upright and in gray or RGB."""
    pixels = image.width * image.height
    copy = 0 if is_upright(image) else _pixel_bytes(image)
    return max(limits.decoding_bytes(image), pixels * (limits.stored_bytes(image.mode) + copy))


def _working_bytes(image: Image.Image, rules: ImageRules) -> int:
    """The most memory that an image takes until it is cut into patches."""
    return max(_whole_bytes(image), rules.working_bytes(size_of(image), _pixel_bytes(image)))


def _pixel_bytes(image: Image.Image) -> int:
    return 1 if is_gray(image) else 4


def _in_rgb(image: Upright) -> Image.Image:
    whole = image.whole()
    return whole if whole.mode == "RGB" else whole.convert("RGB")


def _check_canvas(start: bytes) -> None:
    """Raise RefusedImage for a WebP image with too many pixels."""
    if (start[:4], start[8:12]) == _WEBP:
        canvas = limits.webp_canvas(start)
        if canvas is None:
            raise ValueError("its header names no size.")
        limits.check_size(canvas)


def _start_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(30)


def _name_of(image: Image.Image) -> str:
    return getattr(image, "filename", "") or "the image"


def _as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    with _plain_errors("the image"):
        limits.check_size(image.size)
        _in_rgb(Upright(image)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _file_status(path: str) -> os.stat_result:
    """The status of a regular file that is not too large."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            text = f"a text of {len(os.path.basename(path))} characters, {short(os.path.basename(path))}"
            raise ValueError(f"an image is {text}: neither a path nor base64 of an image file.") from None
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot read the image {short(path)}: {reason}.") from None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would never end
        raise ValueError(f"the image {short(path)} is not a regular file.")
    if status.st_size > MAX_BYTES:
        raise ValueError(f"the image {short(path)} has {status.st_size} bytes; the limit is {MAX_BYTES >> 20} MiB.")
    return status


@contextmanager
def _plain_errors(name: str) -> Iterator[None]:
    """Turn whatever Pillow raises for a broken file into a ValueError."""
    try:
        yield
    except Image.UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        raise ValueError(f"{name} is in none of the formats {formats}, or in a form of one that is not read.") from None
    except RefusedImage as error:
        raise ValueError(f"{name} is not read: {error}") from None
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{name} is broken or incomplete: {short(error)}") from None
